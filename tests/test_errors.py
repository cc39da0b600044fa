"""Errors: whole after a pickle, as loading processes and ranks send them to each other."""

from __future__ import annotations

import copy
import pickle
import re
import traceback

import pytest

from ckpttool import errors
from ckpttool.distributed.collectives import RankFailed
from tests.support.running import ROOT


class Odd(errors.FileError):
    """An error whose `__init__` takes what its base's does not."""

    def __init__(self, path: str, *, lines: list[int]) -> None:
        super().__init__(path, f"{len(lines)} lines are bad", hint="mend them")
        self.lines = lines


EXAMPLES = [
    errors.CkptToolError("no", hint="do this"),
    errors.Unreadable("a.pt", "no such file", hint="look elsewhere"),
    errors.Damaged("a.pt", "is cut short"),
    errors.Unsupported("a.pt", "is of the future"),
    errors.Refused("a.pt", "would be lost"),
    errors.NoState("a.pt", "has none"),
    errors.Collision("a and b"),
    errors.NothingToDo("no 'module.'"),
    errors.CheckFailed("NaN"),
    errors.Mismatch("2 missing", missing=("a", "b"), mismatched=(("c", "1", "2"),), hint="see"),
    errors.UsageFault("--lr"),
    errors.OutputExists("b.pt", hint="--force"),
    errors.RanksDiffer("rank 1"),
    errors.RanksDiffer("'0.weight' differs", path="ranks", ranks=(0, 1)),
    RankFailed("rank 0 failed"),
    Odd("log", lines=[1, 2]),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("send", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_is_whole_after_a_pickle_and_a_copy(error, send):
    error.exit_code = 7
    sent = send(error)
    assert type(sent) is type(error)
    assert str(sent) == str(error)
    assert vars(sent) == vars(error)
    assert sent.exit_code == 7


def test_an_error_in_text_says_what_to_do_next() -> None:
    error = errors.Refused("a.pt", "would be lost", hint="name another output")
    assert str(error) == "a.pt: would be lost\n  hint: name another output"
    assert traceback.format_exception_only(error) == [f"ckpttool.errors.Refused: {error}\n"]
    assert error.message == "a.pt: would be lost"
    assert str(errors.Refused("a.pt", "would be lost")) == "a.pt: would be lost"


def test_nothing_is_to_be_installed_from_a_registry_that_does_not_have_it() -> None:
    """One function says how; pages say it in a clone."""
    folders = ("ckpttool", "train", "docs", "benchmarks", "examples")
    texts = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md")]
    wanted = re.compile(r"pip install (-U |--upgrade )?['\"]?ckpttool|ckpttool\[")
    found = [str(path) for path in [*texts, *ROOT.glob("*.md")] if wanted.search(path.read_text("utf-8"))]
    assert found == []
    assert errors.install("torch") == "in a clone of ckpttool: pip install -e '.[torch]'"
    assert str(errors.NeedsTorch("this")) and errors.NeedsTorch("this").hint == errors.install("torch")
    assert errors.install() == "in a clone of ckpttool: pip install --force-reinstall ."
