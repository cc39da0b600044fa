"""Lines at the end of a file: written whole, or not at all."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from ckpttool.files import commit


def test_a_line_that_is_refused_when_closing_is_taken_back(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    class RefusedWhenClosed(io.FileIO):
        """As on NFS, which sends what was written when the file is closed."""

        def close(self) -> None:
            is_open = not self.closed
            super().close()
            if is_open:
                raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "lines"
    commit.append_line(str(path), b"first")
    with monkeypatch.context() as patch:
        patch.setattr(commit, "open", lambda path, *_, **__: RefusedWhenClosed(path, "ab"), raising=False)
        with pytest.raises(OSError, match="No space left"):
            commit.append_line(str(path), b"second", durably=True)
    assert path.read_bytes() == b"first\n"
