"""Scoring any checkpoint, on one process or many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import trainings
from torch import nn

from train import evaluate, models
from train.evaluate import main, parse

ROOT = Path(__file__).parents[1]
TEST_SET = ROOT.parent / "shared" / "data" / "cifar10-mini" / "test"


@pytest.fixture
def pictures() -> Path:
    if not TEST_SET.exists():
        pytest.skip("needs data/cifar10-mini in the folder `shared` beside the repository")
    return TEST_SET


def score_on_ranks(rank: int, world_size: int, arguments: list[str]) -> Any:
    """What an evaluation finds; on other ranks than 0 the checkpoint's path leads nowhere."""
    if rank:
        arguments = ["/nowhere/model.pt", *arguments[1:]]
    job = evaluate.prepare(parse(arguments))
    return evaluate.as_json(job, evaluate.evaluate(job))


@pytest.mark.parametrize("size", [1, 3])
def test_the_published_resnet20_gets_776_of_846_right_and_rank_0_alone_reads_it(
    run_ranks, resnet20, pictures, size
):
    arguments = [str(resnet20), "--model", "resnet20", "--data", f"folder:{pictures}"]
    answers = run_ranks(size, score_on_ranks, arguments, timeout=60)
    for answer in answers:
        assert (answer["correct"], answer["samples"], answer["ranks"]) == (776, 846, size)
        assert len(answer["per_class"]) == 10
        assert sum(one["correct"] for one in answer["per_class"]) == 776
        assert answer["per_class"][3]["class"] == "cat"
        assert answer["accuracy"] == 776 / 846


FILES = ["ddp.pt", "plain.pt", "legacy.th", "plain.safetensors"]


@pytest.fixture
def saved(tmp_path) -> Path:
    """The same weights in every form that an evaluation reads."""
    from safetensors.torch import save_file

    state = trainings.seeded(lambda: models.resnet20(num_classes=10)).state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save({"model": wrapped, "epoch": 3}, tmp_path / "ddp.pt")
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"state_dict": wrapped}, tmp_path / "legacy.th", _use_new_zipfile_serialization=False)
    save_file(state, tmp_path / "plain.safetensors")
    return tmp_path


def test_every_form_of_a_checkpoint_gives_the_same_numbers(saved, capsys):
    found = []
    for name in FILES:
        assert main([str(saved / name), "--model", "resnet20", "--data", "fake:100", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer.pop("checkpoint") == str(saved / name)
        found.append(answer)
    assert found == [found[0]] * len(FILES)
    assert set(found[0]) == {"correct", "samples", "accuracy", "loss", "per_class", "ranks"}
    assert found[0]["samples"] == 20


def test_people_get_one_line(saved, capsys):
    assert main([str(saved / "ddp.pt"), "--model", "resnet20", "--data", "fake:100"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1
    assert "of 20 correct" in said.out
    assert "on 1 rank\n" in said.out


def test_the_numbers_are_those_of_plain_pytorch(saved, capsys):
    from train import data

    samples = data.load(parse(["x", "--model", "resnet20", "--data", "fake:100"])).test
    inputs = torch.stack([samples[index][0] for index in range(20)])
    labels = torch.tensor([samples[index][1] for index in range(20)])
    model = models.resnet20()
    model.load_state_dict(torch.load(saved / "plain.pt", weights_only=True))
    with torch.no_grad():
        scores = model.eval()(inputs)
    main([str(saved / "plain.pt"), "--model", "resnet20", "--data", "fake:100", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["correct"] == (scores.argmax(1) == labels).sum()
    assert answer["loss"] == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["absent.pt", "--model", "resnet20", "--data", "fake:9"], 3, "absent.pt: no such file"),
        (["ddp.pt", "--model", "simple-cnn", "--data", "fake:9"], 1, "does not fit the model"),
        (["ddp.pt", "--model", "resnet20", "--data", "folder:/no/such"], 2, "/no/such: no such folder"),
        (["ddp.pt", "--model", "torchvision:resnet18", "--data", "digits"], 2, "does not take samples"),
        (["ddp.pt", "--model", "no-such", "--data", "fake:9"], 2, "no such model"),
        (["ddp.pt", "--data", "fake:9"], 2, "--model"),
        (["--model", "resnet20"], 2, "CKPT"),
    ],
    ids=[
        "no file",
        "other model",
        "no data",
        "other samples",
        "no model",
        "model not given",
        "nothing given",
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["words", "json"])
def test_a_failure_is_one_line_and_an_object_for_scripts(
    saved, capsys, monkeypatch, arguments, code, said, as_json
):
    monkeypatch.chdir(saved)
    assert main([*arguments, *(["--json"] if as_json else [])]) == code
    answer = capsys.readouterr()
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert said in answer.err
    if as_json:
        error = json.loads(answer.out)["error"]
        assert said in error["message"]
        assert set(error) == {"kind", "message", "hint"}
    else:
        assert answer.out == ""
