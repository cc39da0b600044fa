"""The imports of the package and of the trainer, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.running import ROOT

PACKAGE = ROOT / "ckpttool"
FILES = sorted(PACKAGE.rglob("*.py"))
TRAINER = ROOT / "train"
TRAINER_FILES = sorted(TRAINER.rglob("*.py"))


@dataclass(frozen=True)
class Import:
    """One import statement: the module's full name, and whether it runs only when a function is called."""

    module: str
    later: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


class _Visitor(ast.NodeVisitor):
    """Collect imports; what stands under `if TYPE_CHECKING` never runs and is passed over."""

    def __init__(self, package: tuple[str, ...]) -> None:
        self.package = package
        self.found: list[Import] = []
        self.depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(alias.name, self.depth > 0) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else ()
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            whole = f"{module}.{alias.name}"
            found = whole if whole in modules() else lazy_names(module).get(alias.name, module)
            self.found.append(Import(found, self.depth > 0))


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
def imports_of(path: Path) -> tuple[Import, ...]:
    visitor = _Visitor(path.relative_to(ROOT).parent.parts)
    visitor.visit(tree_of(path))
    return tuple(visitor.found)


def own_imports(path: Path) -> set[str]:
    """Return the modules of both that a file imports, also through the lazy names of a folder."""
    found = {each.module for each in imports_of(path)} & set(modules())
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
            below = own_imports(modules()[name])
            heights[name] = max((1 + height(each, (*above, name)) for each in below), default=0)
        return heights[name]

    for name in modules():
        height(name, ())
    return heights
