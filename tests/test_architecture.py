"""Who may import whom, read from the source; and the page that says so. Each test lists its offenders."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.support.architecture_page import BEGIN, END, FOLDERS, PAGE, ROOMS, files, tables, write
from tests.support.generated_page import generated
from tests.support.imports import (
    FILES,
    PACKAGE,
    TRAINER,
    TRAINER_FILES,
    calls,
    first_line,
    imports_of,
    levels,
    own_imports,
    tree_of,
)
from tests.support.running import ROOT

TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def folder_of(path: Path) -> str:
    """Return the folder of the package that a file lies in; empty beside the folders."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def shown(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_the_folders_are_those_of_the_plan() -> None:
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found == set(FOLDERS)


def test_a_folder_imports_only_from_those_before_it() -> None:
    order = {name: number for number, name in enumerate(("", *FOLDERS))}
    offenders = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in FILES
        if path.parent != PACKAGE
        for module in own_imports(path)
        if (PACKAGE / module.split(".")[1]).is_dir() and order[module.split(".")[1]] > order[folder_of(path)]
    ]
    assert offenders == []


def test_a_room_of_the_trainer_imports_only_from_those_before_it() -> None:
    """What lies next to the rooms is a program, which no room imports, or what all of them print with."""
    order = {name: number for number, name in enumerate(ROOMS)}
    assert {path.parent.name for path in TRAINER_FILES} == {*ROOMS, "train"}
    offenders = [
        f"{path.relative_to(TRAINER)} imports {module}"
        for path in TRAINER_FILES
        if path.parent != TRAINER
        for module in own_imports(path)
        if module.startswith("train.") and module not in ("train", "train.console")
        if order.get(module.split(".")[1], len(ROOMS)) > order[path.parent.name]
    ]
    assert offenders == []


def test_no_imports_form_a_circle() -> None:
    levels()


def test_a_folder_init_is_empty_or_lazy() -> None:
    offenders = [
        path
        for path in PACKAGE.rglob("__init__.py")
        if {each.module for each in imports_of(path) if not each.later}
        - {"__future__", "typing", "ckpttool.lazy"}
        and path.parent.name != "cli"
    ]
    assert shown(offenders) == []


def test_only_the_command_line_imports_click_and_tqdm() -> None:
    offenders = [
        path
        for path in FILES
        if folder_of(path) != "cli" and {each.top for each in imports_of(path)} & {"click", "tqdm"}
    ]
    assert shown(offenders) == []


def test_torch_is_imported_in_functions_or_by_a_file_whose_first_line_says_so() -> None:
    offenders = [
        path
        for path in FILES
        if {each.top for each in imports_of(path) if not each.later} & {"torch", "torchvision"}
        and "torch" not in first_line(path).lower()
    ]
    assert shown(offenders) == []


def test_numpy_and_safetensors_are_imported_in_functions() -> None:
    libraries = {"numpy", "safetensors"}
    offenders = [
        path for path in FILES if {each.top for each in imports_of(path) if not each.later} & libraries
    ]
    assert shown(offenders) == []


def test_the_library_knows_neither_the_trainer_nor_the_command_line() -> None:
    offenders = [
        path
        for path in FILES
        if path.name != "__main__.py"
        and any(
            each.top == "train" or (each.module.startswith("ckpttool.cli") and folder_of(path) != "cli")
            for each in imports_of(path)
        )
    ]
    assert shown(offenders) == []


def test_the_library_returns_values_and_never_prints() -> None:
    offenders = [
        path
        for path in FILES
        if {call.func.id for call in calls(path) if isinstance(call.func, ast.Name)} & {"print", "input"}
    ]
    assert shown(offenders) == []


def test_no_file_bears_the_name_of_a_library_that_it_stands_beside() -> None:
    """`torchrun train/main.py` puts train/ first on the path: there no standard module may be hidden."""
    in_train = [path for path in (ROOT / "train").glob("*.py") if path.stem in sys.stdlib_module_names]
    in_package = [
        path for path in FILES if path.stem in {"torch", "numpy", "io", "pickle", "select", "copy", "json"}
    ]
    assert shown(in_train + in_package) == []


def test_the_docs_name_no_file_that_is_not_there() -> None:
    """A path with a folder is looked for from the root; examples of users' files have no such folder."""
    named = re.compile(
        r"(?<![\w/.-])((?:ckpttool|train|tests|benchmarks|docs|examples)/[\w/.-]*\w\.(?:py|md))"
    )
    offenders = [
        f"{page.name}: {name}"
        for page in TEXTS
        for name in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert offenders == []


def test_the_tables_of_the_page_are_those_of_the_modules() -> None:
    made = generated(PAGE, BEGIN, END)
    assert made == tables(), "docs/architecture.md is stale: run `make docs` and commit it"


def test_the_map_shows_every_file_of_the_package() -> None:
    shown_files = [line.partition(":")[0] for line in files()]
    assert sorted(shown_files) == shown([path for path in FILES if not path.name.startswith("__")])


def test_the_page_names_every_room_of_the_trainer() -> None:
    rooms = {path.parent.name for path in (ROOT / "train").glob("*/*.py")}
    named = re.findall(
        r"^\| `(\w+)/` \|", PAGE.read_text(encoding="utf-8").partition("## The trainer")[2], re.M
    )
    assert set(named) == rooms


def test_every_module_says_in_its_first_line_what_it_is_for() -> None:
    offenders = [path for path in FILES if not first_line(path) and path.name != "__main__.py"]
    assert shown(offenders) == []


def test_no_test_imports_another() -> None:
    offenders = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^\s*(from|import) tests\.(\w+\.)*test_", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert shown(offenders) == []


def test_the_wheel_ships_the_package_alone() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib, which came with Python 3.11")
    import tomllib

    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["packages"] == ["ckpttool"]


def test_a_circle_would_be_found() -> None:
    """Without this the test of circles could pass because nothing is read."""
    heights = levels()
    assert heights["ckpttool.errors"] == 0
    assert (
        heights["ckpttool.cli.commands.inspect"]
        > heights["ckpttool.formats.reading"]
        > heights["ckpttool.tensors.ref"]
    )
    assert heights["train.main"] > heights["train.run.run"] > heights["train.trainer.trainer"]
    assert isinstance(tree_of(PACKAGE / "errors.py"), ast.Module)


if __name__ == "__main__":
    if "--map" in sys.argv:
        print(*files(), sep="\n")
    else:
        write()
