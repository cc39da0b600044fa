"""`--data hf:`: data sets as `datasets` streams them, their shards dealt to lanes. Needs that library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import Unreadable, UsageFault
from train.config.sections import TrainConfig
from train.data import data_set
from train.data.stream import Position, Stream

datasets = pytest.importorskip("datasets", reason="the library that reads them")

BATCH = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set of six shards of 5 to 10 rows."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for shard in range(6):
        rows = [json.dumps({"x": [shard, row], "label": row % 2}) for row in range(5 + shard)]
        (tmp_path / f"train-{shard}.jsonl").write_text("\n".join(rows))
    (tmp_path / "test-0.jsonl").write_text(json.dumps({"x": [9, 9], "label": 1}))
    return str(tmp_path)


def opened(folder: str, **settings: Any) -> Stream:
    config = TrainConfig.of(
        data=f"hf:{folder}", task="model-loss", batch_size=BATCH, shuffle_window=4, **settings
    )
    stream = data_set.load(config.data).train
    assert isinstance(stream, Stream)
    stream.batch_size = BATCH
    return stream


def epoch(stream: Stream, number: int, start: int = 0) -> tuple[dict[int, tuple[int, ...]], list[Any]]:
    """Return the rows of an epoch by their place, and the positions after each step."""
    stream.set_epoch(number)
    rows: dict[int, tuple[int, ...]] = {}
    positions = []
    for place in range(start, 500, BATCH):
        read = stream.__getitems__(list(range(place, place + BATCH)))
        rows |= {at: tuple(row["x"].tolist()) for at, row in zip(read.taken, read.samples, strict=True)}
        positions.append(read.positions)
        if not any(read.more.values()):
            return rows, positions
    raise AssertionError("it did not end")


def test_each_row_comes_once_in_another_order_in_each_epoch(folder):
    stream = opened(folder)
    assert (stream.lanes, stream.resumes) == (6, True)
    first, _ = epoch(stream, 0)
    second, _ = epoch(stream, 1)
    again, _ = epoch(stream, 0)
    assert sorted(first.values()) == sorted((shard, row) for shard in range(6) for row in range(5 + shard))
    assert sorted(second.values()) == sorted(first.values())
    assert list(second.values()) != list(first.values())
    assert again == first


def test_it_goes_on_from_any_step_in_another_process(folder, tmp_path):
    whole, positions = epoch(opened(folder), 1)
    for step in (1, 3, 5):
        torch.save(
            {number: position._asdict() for number, position in positions[step - 1].items()}, tmp_path / "p"
        )
        stream = opened(folder)
        saved = torch.load(tmp_path / "p", weights_only=True)
        stream.start = 1, {number: Position(**position) for number, position in saved.items()}
        rest, _ = epoch(stream, 1, step * BATCH)
        assert rest == {place: row for place, row in whole.items() if place >= step * BATCH}


def test_a_split_to_test_with_and_packed_documents(folder):
    config = TrainConfig.of(
        data=f"hf:{folder}", test_data=f"hf:{folder}:test", task="model-loss", max_steps=1
    )
    data = data_set.load(config.data)
    assert len(data.test) == 1
    for shard in range(3):
        Path(folder, f"train-{shard}.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n{"input_ids": [5, 6]}')
    for shard in range(3, 6):
        Path(folder, f"train-{shard}.jsonl").unlink()
    packed = opened(folder, block_size=4).head
    assert packed[0][0].tolist() == [1, 2, 3, 4]
    assert packed[3][0].tolist() == [5, 6, 0, 0]


def test_all_rows_of_unequal_shards_to_test_with_are_there_in_their_order(folder):
    config = TrainConfig.of(data=f"hf:{folder}", test_data=f"hf:{folder}", task="model-loss", max_steps=1)
    rows = [tuple(row["x"].tolist()) for row in data_set.load(config.data).test]
    assert rows == [(shard, row) for row in range(10) for shard in range(6) if row < 5 + shard]


def test_what_is_not_there_is_named(folder):
    with pytest.raises(Unreadable, match="hf:"):
        opened(f"{folder}/none")
    with pytest.raises(UsageFault, match="no column of classes among x, label"):
        data_set.load(TrainConfig.of(data=f"hf:{folder}").data)
