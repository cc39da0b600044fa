"""ckpttool gather-metrics, and prediction files."""

from __future__ import annotations

import dataclasses
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpttool.errors import CheckFailed, Damaged, OutputExists, Unsupported
from ckpttool.metrics import certificate
from ckpttool.metrics.certificate import Evaluation, Predictions, read, write

SAMPLES, RANKS = 40, 3
RANDOM = np.random.default_rng(0)
LABELS, FOUND = RANDOM.integers(3, size=(2, SAMPLES))
LOSSES = RANDOM.random(SAMPLES)
ABOUT = Evaluation(RANKS, SAMPLES, "ab" * 32, "digits 5/6", ("cat", "dog", "Füchsin"), "cpu", 1)


def rows(index: np.ndarray) -> Predictions:
    return Predictions(index, FOUND[index], LABELS[index], LOSSES[index])


def share(rank: int, ranks: int = RANKS) -> np.ndarray:
    return RANDOM.permutation(np.arange(rank, SAMPLES, ranks))


@pytest.fixture
def folder(here: Path) -> None:
    """An evaluation of three ranks."""
    for rank in range(RANKS):
        write(f"rank{rank}.safetensors", rows(share(rank)), ABOUT, rank)


FILES = [f"rank{rank}.safetensors" for rank in range(RANKS)]


def test_the_numbers_are_those_of_scikit_learn(folder, cli):
    from sklearn import metrics as sk  # which takes a second

    found = cli("gather-metrics", *FILES, "--json").json
    assert found["correct"] == (LABELS == FOUND).sum()
    assert found["accuracy"] == sk.accuracy_score(LABELS, FOUND)
    assert found["loss"] == math.fsum(LOSSES) / SAMPLES
    expected = sk.precision_recall_fscore_support(LABELS, FOUND)
    for name, values in zip(("precision", "recall", "f1", "samples"), expected, strict=True):
        assert [one[name] for one in found["per_class"]] == pytest.approx(list(values), rel=1e-15)
    assert [one["class"] for one in found["per_class"]] == list(ABOUT.classes)
    assert (found["samples"], found["ranks"], found["rank_samples"]) == (40, 3, [14, 13, 13])
    assert (found["digest"], found["data"], found["threads"]) == ("ab" * 32, "digits 5/6", 1)
    assert found["every_sample_once"] is True


def test_neither_the_order_of_files_nor_the_number_of_ranks_shows(folder, cli):
    expected = cli("gather-metrics", *FILES, "--json").json
    assert cli("gather-metrics", *FILES[::-1], "--json").json == expected
    write("all.safetensors", rows(share(0, 1)), dataclasses.replace(ABOUT, world_size=1), 0)
    alone = cli("gather-metrics", "all.safetensors", "--json").json
    for differs in ("ranks", "rank_samples"):
        del alone[differs], expected[differs]
    assert alone == expected


def test_people_get_one_line_and_out_the_certificate_which_is_not_overwritten_unasked(folder, cli):
    said = cli("gather-metrics", *FILES)
    assert said.err == ""
    assert said.out.startswith(f"{(LABELS == FOUND).sum()} of 40 samples correct (")
    assert said.out.endswith(", each once in 3 files\n")
    expected = cli("gather-metrics", *FILES, "--json").json
    assert cli("gather-metrics", *FILES, "--out", "eval.json").out.endswith("-> eval.json\n")
    assert json.loads(Path("eval.json").read_text()) == expected
    refused = cli("gather-metrics", *FILES, "--out", "eval.json")
    assert refused.code == 2 and "--force" in refused.err
    assert cli("gather-metrics", *FILES, "--out", "eval.json", "--force").code == 0


