"""What a command writes depends on its inputs: not on where, when or by whom it was run."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.running import Cli
from tests.support.writing_jobs import JOBS, inputs

__all__ = ["inputs"]  # a fixture

JOBS = JOBS | {
    "delta": "delta plain.safetensors other.safetensors out.safetensors",
    "delta for an engine": "delta plain.safetensors other.safetensors out.safetensors --as vllm",
    "disarm": "disarm in.pt out.pt",
    "extract-lora": "extract-lora plain.safetensors other.safetensors out/ --rank 2 --others save",
    "adapter": "adapter adapter out.safetensors --to kohya --component unet",
    "split": "split plain.safetensors out/ --ranks 2 --as dtensor --device cpu",
    "split into DCP": "split plain.safetensors out/ --ranks 2 --as dcp",
    "convert into DCP": "convert in.pt out.dcp --to dcp",
    "report": "report in.pt out.html",
    "inspect --html": "inspect in.pt --html out.html",
    "scan": "scan in.pt --json",
    "gather-metrics": "gather-metrics rank0.safetensors --samples 3 --out out.json",
}

PREDICTIONS = {name: torch.arange(3) for name in ("index", "prediction", "label")}
PREDICTIONS["loss"] = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize("words", JOBS.values(), ids=JOBS)
def test_the_same_bytes_elsewhere_later_and_of_another_user(
    words: str, inputs: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for folder, zone, user in (("a", "UTC", "ann"), ("other/b", "Asia/Tokyo", "bob")):
        shutil.copytree(inputs, place := tmp_path / folder)
        save_file(PREDICTIONS, place / "rank0.safetensors")
        for path in place.rglob("*"):
            os.utime(path, (len(zone) * 10**8, len(zone) * 10**8))
        for name, value in (("TZ", zone), ("USER", user), ("LOGNAME", user), ("HOME", str(place))):
            monkeypatch.setenv(name, value)
        time.tzset()
        monkeypatch.chdir(place)
        ran = cli(*words.split())
        assert ran.code == 0, ran
        files = [path for path in (*place.glob("out*"), *place.glob("out*/**/*")) if path.is_file()]
        made.append({str(path.relative_to(place)): path.read_bytes() for path in files} or {"said": ran.out})
    first, second = made
    assert [name for name in {*first, *second} if first.get(name) != second.get(name)] == []
