"""The image of the Dockerfile, where there is something that can build it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from release.walk import walk
from tests.support.running import ROOT

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
