"""The program of docs/metrics.md that evaluates a model runs as it stands."""

from __future__ import annotations

import json
import re

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.running import ROOT


def test_the_program_for_your_own_loop_runs(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.partition("## A model in your own loop")[2]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    given = {
        "F": nn.functional,
        "model": nn.Linear(4, 1),
        "test_set": TensorDataset(torch.randn(9, 4), torch.randn(9, 1)),
        "device": "cpu",
        "rank": 0,
    }
    exec("import json\nfrom pathlib import Path\n" + program, given)
    assert json.loads((tmp_path / "eval.json").read_text())["samples"] == 9
    assert capsys.readouterr().out.endswith(" 9\n")