def wrong(kind: str) -> list[str]:
    """Files in which something is wrong."""
    if kind == "a file is missing":
        return [FILES[0], FILES[2]]
    if kind == "a file twice":
        return [*FILES, "./rank1.safetensors"]
    if kind == "a sample twice":
        write(FILES[1], rows(np.append(share(1), 0)), ABOUT, 1, force=True)
    elif kind == "a gap":
        write(FILES[1], rows(np.sort(share(1))[:-1]), ABOUT, 1, force=True)
    elif kind == "another checkpoint":
        write(FILES[1], rows(share(1)), dataclasses.replace(ABOUT, checkpoint="cd"), 1, force=True)
    elif kind == "a label beyond":
        one = rows(share(1))
        write(FILES[1], dataclasses.replace(one, label=one.label + 7), ABOUT, 1, force=True)
    return FILES


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a file is missing", "1 of 3 is missing; samples 1, 4, 7, 10, 13, 16 and 7 more of 40 are missing"),
        ("a file twice", "rank 1 has several files: rank1.safetensors, ./rank1.safetensors; samples 1, 4,"),
        ("a sample twice", "sample 0 appears more than once: in rank0.safetensors, rank1.safetensors"),
        ("a gap", "sample 37 of 40 is missing"),
        ("another checkpoint", f"{FILES[1]}: is of a different evaluation than {FILES[0]}: its checkpoint"),
        ("a label beyond", "has a label that is not one of the 3 classes"),
    ],
)
def test_wrong_files_are_exit_1_and_name_samples_and_files(folder, cli, kind, said):
    answer = cli("gather-metrics", *wrong(kind), "--json")
    assert answer.code == 1 and said in answer.json["error"]["message"]
    assert answer.json["error"]["kind"] == CheckFailed.kind


def test_rows_that_were_changed_afterwards_are_refused(folder, cli):
    raw = bytearray(Path(FILES[1]).read_bytes())
    raw[-3] ^= 1  # in a loss: no rule of the format is broken
    Path(FILES[1]).write_bytes(raw)
    ran = cli("gather-metrics", *FILES)
    assert (ran.code, "rank1.safetensors" in ran.err, "digest differs" in ran.err) == (3, True, True)


def test_samples_that_no_file_holds_are_named(folder, cli):
    answer = cli("gather-metrics --samples 41", *FILES)
    assert (answer.code, "is of 40 samples, not 41" in answer.err) == (1, True)
    assert cli("gather-metrics --samples 40", *FILES).code == 0


def test_files_of_another_program_need_the_number_of_samples(folder, cli):
    """Four columns are all that is needed; classes are then numbers."""
    for name in FILES:
        save_file(load_file(name), f"plain-{name}")
    plain = [f"plain-{name}" for name in FILES]
    answer = cli("gather-metrics", *plain)
    assert (answer.code, "--samples" in answer.err) == (2, True)
    found = cli("gather-metrics", *plain, "--samples", 40, "--json").json
    expected = cli("gather-metrics", *FILES, "--json").json
    assert [one.pop("class") for one in found["per_class"]] == ["0", "1", "2"]
    for one in expected["per_class"]:
        del one["class"]
    same = ("samples", "correct", "accuracy", "loss", "per_class", "ranks", "index_digest")
    assert [found[name] for name in same] == [expected[name] for name in same]
    assert found["digest"] is None
    assert cli("gather-metrics", *plain[:2], "--samples", 40).code == 1


def unnamed(labels: Any, predictions: Any = None) -> None:
    """Write a file of another program, which names no classes."""
    about = dataclasses.replace(ABOUT, world_size=1, samples=len(labels), classes=None)
    labels = np.array(labels, dtype=np.int64)
    predicted = labels if predictions is None else np.array(predictions, dtype=np.int64)
    write("one.safetensors", Predictions(np.arange(len(labels)), predicted, labels, 0.0 * labels), about, 0)


