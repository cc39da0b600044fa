"""Who may import whom, read from the source; and the page that says so. Each test lists its offenders."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from ckpttool.rooms import ROOMS
from tests.support.generated_page import generated, regenerate
from tests.support.running import ROOT

pytestmark = pytest.mark.lint

PACKAGE = ROOT / "ckpttool"
FILES = sorted(PACKAGE.rglob("*.py"))
TRAINER = ROOT / "train"
TRAINER_FILES = sorted(TRAINER.rglob("*.py"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE = ROOT / "docs" / "architecture.md"
MARKS = "<!-- tables -->\n", "<!-- /tables -->"

CORE = ["tensors", "files", "remote", "inert_pickle", "checkpoint", "formats", "cli"]
"""The folders of the core, from the ground up: each imports only from those before it."""

OF_TRAINER = ["config", "data", "tasks", "model", "log", "launch", "trainer", "checkpoint", "run"]
"""The folders of the trainer, likewise."""

OF_SHELL = ("command", "converting", "folder_page", "page")
"""The files of a room that parse and print, and so may import click."""

LIBRARIES = {"torch", "numpy", "io", "pickle", "select", "copy", "json"}


@dataclass(frozen=True)
class Import:
    """One import statement: the module's full name; whether it runs only when a function is called, or never,
    as it is for the type checker."""

    module: str
    later: bool
    never: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


class _Visitor(ast.NodeVisitor):
    """Collect imports; what stands under `if TYPE_CHECKING` never runs."""

    def __init__(self, package: tuple[str, ...]) -> None:
        self.package = package
        self.found: list[Import] = []
        self.depth = 0
        self.never = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def visit_If(self, node: ast.If) -> None:
        self.never = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for part in node.body:
            self.visit(part)
        self.never = False
        for part in node.orelse:
            self.visit(part)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(alias.name, self.depth > 0, self.never) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else ()
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            whole = f"{module}.{alias.name}"
            found = whole if whole in modules() else lazy_names(module).get(alias.name, module)
            self.found.append(Import(found, self.depth > 0, self.never))


@cache
def modules() -> dict[str, Path]:
    """Return every module of both by its full name; a folder's name stands for its `__init__.py`."""
    return {name_of(path): path for path in (*FILES, *TRAINER_FILES)}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def lazy_names(package: str) -> dict[str, str]:
    """Return where each public name of a folder is defined, from its call of `lazy.attributes`."""
    path = modules().get(package)
    if path is None or path.name != "__init__.py":
        return {}
    for call in calls(path):
        if isinstance(call.func, ast.Name) and call.func.id == "attributes":
            table = ast.literal_eval(call.args[1])
            return {
                name: f"{package}.{module or name}"
                for module, names in table.items()
                for name in names.split()
            }
    return {}


@cache
def all_imports_of(path: Path) -> tuple[Import, ...]:
    visitor = _Visitor(path.relative_to(ROOT).parent.parts)
    visitor.visit(tree_of(path))
    return tuple(visitor.found)


def imports_of(path: Path) -> list[Import]:
    """Return those that run."""
    return [each for each in all_imports_of(path) if not each.never]


