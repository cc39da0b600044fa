"""Checkpoints compared between commits of a real repository; the hooks and the action that do so."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.core.cli import commits
from tests.support.running import ROOT
from tests.support.scan_corpus import PAYLOAD

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


def git(*words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *name, *words], capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    git("add", "-A")
    git("commit", "--quiet", "--message", "more")
    return git("rev-parse", "HEAD")


@pytest.fixture
def repository(here: Path) -> str:
    """A repository with a checkpoint in a folder; return its commit."""
    git("init", "--quiet")
    (here / "models").mkdir()
    torch.save({"a": torch.ones(2), "b": torch.zeros(3)}, "models/m.pt")
    torch.save({"a": torch.ones(2)}, "gone.pt")
    return commit()


# The hook.


@pytest.mark.usefixtures("repository")
def test_keys_as_in_the_last_commit_pass_whatever_the_values(capsys: Any) -> None:
    torch.save({"a": torch.zeros(2), "b": torch.ones(3)}, "models/m.pt")
    torch.save({"new": torch.ones(1)}, "new.pt")
    assert commits.main(["keys", "models/m.pt", "new.pt"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("repository")
def test_keys_that_changed_are_named_and_fail(capsys: Any) -> None:
    torch.save({"a": torch.ones(2).half(), "c": torch.zeros(3)}, "models/m.pt")
    assert commits.main(["keys", "models/m.pt"]) == 1
    said = capsys.readouterr().out
    assert "gone: b; new keys: c; of another type or shape: a" in said and "SKIP=" in said


@pytest.mark.usefixtures("repository")
def test_what_is_no_checkpoint_any_more_is_exit_3(capsys: Any) -> None:
    Path("models/m.pt").write_bytes(b"broken")
    assert commits.main(["keys", "models/m.pt"]) == 3
    assert "models/m.pt" in capsys.readouterr().out


# The comment.


def test_a_comment_says_what_changed_came_and_went(repository: str) -> None:
    torch.save({"a": torch.ones(2) * 2, "b": torch.zeros(3)}, "models/m.pt")
    torch.save({"w": torch.ones(4)}, "new.pt")
    Path("gone.pt").unlink()
    Path("notes.txt").write_text("x")
    said = commits.comment(repository, commit(), ["*.pt"])
    assert said.startswith(commits.MARK)
    changed, gone, new = (said.index(f"**{path}**") for path in ("models/m.pt", "gone.pt", "new.pt"))
    assert "before/m.pt and after/m.pt differ: 1 tensor changed" in said[changed:]
    assert "was removed" in said[gone:] and "1 tensor" in said[new:]
    assert "notes" not in said and "not safe" not in said


def test_a_comment_says_what_could_run_and_what_is_written_in_a_file_ends_nothing(repository: str) -> None:
    Path("evil_`x`.pt").write_bytes(PAYLOAD)
    said = commits.comment(repository, commit(), ["*.pt"])
    assert "not safe to unpickle" in said and "os.mkdir" in said
    assert r"**evil\_\`x\`.pt**" in said
    torch.save({"```\n# owned": torch.ones(1)}, "models/m.pt")
    said = commits.comment(repository, commit(), ["models/*.pt"])
    assert re.search("^````+text$", said, re.MULTILINE) or "```\n#" not in said


def test_without_a_changed_checkpoint_the_comment_says_so(repository: str) -> None:
    Path("notes.txt").write_text("x")
    assert commits.comment(repository, commit(), ["*.pt"]) == f"{commits.MARK}\n\nNo checkpoint changed."


def test_other_arguments_are_exit_2(capsys: Any) -> None:
    assert commits.main(["else"]) == 2
    assert "comment BASE HEAD" in capsys.readouterr().err


# What others read.


def loaded(name: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="reads the hooks and the action")
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_hooks_name_programs_that_are_there_and_files_that_are_checkpoints() -> None:
    hooks = loaded(".pre-commit-hooks.yaml")
    assert [hook["id"] for hook in hooks] == ["ckpttool-scan", "ckpttool-keys"]
    for hook in hooks:
        assert hook["entry"].startswith(("ckpttool scan", "python -m ckpttool.core.cli.commits keys"))
        assert re.search(hook["files"], "models/last.pt") and not re.search(hook["files"], "train.py")


def test_the_scripts_of_the_action_are_sound_and_use_its_inputs() -> None:
    action = loaded("action.yml")
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert {*re.findall(r"inputs\.([\w-]+)", text)} == {*action["inputs"]}
    assert commits.MARK in text
    for step in action["runs"]["steps"]:
        if "run" in step:
            assert step["shell"] == "bash"
            assert "${{" not in step["run"]  # what others name comes in by the environment alone
            subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)
