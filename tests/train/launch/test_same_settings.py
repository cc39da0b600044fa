"""Ranks that were started with different flags, code or versions of torch do not train together."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import CkptToolError
from train import main
from train.config import command_line
from train.config.flags import Every
from train.config.sections import TrainConfig
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
    said = run_ranks(3, compared, [usual, TrainConfig.of(**{name: value}), usual])
    for of_rank in said:
        assert of_rank.startswith("RanksDiffer: ") and text in of_rank


def test_all_settings_that_differ_are_named_in_one_error_as_is_another_factory_of_a_file(run_ranks):
    said = run_ranks(
        2, compared, [TrainConfig.of(model="a.py:one"), TrainConfig.of(model="b/a.py:two", seed=1)]
    )
    assert "--model b/a.py:two on rank 1, and --model a.py:one on rank 0" in said[0]
    assert "--seed 1 on rank 1" in said[0]


@pytest.mark.parametrize("name", OWN)
def test_what_is_a_nodes_own_may_differ(run_ranks, name):
    here: dict[str, Any] = {"data": "folder:pictures", "model": "own.py:model", "resume": "auto"}
    configs = [TrainConfig.of(**here), TrainConfig.of(**{**here, name: OWN[name]})]
    assert run_ranks(2, compared, configs) == ["", ""]


def test_ranks_of_an_evaluation_are_compared_too(run_ranks):
    one: Any = EvaluateConfig.of(checkpoint="a.pt")
    said = run_ranks(2, compared, [one, EvaluateConfig.of(checkpoint="/b/a.pt", resize=8)])
    assert "--resize 8 on rank 1, and no --resize on rank 0 (give the same on every node; only" in said[0]
    assert run_ranks(2, compared, [one, one]) == ["", ""]


OLDER = "torch is 2.13.0 on rank 1, and 2.14.1 on rank 0"
VERSIONS = [
    ("2.14.1", False, ""),
    ("2.14.0+cu130", False, "torch is 2.14.0+cu130 on rank 1, and 2.14.1 on rank 0"),
    ("2.13.0", False, f"RanksDiffer: {OLDER}"),
    ("2.13.0", True, OLDER),
]


@pytest.mark.parametrize(("other", "mixed", "outcome"), VERSIONS)
def test_versions_of_torch(run_ranks, other, mixed, outcome):
    said = run_ranks(2, compared, [TrainConfig.of(mixed_torch=mixed)] * 2, ["2.14.1", other])
    assert said[1].startswith(outcome) and bool(said[1]) == bool(outcome)
    assert ("--mixed-torch" in said[1]) == outcome.startswith("RanksDiffer")


CODE = {
    "own.py": "from beside import width\nfrom torch import nn\n\ndef model(num_classes):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(3072 * width, num_classes))\n",
    "beside.py": "width = 1\n",
}


def warned(rank: int, size: int, folder: Path) -> str:
    """Train with the code of this rank's own node; return what is said on stderr."""
    flags = (
        f"--model {folder}/node{rank}/own.py:model --data fake:8 --batch-size 8 --epochs 1 --out {folder}/run"
    )
    job = main.prepare(command_line.parse(flags.split()))
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()) as errors:
        assert main.train(job) == 0
    return errors.getvalue()


@pytest.mark.parametrize("changed", CODE)
def test_code_that_differs_is_a_warning_also_where_a_file_imports_it(fresh_ranks, tmp_path, changed):
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        for name, text in CODE.items():
            (tmp_path / f"node{node}" / name).write_text(
                text + "\n# more\n" * (node == 1 and name == changed)
            )
    first, second = fresh_ranks(2, warned, tmp_path)
    assert first.startswith("warning: ") and f"{changed} of rank 1 is not that of rank 0" in first
    assert second == ""
