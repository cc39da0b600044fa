"""doctor finds each of several causes that keep one file from loading, and prints commands that run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpttool.transforms.mapping.builtin import named
from tests.support.dialects import GPT, LLAMA
from tests.support.mapped import State, mapped, random_state
from tests.support.running import Cli
from tests.support.saved import prefixed

# Each tensor of the model depends on its size.
CODE = """
from torch import nn

def model(vocab=16, d=4, n=2):
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d)) for _ in range(n))
    head = nn.Linear(d, vocab, bias=False)
    return nn.ModuleDict({"embed": nn.Embedding(vocab, d), "blocks": blocks, "head": head})
"""


@pytest.fixture
def own(here: Path) -> nn.Module:
    """The model of `own.py:model`, in whose folder the test runs."""
    (here / "own.py").write_text(CODE, encoding="utf-8")
    space: dict[str, object] = {}
    exec(CODE, space)
    built = space["model"]()  # type: ignore[operator]
    assert isinstance(built, nn.Module)
    return built


def commands(script: str) -> list[str]:
    """Return the commands of a script that doctor printed."""
    return [line.removeprefix("ckpttool ") for line in script.splitlines() if line.startswith("ckpttool ")]


def pasted(cli: Cli, script: str) -> None:
    """Run each command of a script; all must succeed."""
    assert commands(script)
    for line in commands(script):
        ran = cli(*shlex.split(line))
        assert ran.code == 0, f"{line}: {ran.err}"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "net."])
def test_a_prefix_does_not_hide_a_model_of_another_size(
    prefix: str, own: nn.Module, cli: Cli, here: Path
) -> None:
    torch.save({"model": prefixed(own.state_dict(), prefix)}, here / "a.pt")
    ran = cli("doctor", "a.pt", "--model", "own.py:model(d=8)")
    assert ran.code == 1 and "d is 4 in the file and 8 in the model" in " ".join(ran.out.split("\n#  "))
    pasted(cli, ran.out)


def test_another_number_of_layers_is_found_by_the_factory_or_said(
    own: nn.Module, cli: Cli, here: Path
) -> None:
    torch.save(own.state_dict(), here / "a.pt")
    ran = cli("doctor", "a.pt", "--model", "own.py:model(n=3)")
    assert "size: n is 2 in the file and 3 in the model" in ran.out
    pasted(cli, ran.out)
    torch.save({**own.state_dict(), "blocks.2.0.weight": torch.ones(4)}, here / "like.pt")
    ran = cli("doctor", "a.pt", "--like", "like.pt")
    said = " ".join(line.strip("# ") for line in ran.out.splitlines())
    assert "lacks 1 of the model's names; the model has 3 layers 'blocks.N', the file 2" in said
    assert said.count("blocks.2.0.weight") == 1  # not once more below


def test_no_names_are_guessed_for_another_model(cli: Cli, here: Path) -> None:
    names = {f"layer{i}.{j}.conv.weight": torch.ones(4, 4, 3, 3) for i in range(2) for j in range(2)}
    torch.save({**names, "fc.weight": torch.ones(3, 9)}, here / "a.pt")
    torch.save(
        {f"stage{i}.conv.weight": torch.ones(4, 4, 3, 3) for i in range(3)}
        | {"top.weight": torch.ones(5, 7)},
        here / "b.pt",
    )
    ran = cli("doctor", "a.pt", "--like", "b.pt")
    assert ran.code == 1 and not commands(ran.out) and "shapes alone" not in ran.out


@pytest.fixture
def gpt(here: Path) -> State:
    """nanoGPT's weights; `gpt2.pt` has what GPT-2 of transformers saves of them."""
    state = random_state(GPT)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    torch.save(mapped(state, here, named("nanogpt-gpt2"), config=LLAMA)[0], here / "gpt2.pt")
    return state


def with_optimizer(state: State, order: int = 1) -> dict[str, object]:
    """Return a checkpoint as nanoGPT writes it: two groups of an AdamW that names no parameters."""
    parameters = [nn.Parameter(value) for name, value in state.items() if name != "lm_head.weight"][::order]
    groups = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return {"model": state, "optimizer": optimizer.state_dict(), "iter_num": 5}


@pytest.mark.parametrize("has_head", [True, False])
def test_a_prefix_does_not_hide_a_map(has_head: bool, gpt: State, cli: Cli, here: Path) -> None:
    state = {name: value for name, value in gpt.items() if has_head or name != "lm_head.weight"}
    torch.save({"model": prefixed(state, "module.")}, here / "a.pt")
    ran = cli("doctor", "a.pt", "--like", "gpt2.pt")
    assert [line.split()[0] for line in commands(ran.out)] == ["strip-prefix", "convert", "doctor"]
    pasted(cli, ran.out)


def test_the_optimizer_is_named_before_a_map(gpt: State, cli: Cli, here: Path) -> None:
    torch.save(whole := with_optimizer(gpt), here / "a.pt")
    ran = cli("doctor", "a.pt", "--like", "gpt2.pt")
    assert commands(ran.out)[0] == "optimizer a.pt a.mended.pt --to names --order state"
    assert "they are taken in the order of the file's state" in " ".join(ran.out.split("\n#  "))
    pasted(cli, ran.out)
    made = torch.load(here / "a.mended.pt")
    assert made["iter_num"] == whole["iter_num"]
    ends = [name for name in gpt if name != "lm_head.weight"]
    for number, name in enumerate(ends):
        kept = made["optimizer"]["state"][name]["exp_avg"]
        assert kept.shape == made["model"][name].shape
        torch.testing.assert_close(kept, torch.full_like(kept, 0.1 * (number + 1)))


def test_an_optimizer_that_no_order_names_is_left_out_by_name(gpt: State, cli: Cli, here: Path) -> None:
    torch.save(with_optimizer(gpt, order=-1), here / "a.pt")
    ran = cli("doctor", "a.pt", "--like", "gpt2.pt")
    assert commands(ran.out)[0] == "convert a.pt a.mended.pt --drop optimizer"
    assert "can't follow the map, and is left out: optimizer" in " ".join(ran.out.split("\n#  "))
    pasted(cli, ran.out)
    assert torch.load(here / "a.mended.pt")["iter_num"] == 5
