"""What each folder and file is for, from the first lines of the modules: docs/architecture.md, `make map`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.support.generated_page import regenerate
from tests.support.imports import PACKAGE, first_line, levels, name_of
from tests.support.running import ROOT

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tables -->\n", "<!-- /tables -->"

FOLDERS = (
    "tensors",
    "distributed",
    "files",
    "inert_pickle",
    "checkpoint",
    "formats",
    "transforms",
    "analysis",
    "proving",
    "batchnorm",
    "metrics",
    "models",
    "cli",
)
"""The folders of the package, from the ground up: each imports only from those before it."""

ROOMS = ("config", "data", "tasks", "model", "log", "launch", "trainer", "checkpoint", "run")
"""The folders of the trainer, likewise."""


def tables() -> str:
    """Return the generated part of the page: the folders, each with the names of its files."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from ("", "| folder | purpose |", "|---|---|")
    for name in FOLDERS:
        yield f"| `{name}/` | {_sentence(PACKAGE / name / '__init__.py')} |"
    yield from ("", "| in `formats/` | purpose |", "|---|---|")
    for room in sorted(path.parent for path in (PACKAGE / "formats").glob("*/__init__.py")):
        yield f"| `{room.name}/` | {_sentence(room / '__init__.py')} |"
    yield "\n"


def files() -> Iterator[str]:
    """Yield what each file of the package is for, in each folder from the ground up: `make map`."""
    heights = levels()
    for folder in ("", *FOLDERS):
        paths = (PACKAGE / folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
        for path in sorted(paths, key=lambda path: (heights[name_of(path)], str(path))):
            if path.name not in ("__init__.py", "__main__.py"):
                yield f"{path.relative_to(PACKAGE.parent)}: {_sentence(path)}"


def _sentence(path: Path) -> str:
    return first_line(path).removesuffix(".").replace("|", "\\|")


def write() -> None:
    """Put the tables of today between the marks of the page."""
    regenerate(PAGE, BEGIN, END, tables())
