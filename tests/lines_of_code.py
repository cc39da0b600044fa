"""The budget of pyproject.toml: how many lines of code each part of the house has, and may have.

    python -m tests.lines_of_code

A line counts that is neither blank, nor a comment, nor of a docstring. Raising a number is a line in a diff,
with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

from ckpttool.rooms import ROOMS
from tests.support.running import ROOT


def lines_of(path: Path) -> int:
    """Return the number of lines of code in a file."""
    text = path.read_text(encoding="utf-8")
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    apart: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            apart |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    lines = enumerate(text.split("\n"), 1)
    return sum(bool(line.strip()) and line.lstrip()[0] != "#" and at not in apart for at, line in lines)


def part_of(path: Path) -> str:
    """Return the part of the house in which a file counts: a room, `core`, `train` or `tests`."""
    top, *rest = path.relative_to(ROOT).parts
    if top != "ckpttool":
        return top
    return rest[0] if rest[0] in ROOMS else "core"


def measured() -> tuple[Counter[str], Counter[str]]:
    """Return the lines of code and the number of files of each part."""
    lines, files = Counter[str](), Counter[str]()
    for top in ("ckpttool", "train", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            lines[part_of(path)] += lines_of(path)
            files[part_of(path)] += 1
    return lines, files


def main() -> int:
    """Print the table; return 1 where a part is over its budget or has none."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ckpttool"][
        "budget"
    ]
    lines, files = measured()
    over = [part for part in lines if lines[part] > budget.get(part, 0)]
    print(f"{'lines of code':16}{'files':>6}{'now':>8}{'budget':>8}")
    for part in sorted({*lines, *budget}, key=lambda part: -lines[part]):
        print(f"{part:16}{files[part]:6}{lines[part]:8}{budget.get(part, 0):8}{'  over' * (part in over)}")
    if over:
        print(
            f"over budget: {', '.join(over)}; make it lighter, or raise tool.ckpttool.budget, with the reason"
        )
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