def own_imports(path: Path, imports: Iterable[Import] | None = None) -> set[str]:
    """Return the modules of both that a file imports, also through the lazy names of a folder."""
    found = {each.module for each in imports or imports_of(path)} & set(modules())
    found |= {where for each in found if each != "ckpttool" for where in lazy_names(each).values()}
    return found - {name_of(path), "ckpttool"}


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, empty where there is none."""
    return (ast.get_docstring(tree_of(path)) or "").partition("\n")[0]


def levels() -> dict[str, int]:
    """Return how many imports lie below each module, on the longest way down to one that imports nothing.

    Raises:
        ValueError: the imports form a circle; names it.
    """
    heights: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            raise ValueError(f"a circle of imports: {' -> '.join((*above[above.index(name) :], name))}")
        if name not in heights:
            path = modules()[name]
            # For the type checker a folder's `__init__.py` names what is in it; it knows nothing of that.
            below = own_imports(path, None if path.name == "__init__.py" else all_imports_of(path))
            heights[name] = max((1 + height(each, (*above, name)) for each in below), default=0)
        return heights[name]

    for name in modules():
        height(name, ())
    return heights


# ---- the rules -----------------------------------------------------------------------------------------


def room_of(path: Path) -> str:
    """Return the room of the package that a file lies in; `core` for the core and what lies beside it."""
    return first if (first := path.relative_to(PACKAGE).parts[0]) in ROOMS else "core"


def is_shell(path: Path) -> bool:
    """Return whether a file is of the command line: it parses and prints."""
    parts = path.relative_to(PACKAGE).parts
    return parts[:2] == ("core", "cli") or (parts[0] in ROOMS and path.stem in OF_SHELL)


def at_height(module: str) -> int:
    """Return where in the core a module lies, from the ground up; what is beside the folders is below."""
    parts = module.split(".")
    in_core = parts[1:2] == ["core"] and len(parts) > 3
    return CORE.index(parts[2]) if in_core and parts[2] in CORE else -1


def tops(path: Path, *, at_once: bool = False) -> set[str]:
    """Return the packages that a file imports; with `at_once` those that importing it imports."""
    return {each.top for each in imports_of(path) if not (at_once and each.later)}


def shown(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_the_folders_are_those_of_the_plan() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {"core", *ROOMS}
    assert {path.parent.name for path in (PACKAGE / "core").glob("*/__init__.py")} == set(CORE)
    assert {path.parent.name for path in TRAINER_FILES} == {*OF_TRAINER, "train"}


def test_a_folder_of_the_core_imports_only_from_those_before_it() -> None:
    offenders = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in FILES
        for module in own_imports(path)
        if 0 <= at_height(name_of(path)) < at_height(module)
    ]
    assert offenders == []


def test_the_core_imports_no_room_and_a_room_only_those_that_it_declares() -> None:
    offenders = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in FILES
        if path.parent != PACKAGE
        for each in all_imports_of(path)
        for module in own_imports(path, [each])
        if room_of(modules()[module]) not in ("core", room_of(path), *ROOMS.get(room_of(path), ()))
    ]
    assert offenders == []


def test_rooms_need_rooms_that_are_there_and_few_of_them() -> None:
    needed = [each for needs in ROOMS.values() for each in needs]
    assert {*needed} <= {*ROOMS}
    assert len(needed) <= 12


def test_a_room_of_the_trainer_imports_only_from_those_before_it() -> None:
    """What lies next to the rooms is a program, which no room imports, or what all of them print with."""
    order = {name: number for number, name in enumerate(OF_TRAINER)}
    offenders = [
        f"{path.relative_to(TRAINER)} imports {module}"
        for path in TRAINER_FILES
        if path.parent != TRAINER
        for module in own_imports(path)
        if module.startswith("train.") and module not in ("train", "train.console")
        if order.get(module.split(".")[1], len(OF_TRAINER)) > order[path.parent.name]
    ]
    assert offenders == []


def is_neither_empty_nor_lazy(path: Path) -> bool:
    at_once = {each.module for each in imports_of(path) if not each.later}
    return bool(at_once - {"__future__", "typing", "ckpttool.core.lazy"})


def knows_the_trainer_or_the_command_line(path: Path) -> bool:
    names = [each.module for each in imports_of(path) if path.name != "__main__.py"]
    of_shell = not is_shell(path) and any(name in modules() and is_shell(modules()[name]) for name in names)
    return of_shell or any(name.partition(".")[0] == "train" for name in names)


def prints(path: Path) -> bool:
    names = {call.func.id for call in calls(path) if isinstance(call.func, ast.Name)}
    return bool(names & {"print", "input"})


BREAKS: dict[str, Callable[[Path], object]] = {
    "a folder's init is empty or lazy": lambda path: (
        path.name == "__init__.py" and path.parent.name != "cli" and is_neither_empty_nor_lazy(path)
    ),
    "only the command line imports click and tqdm": lambda path: (
        not is_shell(path) and tops(path) & {"click", "tqdm"}
    ),
    "torch is imported in functions or by a file whose first line says so": lambda path: (
        tops(path, at_once=True) & {"torch", "torchvision"} and "torch" not in first_line(path).lower()
    ),
    "numpy and safetensors are imported in functions": lambda path: (
        tops(path, at_once=True) & {"numpy", "safetensors"}
    ),
    "the library knows neither the trainer nor the command line": knows_the_trainer_or_the_command_line,
    "the library returns values and never prints": prints,
    "no file bears the name of a library": lambda path: path.stem in LIBRARIES,
    "every module says in its first line what it is for": lambda path: (
        not first_line(path) and path.name != "__main__.py"
    ),
}
"""By rule, what breaks it."""


@pytest.mark.parametrize("rule", BREAKS)
def test_every_file_of_the_package_keeps_the_rule(rule: str) -> None:
    assert shown([path for path in FILES if BREAKS[rule](path)]) == []


def test_no_program_of_the_trainer_bears_the_name_of_a_standard_module() -> None:
    """`torchrun train/main.py` puts train/ first on the path: there none may be hidden."""
    assert shown([path for path in TRAINER.glob("*.py") if path.stem in sys.stdlib_module_names]) == []


def test_no_imports_form_a_circle_and_one_would_be_found() -> None:
    heights = levels()
    of_package = "ckpttool.inspecting.command", "ckpttool.core.formats.reading", "ckpttool.core.tensors.ref"
    for tower in (of_package, ("train.main", "train.run.run", "train.trainer.trainer")):
        above, middle, below = (heights[name] for name in tower)
        assert above > middle > below
    assert heights["ckpttool.errors"] == 0
    assert isinstance(tree_of(PACKAGE / "errors.py"), ast.Module)


def test_no_test_imports_another() -> None:
    import_of_test = re.compile(r"^\s*(from|import) tests\.(\w+\.)*test_", re.MULTILINE)
    every = (ROOT / "tests").rglob("*.py")
    assert shown([path for path in every if import_of_test.search(path.read_text("utf-8"))]) == []


def test_the_wheel_ships_the_package_alone() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib, which came with Python 3.11")
    import tomllib

    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["packages"] == ["ckpttool"]


# ---- the pages -----------------------------------------------------------------------------------------


def test_the_docs_name_no_file_that_is_not_there() -> None:
    """A path with a folder is looked for from the root; examples of users' files have no such folder."""
    folders = "ckpttool|train|tests|benchmarks|docs|examples"
    named = re.compile(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*\w\.(?:py|md))")
    offenders = [
        f"{page.name}: {name}"
        for page in TEXTS
        for name in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert offenders == []


def sentence(path: Path) -> str:
    return first_line(path).removesuffix(".").replace("|", "\\|")


def tables() -> Iterator[str]:
    """Yield the generated lines of the page: what each folder is for, from the first lines of the modules."""
    yield from ("", "| in `core/` | purpose |", "|---|---|")
    yield from (f"| `{name}/` | {sentence(PACKAGE / 'core' / name / '__init__.py')} |" for name in CORE)
    yield from ("", "| room | purpose | needs |", "|---|---|---|")
    for name, needs in ROOMS.items():
        yield f"| `{name}/` | {sentence(PACKAGE / name / '__init__.py')} | {', '.join(needs)} |"
    yield "\n"


def files() -> Iterator[str]:
    """Yield what each file of the package is for, in each folder from the ground up: `make map`."""
    heights = levels()
    for folder in ("", "core", *ROOMS):
        paths = (PACKAGE / folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
        for path in sorted(paths, key=lambda path: (heights[name_of(path)], str(path))):
            if path.name not in ("__init__.py", "__main__.py"):
                yield f"{path.relative_to(PACKAGE.parent)}: {sentence(path)}"


def test_the_tables_of_the_page_are_those_of_the_modules() -> None:
    made = generated(PAGE, *MARKS)
    assert made == "\n".join(tables()), "docs/architecture.md is stale: run `make docs` and commit it"


def test_the_map_shows_every_file_of_the_package() -> None:
    shown_files = [line.partition(":")[0] for line in files()]
    assert sorted(shown_files) == shown([path for path in FILES if not path.name.startswith("__")])


def test_the_page_names_every_room_of_the_trainer() -> None:
    rooms = {path.parent.name for path in TRAINER.glob("*/*.py")}
    of_trainer = PAGE.read_text(encoding="utf-8").partition("## The trainer")[2]
    assert set(re.findall(r"^\| `(\w+)/` \|", of_trainer, re.MULTILINE)) == rooms


if __name__ == "__main__":
    if "--map" in sys.argv:
        print(*files(), sep="\n")
    else:
        regenerate(PAGE, *MARKS, "\n".join(tables()))
