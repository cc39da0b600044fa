"""What goes out: the wheel, the changelog, and the image of the Dockerfile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from ckpttool import __version__
from ckpttool.core.cli import SECTIONS, group
from release import check, completion, manual
from release.walk import LINES, walk
from tests.support.running import ROOT

# ---- What goes into a release: the wheel with man pages and completion files, the changelog's heading -


PAGES = manual.pages()


def test_every_command_has_a_man_page_with_its_help_and_its_example() -> None:
    assert list(PAGES) == ["ckpttool.1", *(f"ckpttool-{name}.1" for name in group.commands)]
    for commands in SECTIONS.values():
        for command in commands:
            said = rendered(PAGES[f"ckpttool-{command.name}.1"])
            assert f"ckpttool-{command.name} - {command.summary}\n" in said
            for option in command.params:
                assert option.opts[-1] in said or option.human_readable_name in said
            assert f"\nckpttool {command.name}" in said
    assert "Exit codes: 0 done, or same;" in rendered(PAGES["ckpttool.1"])


def rendered(page: str) -> str:
    """Return what roff prints of a page: its text without requests, fonts and escapes."""
    text = "\n".join(line for line in page.split("\n") if not re.match(r"\.(?!SH)", line))
    text = re.sub(r"\\f[BIP]", "", text).replace(r"\&", "")
    return text.replace(r"\-", "-").replace(r"\e", "\\")


def test_a_man_page_says_backslashes_dots_and_dashes_as_they_are() -> None:
    page = PAGES["ckpttool-rename-keys.1"]
    assert r"\-\-map '^backbone\e.=model.'" in page
    assert "\b" not in page
    assert not re.search(r"^[.'](?!(TH|SH|SS|TP|PP|nf|fi)\b)", "\n".join(PAGES.values()), re.MULTILINE)


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff")
def test_groff_has_nothing_to_say_about_the_man_pages() -> None:
    groff = ["groff", "-man", "-Tutf8", "-Kutf8", "-ww"]
    ran = subprocess.run(groff, input="".join(PAGES.values()), capture_output=True, text=True, check=True)
    assert ran.stderr == "" and "rename-keys" in ran.stdout


@pytest.mark.parametrize("shell", completion.PLACES)
def test_a_shell_takes_its_completion_file(shell: str, tmp_path: Path) -> None:
    text = completion.by_place()[completion.PLACES[shell]]
    assert f"_CKPTTOOL_COMPLETE={shell}_complete" in text
    if shutil.which(shell):
        (tmp_path / "file").write_text(text)
        subprocess.run([shell, "-n", tmp_path / "file"], check=True)


def test_the_wheel_has_the_package_its_data_the_man_pages_and_the_completion_files(tmp_path: Path) -> None:
    builders = pytest.importorskip("hatchling.builders.wheel")
    wheel = next(builders.WheelBuilder(str(check.ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    names = set(zipfile.ZipFile(wheel).namelist())
    of_package = {
        "/".join(("ckpttool", *path.relative_to(check.ROOT / "ckpttool").parts)) for path in files()
    }
    assert of_package <= names
    shared = {
        f"ckpttool-{__version__}.data/data/{place}" for place in (*manual.by_place(), *completion.by_place())
    }
    assert shared <= names
    others = {name for name in names - of_package - shared if ".dist-info/" not in name}
    assert others == set()


def files() -> list[Path]:
    every = (check.ROOT / "ckpttool").rglob("*")
    return [path for path in every if path.is_file() and "__pycache__" not in path.parts]


def test_the_changelog_has_the_version_with_its_day() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", check.dated(__version__))
    with pytest.raises(SystemExit, match=r"no heading '## 9\.9\.9 \(YYYY-MM-DD\)'"):
        check.dated("9.9.9")


def test_the_version_of_the_package_is_that_of_the_project() -> None:
    text = (check.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{__version__}"\n' in text


def test_a_walk_through_an_installation_runs_commands_that_are_there() -> None:
    assert {line.split()[0] for line in LINES.strip().splitlines()} <= set(group.commands)


# ---- The image of the Dockerfile, where there is something that can build it --------------------------


MOST = 150_000_000  # bytes
BASE = "python:3.13-alpine"


def answers(program: str) -> bool:
    return shutil.which(program) is not None and ran(program, "info").returncode == 0


def ran(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def image() -> tuple[str, str]:
    """Return the program that runs images, and the name of ours, built by it."""
    program = next(filter(answers, ("docker", "podman")), None)
    if program is None:
        pytest.skip("needs docker or podman, and its daemon")
    if (pulled := ran(program, "pull", BASE)).returncode:
        pytest.skip(f"{BASE} can't be had here: {pulled.stderr.strip().splitlines()[-1:]}")
    built = ran(program, "build", "--tag", "ckpttool-test", ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    return program, "ckpttool-test"


def test_the_dockerfile_begins_with_the_image_that_is_pulled() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FROM ")] == [BASE, BASE]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_image_is_small_and_every_command_runs_in_it(image: tuple[str, str], tmp_path: Path) -> None:
    program, name = image
    size = int(ran(program, "image", "inspect", "--format", "{{.Size}}", name).stdout)
    assert size < MOST
    user = f"{os.getuid()}:{os.getgid()}"
    walk([program, "run", "--rm", "--volume", f"{tmp_path}:/data", "--user", user, name], tmp_path)
