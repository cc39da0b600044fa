"""log.jsonl: what is appended, what a run that continues removes, and what a reader refuses."""

from __future__ import annotations

import json

import pytest

from ckpttool.errors import Damaged, FileError, Unreadable
from train.log import log_file


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_log_that_cant_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(FileError, match=r"log\.jsonl: could not be written"):
        log_file.append(str(tmp_path), {"epoch": 1})


def test_a_loss_of_nan_is_null_in_the_log(tmp_path):
    infinite = {"mse": float("inf"), "each": [1.0, float("nan")]}
    log_file.append(str(tmp_path), {"epoch": 1, "loss": float("nan"), "metrics": infinite})
    (text,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert text == '{"epoch": 1, "loss": null, "metrics": {"mse": null, "each": [1.0, null]}}'


def test_cutting_removes_later_epochs_and_a_line_cut_off_by_a_crash(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n{"epoch": 3}\n{"epo')
    log_file.cut(str(tmp_path), epoch=2, step=10)
    assert (tmp_path / "log.jsonl").read_text() == '{"epoch": 1}\n{"epoch": 2}\n'


LOG = [{"step": 2}, {"step": 4}, {"epoch": 1}, {"note": "x"}]
LOG += [{"step": 6}, {"step": 8}, {"epoch": 2}, {"a": 1}]


@pytest.mark.parametrize(
    ("epoch", "step", "kept"),
    [(0, 0, 0), (0, 3, 1), (0, 4, 2), (1, 4, 4), (1, 6, 5), (1, 7, 5), (1, 8, 6), (2, 8, 8), (9, 99, 8)],
)
def test_cutting_keeps_what_came_before_the_step_that_the_run_continues_from(tmp_path, epoch, step, kept):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    log_file.cut(str(tmp_path), epoch=epoch, step=step)
    assert lines(tmp_path) == LOG[:kept]


def test_a_whole_last_line_without_a_line_break_is_kept_apart_from_the_next_one(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 2}')
    log_file.cut(str(tmp_path), epoch=0, step=2)
    log_file.append(str(tmp_path), {"step": 4})
    assert lines(tmp_path) == [{"step": 2}, {"step": 4}]


def test_a_run_without_a_log_has_nothing_to_cut(tmp_path):
    log_file.cut(str(tmp_path), epoch=1, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_log_is_read_by_its_folder_or_its_own_path_without_a_line_cut_off(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 2}\n\n{"epoch": 1}\n{"st')
    for path in (tmp_path, tmp_path / "log.jsonl"):
        assert log_file.read(path) == [{"step": 2}, {"epoch": 1}]


@pytest.mark.parametrize("text", ["", "\n\n", '{"st'])
def test_a_log_without_entries_is_refused(tmp_path, text):
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(Damaged, match="holds no entries yet"):
        log_file.read(tmp_path)


@pytest.mark.parametrize("line", [b"[1]", b"epoch 1", b'"epoch"', b"\xff\xfe", b"3", b"[" * 100_000])
def test_a_line_that_is_no_object_is_refused_by_its_number(tmp_path, line):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 2}\n' + line + b'\n{"step": 4}\n')
    with pytest.raises(Damaged, match="line 2 is not a JSON object"):
        log_file.read(tmp_path)


def test_a_missing_log_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(Unreadable, match=r"log\.jsonl: no such file") as refused:
        log_file.read(tmp_path)
    assert "folder of a run" in refused.value.hint
