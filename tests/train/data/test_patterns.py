"""Patterns of files, of `--data tokens:` and `wds:`: braces, then globs."""

from __future__ import annotations

import os

import pytest

from ckpttool.errors import Unreadable, UsageFault
from train.data import formats
from train.data.formats import files_of


def test_braces_and_globs_name_files(tmp_path, monkeypatch):
    names = ["a-00.bin", "a-01.bin", "a-10.bin", "b-1.bin"]
    for name in names:
        (tmp_path / name).touch()

    def found(pattern: str) -> list[str]:
        return [os.path.basename(path) for path in files_of(f"{tmp_path}/{pattern}", "--data tokens:")]

    assert found("a-{00..01}.bin") == names[:2]
    assert found("{a-1{0,0},b-1}.bin") == ["a-10.bin", "b-1.bin"]
    assert found("{a-01,a-*}.bin") == ["a-01.bin", "a-00.bin", "a-10.bin"]
    assert found("b-{1..1}.bin") == ["b-1.bin"]
    with pytest.raises(Unreadable, match=r"a-02.bin: no such file"):
        found("a-{00..02}.bin")
    with pytest.raises(UsageFault, match="no file matches"):
        found("c-*.bin")
    monkeypatch.setattr(formats, "MOST", 10)
    with pytest.raises(UsageFault, match="more than 10 files"):
        found("{0..9}{0..999999999}*")