@pytest.mark.parametrize(
    ("labels", "predictions", "classes"),
    [
        ([], [], []),
        ([2**40], [2**40], [(str(2**40), 1, 1, 1)]),
        ([2**62, 3], [3, 2**63 - 1], [("3", 0, 1, 1), (str(2**62), 0, 1, 0), (str(2**63 - 1), 0, 0, 1)]),
        ([0, 5, 5], [5, -1, 5], [("0", 0, 1, 0), ("5", 1, 2, 2)]),
    ],
)
def test_only_the_classes_that_are_there_are_counted(folder, cli, labels, predictions, classes):
    unnamed(labels, predictions)
    tracemalloc.start()
    answer = cli("gather-metrics", "one.safetensors", "--json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (answer.code, peak < 50_000_000) == (0, True)
    names = ("class", "correct", "samples", "predicted")
    assert [tuple(score[name] for name in names) for score in answer.json["per_class"]] == classes


@pytest.mark.parametrize(
    ("labels", "code", "said"),
    [
        ([1, -1], 1, "sample 1 has a label that is not one of the 1 classes"),
        (range(100), 0, ""),
        (range(101), 1, "labels and predictions are 101 different classes; at most 100 are counted"),
    ],
    ids=["below 0", "at the bound", "more than are counted"],
)
def test_labels_that_are_no_class_or_too_many_are_refused(folder, cli, monkeypatch, labels, code, said):
    monkeypatch.setattr(certificate, "MAX_CLASSES", 100)
    unnamed(labels)
    answer = cli("gather-metrics one.safetensors")
    assert (answer.code, said in answer.err) == (code, True)


def test_a_file_that_is_no_prediction_file_is_refused(folder, cli):
    columns = load_file(FILES[0])
    for change, said in (
        ({"loss": columns["loss"].astype(np.float32)}, "its 'loss' is float32 [14]"),
        ({"index": columns["index"][:, None]}, "its 'index' is int64 [14, 1]"),
        ({"label": columns["label"][:3]}, "different numbers of rows"),
    ):
        save_file({**columns, **change}, "odd.safetensors")
        answer = cli("gather-metrics", "odd.safetensors")
        assert (answer.code, said in answer.err) == (3, True)
    save_file(columns, "metadata.safetensors", metadata={"samples": "many"})
    save_file({name: columns[name] for name in columns if name != "label"}, "column.safetensors")
    Path("cut.safetensors").write_bytes(Path(FILES[0]).read_bytes()[:-8])
    for name, error, said in (
        ("column", Unsupported, "it has no 'label'"),
        ("metadata", Unsupported, "no samples as a prediction file has: many"),
        ("cut", Damaged, ""),
    ):
        with pytest.raises(error, match=said or None):
            read(f"{name}.safetensors")


def test_prediction_files_are_read_back_by_us_and_by_the_safetensors_library(folder):
    back = read(FILES[2])
    assert (back.rank, back.evaluation) == (2, ABOUT)
    for name, column in load_file(FILES[2]).items():
        assert (column == getattr(back.predictions, name)).all()
        assert column.dtype == getattr(back.predictions, name).dtype
    with pytest.raises(OutputExists):
        write(FILES[2], back.predictions, ABOUT, 2)


def test_ranks_without_samples_have_files_too(cli):
    about = dataclasses.replace(ABOUT, samples=1)
    for rank in range(RANKS):
        write(f"rank{rank}.safetensors", rows(np.arange(rank == 1)), about, rank)
    found = cli("gather-metrics", *FILES, "--json").json
    assert (found["samples"], found["rank_samples"]) == (1, [0, 1, 0])
    assert cli("gather-metrics", *FILES[:2]).code == 1  # though every sample is there


def test_a_loss_that_is_not_finite_is_null(cli):
    one = dataclasses.replace(rows(share(0, 1)), loss=np.full(SAMPLES, math.nan))
    write("a.safetensors", one, dataclasses.replace(ABOUT, world_size=1), 0)
    assert cli("gather-metrics a.safetensors --json").json["loss"] is None
