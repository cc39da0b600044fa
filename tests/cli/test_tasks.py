"""docs/tasks.md and docs/maps.md: commands on names and optimizers do what their row says, as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpttool.transforms.wrappers import WRAPPERS
from tests.support.comparing import prefixed
from tests.support.dialects import GPT, random_state
from tests.support.running import ROOT, Cli

TASKS = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
MAPS = (ROOT / "docs" / "maps.md").read_text(encoding="utf-8")


def in_rows(verb: str) -> list[str]:
    """Return the whole commands of a verb in the tables of the page, in their order."""
    rows = (line for line in TASKS.splitlines() if line.startswith("|"))
    return [command for row in rows for command in re.findall(rf"`ckpttool ({verb} [^`]* [^`]*)`", row)]


@pytest.fixture
def files(here: Path) -> None:
    """Checkpoints of a model whose layers have one shape, with an optimizer that names nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    whole = {"model": prefixed(model.state_dict(), "module."), "optimizer": optimizer.state_dict()}
    torch.save(whole, here / "last.pt")
    torch.save(prefixed(model.state_dict(), "_orig_mod.module."), here / "comp.pt")
    inside = {f"_orig_mod.0._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save(inside, here / "parts.pt")
    hyper = {"pytorch-lightning_version": "2", "state_dict": prefixed(model.state_dict(), "model.")}
    torch.save(hyper | {"hyper_parameters": {"lr": 1.0}}, here / "in.ckpt")


@pytest.mark.usefixtures("files")
def test_the_rows_on_prefixes_leave_none(cli: Cli) -> None:
    assert len(in_rows("strip-prefix")) == 4
    for command in in_rows("strip-prefix"):
        assert cli(f"{command} --force").code == 0, command
        output = command.split()[2]
        names = [tensor["name"] for tensor in cli(f"inspect {output} --json").json["tensors"]]
        assert names and not any(prefix in name for name in names for prefix in WRAPPERS), command


@pytest.mark.usefixtures("files")
def test_the_rows_on_optimizers_work_one_after_the_other(cli: Cli) -> None:
    assert len(in_rows("optimizer")) == 3
    for command in in_rows("optimizer"):
        ran = cli(command)
        assert ran.code == 0, f"{command}: {ran.err}"


def test_the_page_of_maps_takes_nanogpt_s_own_checkpoint(cli: Cli, here: Path) -> None:
    state = random_state(GPT)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    parameters = [nn.Parameter(value) for name, value in state.items() if name != "lm_head.weight"]
    groups = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    whole = {"model": prefixed(state, "_orig_mod."), "optimizer": optimizer.state_dict()}
    torch.save(whole | {"model_args": {"n_layer": 2}}, here / "ckpt.pt")
    block = MAPS.partition("nanoGPT's own `ckpt.pt`")[2]
    commands = re.findall(r"^    ckpttool (.*)$", block.partition("\n## ")[0], re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        ran = cli(command)
        assert ran.code == 0, f"{command}: {ran.err}"
    assert torch.load("gpt2.pt")["model"]["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
