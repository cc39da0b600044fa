"""Who may call whom, read from the imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest

from tests.support.running import ROOT

PACKAGE = ROOT / "ckpttool"
ROOMS = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
TRAIN = sorted((ROOT / "train").glob("*.py"))


@dataclass(frozen=True)
class Imported:
    """One import: the full name of the module, and whether it happens only when a function is called."""

    module: str
    later: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


class _Imports(ast.NodeVisitor):
    def __init__(self, package: str) -> None:
        self.package = package.split(".")
        self.found: list[Imported] = []
        self.depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Imported(name.name, self.depth > 0) for name in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        if node.module:
            self.found.append(Imported(".".join([*base, node.module]), self.depth > 0))
        else:  # from . import options, formats
            self.found += [Imported(".".join([*base, name.name]), self.depth > 0) for name in node.names]


@cache
def tree_of(room: Path) -> ast.Module:
    return ast.parse((PACKAGE / room).read_text())


@cache
def imports(room: Path) -> list[Imported]:
    visitor = _Imports(".".join(["ckpttool", *room.parts[:-1]]))
    visitor.visit(tree_of(room))
    return visitor.found


def node(name: str) -> str:
    """A room of the library, or one of the two folders as a whole."""
    parts = name.split(".")[1:]
    return "" if not parts else parts[0]


def calls(room: Path) -> Iterator[ast.Call]:
    return (item for item in ast.walk(tree_of(room)) if isinstance(item, ast.Call))


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_only_the_command_line_knows_click_and_tqdm(room: Path) -> None:
    if room.parts[0] != "cli":
        assert not {found.top for found in imports(room)} & {"click", "tqdm"}


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_torch_is_imported_when_it_is_needed_or_the_first_line_says_so(room: Path) -> None:
    at_once = [found for found in imports(room) if found.top in ("torch", "torchvision") and not found.later]
    first_line = str(ast.get_docstring(tree_of(room))).splitlines()[0]
    assert not at_once or "torch" in first_line.lower()


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_numpy_and_safetensors_are_never_imported_at_once(room: Path) -> None:
    at_once = {found.top for found in imports(room) if not found.later}
    assert not at_once & {"numpy", "safetensors"}


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_the_library_knows_nothing_of_the_trainer(room: Path) -> None:
    assert "train" not in {found.top for found in imports(room)}


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_the_library_knows_nothing_of_the_command_line(room: Path) -> None:
    if room.parts[0] != "cli" and room.name != "__main__.py":
        assert "cli" not in {node(found.module) for found in imports(room) if found.top == "ckpttool"}


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_the_library_returns_values_and_never_prints(room: Path) -> None:
    names = {call.func.id for call in calls(room) if isinstance(call.func, ast.Name)}
    assert "print" not in names
    assert "input" not in names


GROUND = {"ahead", "checksum", "dtypes", "errors", "tensor", "transfer", "strided", "elements", "inert"}


def test_the_ground_rests_on_nothing_above_it() -> None:
    for name in GROUND:
        found = {node(i.module) for i in imports(Path(f"{name}.py")) if i.top == "ckpttool"}
        assert found <= GROUND, name


# The page: every room stands in one of its tables, and imports only from those above it.

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
OPEN = ("formats", "diagnosis")  # folders whose files have a table of their own
FOLDERS = {*OPEN, "cli"}


def rows(text: str) -> list[str]:
    """The rooms that a table names in its first column, in order, as modules: `formats`, `torch_zip`."""
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name.strip("/").removesuffix(".py") for cell in first for name in re.findall(r"`([^`]+)`", cell)]


def order() -> list[str]:
    """All rooms from the ground up, those of a folder in the place of that folder."""
    text = PAGE.partition("## Modules")[2].partition("## Who may call whom")[0]
    whole, *inside = re.split(r"^Inside `", text, flags=re.MULTILINE)
    found = rows(whole)
    for part in inside:
        folder = part.partition("/`")[0]
        at = found.index(folder)
        found[at:at] = [f"{folder}.{name}" for name in rows(part)]
    return found


def place(module: str) -> str:
    """A module as the page names it: a room, also of a folder with a table; the command line is one."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] and parts[0] in OPEN else "".join(parts[:1])


def named_rooms() -> dict[str, Path]:
    """Every file that the page has to name, under its name there."""
    inner = [room for room in ROOMS if room.name not in ("__init__.py", "__main__.py")]
    return {place(".".join(["ckpttool", *room.with_suffix("").parts])): room for room in inner}


def test_every_room_stands_in_the_table_of_the_page_once_and_nothing_else_does() -> None:
    found = [name for name in order() if name not in FOLDERS | {"train"}]
    assert sorted(found) == sorted(set(named_rooms()) - FOLDERS)


@pytest.mark.parametrize("name", [name for name in named_rooms() if name not in FOLDERS])
def test_a_room_imports_only_from_those_above_it_in_the_table(name: str) -> None:
    above = order()[: order().index(name)]
    used = {place(i.module) for i in imports(named_rooms()[name]) if i.top == "ckpttool"} - {"", name}
    assert used <= set(above), f"{name} imports from below: {sorted(used - set(above))}"


def test_the_order_can_tell_a_room_that_imports_from_below() -> None:
    """Else the test above could not fail."""
    assert order().index("errors") < order().index("formats.torch_zip") < order().index("cli")
    assert place("ckpttool.formats.folders.dcp.NAME") == "formats.dcp"
    assert [place(m) for m in ("ckpttool", "ckpttool.cli.inspect", "ckpttool.transforms.keys")] == [
        "",
        "cli",
        "keys",
    ]


@pytest.mark.parametrize("path", TRAIN, ids=lambda path: path.name)
def test_no_file_of_the_trainer_bears_the_name_of_a_standard_module(path: Path) -> None:
    """`torchrun train/main.py` puts that folder first on the path."""
    assert path.stem not in sys.stdlib_module_names


def test_the_wheel_ships_the_library_alone() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is of Python 3.11")
    import tomllib

    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["packages"] == ["ckpttool"]


def test_importing_the_library_imports_neither_torch_nor_the_command_line() -> None:
    script = (
        "import sys, ckpttool; print([n for n in ('torch', 'numpy', 'click', 'tqdm') if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "[]\n"


def test_importing_the_library_imports_no_room_of_it() -> None:
    """`--help` and the completion of a shell wait for it."""
    script = "import sys, ckpttool; print([n for n in sys.modules if n.startswith('ckpttool.')])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "[]\n"


def test_every_public_name_is_there_for_use_and_for_the_type_checker_and_hides_no_room() -> None:
    import ckpttool

    tree = ast.parse(Path(ckpttool.__file__).read_text())
    typed = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    ]
    assert sorted(typed) == sorted(ckpttool.__all__)
    assert set(ckpttool.__all__) <= set(dir(ckpttool))
    assert not set(ckpttool.__all__) & set(named_rooms())
    for name in ckpttool.__all__:
        assert isinstance(getattr(ckpttool, name), FunctionType | type), name


def test_a_room_is_an_attribute() -> None:
    import ckpttool

    assert isinstance(ckpttool.files.digest.digest, FunctionType)


def test_a_name_that_is_not_public_is_not_there() -> None:
    import ckpttool

    assert not hasattr(ckpttool, "no_such_name")
