"""The tables of docs/architecture.md, generated from the first lines of the modules."""

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
    """Return the generated part of the page: the folders, then the files of each."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from ("", "| folder | purpose |", "|---|---|")
    for name in FOLDERS:
        yield f"| [`{name}/`](#{name}) | {_sentence(PACKAGE / name / '__init__.py')} |"
    yield from ("", "Beside the folders:", "", *_files(PACKAGE))
    for name in FOLDERS:
        yield from ("", f"### {name}", "")
        yield from _files(PACKAGE / name)
        for inner in sorted(path.parent for path in (PACKAGE / name).glob("*/__init__.py")):
            yield from ("", f"`{inner.relative_to(PACKAGE)}/`: {_sentence(inner / '__init__.py')}", "")
            yield from _files(inner)
    yield "\n"


def _files(folder: Path) -> Iterator[str]:
    """Yield a table of the files of a folder, from the ground up."""
    heights = levels()
    paths = [path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    yield from ("| file | purpose |", "|---|---|")
    for path in sorted(paths, key=lambda path: (heights[name_of(path)], path.name)):
        yield f"| `{path.name}` | {_sentence(path)} |"


def _sentence(path: Path) -> str:
    return first_line(path).removesuffix(".").replace("|", "\\|")


def write() -> None:
    """Put the tables of today between the marks of the page."""
    regenerate(PAGE, BEGIN, END, tables())
