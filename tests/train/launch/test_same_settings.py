"""Ranks that were started with different flags, code or versions of torch do not train together."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from ckpttool.errors import CkptToolError
from tests.ranks.forked import Program
from tests.ranks.programs import ROOT, environment
from train.config.shared import Every
from train.config.training import TrainConfig
from train.evaluate import EvaluateConfig
from train.launch import same_settings

OTHER: dict[str, tuple[Any, str]] = {
    "seed": (7, "--seed 7 on rank 1, and --seed 0 on ranks 0 and 2"),
    "batch_size": (12, "--batch-size 12 on rank 1, and --batch-size 64 on ranks 0 and 2"),
    "accumulate": (2, "--accumulate 2 on rank 1, and --accumulate 1"),
    "lr": (0.05, "--lr 0.05 on rank 1, and --lr 0.1"),
    "clip_norm": (1.0, "--clip-norm 1.0 on rank 1, and no --clip-norm"),
    "epochs": (3, "--epochs 3 on rank 1, and --epochs 10"),
    "amp": ("bf16", "--amp bf16 on rank 1, and --amp none"),
    "sampler": ("torch", "--sampler torch on rank 1, and --sampler exact"),
    "model": ("resnet20", "--model resnet20 on rank 1, and --model simple-cnn"),
    "save_every": (Every(2, "steps"), "--save-every 2steps on rank 1, and --save-every 1epochs"),
    "rank_share": ((1, 2, 3), "--rank-share 1,2,3 on rank 1, and no --rank-share"),
    "set_epoch": (False, "--no-set-epoch on rank 1, and no --no-set-epoch on"),
    "change": (("lr",), "--change lr on rank 1, and no --change on"),
}
OWN = {
    "out": "runs/here",
    "data_root": "/mnt/data",
    "workers": 4,
    "data": "folder:/mnt/pictures",
    "model": "/home/b/own.py:model",
    "resume": "/mnt/last.pt",
}


def compared(rank: int, size: int, configs: list[TrainConfig], torch: list[str] | None = None) -> str:
    with pytest.MonkeyPatch.context() as patch:  # the process goes on to other tests
        if torch:
            versions = {"torch": torch[rank], "ckpttool": "1", "python": "3"}
            patch.setattr(same_settings, "versions", lambda: versions)
        try:
            warnings = same_settings.compare(configs[rank])
        except CkptToolError as error:
            return f"{type(error).__name__}: {error.message} ({error.hint})"
    return "; ".join(warnings)


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_that_differs_is_named_with_values_and_ranks(run_ranks, name):
    value, text = OTHER[name]
    usual = TrainConfig()
    said = run_ranks(3, compared, [usual, TrainConfig(**{name: value}), usual])
    for of_rank in said:
        assert of_rank.startswith("RanksDiffer: ") and text in of_rank


def test_all_settings_that_differ_are_named_in_one_error(run_ranks):
    said = run_ranks(2, compared, [TrainConfig(), TrainConfig(seed=1, lr=0.2)])
    assert "--seed 1 on rank 1" in said[0] and "--lr 0.2 on rank 1" in said[0]


@pytest.mark.parametrize("name", OWN)
def test_what_is_a_nodes_own_may_differ(run_ranks, name):
    here: dict[str, Any] = {"data": "folder:pictures", "model": "own.py:model", "resume": "auto"}
    configs = [TrainConfig(**here), TrainConfig(**{**here, name: OWN[name]})]
    assert run_ranks(2, compared, configs) == ["", ""]


def test_ranks_of_an_evaluation_are_compared_too(run_ranks):
    configs: list[Any] = [EvaluateConfig(checkpoint="a.pt"), EvaluateConfig(checkpoint="/b/a.pt", resize=8)]
    said = run_ranks(2, compared, configs)
    assert "--resize 8 on rank 1, and no --resize on rank 0 (give the same on every node; only" in said[0]
    assert run_ranks(2, compared, [configs[0], configs[0]]) == ["", ""]


def test_another_factory_of_a_file_is_another_setting(run_ranks):
    said = run_ranks(2, compared, [TrainConfig(model="a.py:one"), TrainConfig(model="b/a.py:two")])
    assert "--model b/a.py:two on rank 1, and --model a.py:one on rank 0" in said[0]


@pytest.mark.parametrize(
    ("versions", "flags", "outcome"),
    [
        (["2.14.1", "2.14.1"], {}, ""),
        (["2.14.1", "2.14.0+cu130"], {}, "torch is 2.14.0+cu130 on rank 1, and 2.14.1 on rank 0"),
        (["2.14.1", "2.13.0"], {}, "RanksDiffer: torch is 2.13.0 on rank 1, and 2.14.1 on rank 0"),
        (["2.14.1", "2.13.0"], {"mixed_torch": True}, "torch is 2.13.0 on rank 1"),
    ],
)
def test_versions_of_torch(run_ranks, versions, flags, outcome):
    said = run_ranks(2, compared, [TrainConfig(**flags)] * 2, versions)
    assert said[1].startswith(outcome) and bool(said[1]) == bool(outcome)
    assert ("--mixed-torch" in said[1]) == outcome.startswith("RanksDiffer")


@pytest.mark.parametrize("changed", ["own.py", "beside.py"])
def test_code_that_differs_is_a_warning_also_where_a_file_imports_it(tmp_path, changed):
    texts = {
        "own.py": "from beside import width\nfrom torch import nn\n\ndef model(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64 * width, num_classes))\n",
        "beside.py": "width = 1\n",
    }
    ranks = []
    for rank in range(2):
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text + "\n# another line\n" * (rank == 1 and name == changed))
        flags = ["--model", f"{folder}/own.py:model", "--epochs", "1", "--out", str(tmp_path / "run")]
        env = environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
        command = [sys.executable, str(ROOT / "train/main.py"), *flags]
        ranks.append(Program(command, tmp_path, env))
    said = [process.communicate(timeout=100)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert said[0].startswith("warning: ") and f"{changed} of rank 1 is not that of rank 0" in said[0]
    assert said[1] == ""
