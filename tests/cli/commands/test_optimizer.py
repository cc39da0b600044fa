"""ckpttool optimizer, as people and scripts use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.running import Ran

Cli = Callable[..., Ran]

MODELS = """
import torch

def make(order):
    shapes = {"a": (4, 4), "b": (4, 4)}
    return torch.nn.ModuleDict({name: torch.nn.Linear(*shapes[name]) for name in order})
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(MODELS)
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net["b"](net["a"](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "in.pt"
    )
    return tmp_path / "in.pt"


def test_to_names_and_back_keeps_everything_else(path: Path, cli: Cli) -> None:
    named, back = path.with_name("named.pt"), path.with_name("back.pt")
    ran = cli("optimizer", path, named, "--to", "names", "--order", "state")
    assert ran.code == 0, ran.err
    assert "it names no parameters: they were taken in the order of the file's state" in ran.err
    assert ran.out.startswith(f"keyed 1 optimizer of 4 parameters by names -> {named} (")
    assert list(torch.load(named, weights_only=True)["optimizer"]["state"]) == [
        *("a.weight", "a.bias", "b.weight", "b.bias")
    ]
    assert cli("optimizer", named, back, "--to", "indices").code == 0
    assert cli("diff", path, back).code == 0


def test_the_order_of_another_model(path: Path, cli: Cli) -> None:
    out = path.with_name("out.pt")
    spec = f"{path.with_name('nets.py')}:make(order='ba')"
    ran = cli("optimizer", path, out, "--to", "indices", "--model", spec)
    assert ran.code == 3 and "orders that both fit" in ran.err and "--order state" in ran.err
    ran = cli("optimizer", path, out, "--to", "indices", "--model", spec, "--order", "state", "--json")
    assert (ran.code, ran.json["moved"], ran.json["parameters"]) == (0, 4, 4)
    assert ran.json["ordered"] == ["optimizer"]
    before, after = (torch.load(each, weights_only=True)["optimizer"]["state"] for each in (path, out))
    for old, new in enumerate((2, 3, 0, 1)):
        assert torch.equal(before[old]["momentum_buffer"], after[new]["momentum_buffer"])
    same = f"{path.with_name('nets.py')}:make(order='ab')"
    assert cli("optimizer", path, out, "--to", "indices", "--model", same, "--force").code == 1


def test_everything_stays_in_safetensors_too(path: Path, cli: Cli) -> None:
    out = path.with_name("out.safetensors")
    assert cli("optimizer", path, out, "--to", "names", "--order", "state").code == 0
    assert cli("optimizer", out, path.with_name("back.pt"), "--to", "indices").code == 0
    assert cli("diff", path, path.with_name("back.pt")).code == 0


def test_what_can_not_be_known_is_exit_3_and_a_file_without_an_optimizer_exit_1(path: Path, cli: Cli) -> None:
    torch.save(torch.load(path, weights_only=True)["optimizer"], path)
    ran = cli("optimizer", path, path.with_name("out.pt"), "--to", "names")
    assert ran.code == 3 and "names no parameters" in ran.err and "--model SPEC" in ran.err
    torch.save({"w": torch.ones(1)}, path)
    assert cli("optimizer", path, path.with_name("out.pt"), "--to", "names").code == 1
    assert cli("optimizer", path, path.with_name("out.pt")).code == 2


def test_a_state_can_be_named(path: Path, cli: Cli) -> None:
    words = ["--to", "names", "--order", "state", "--state", "model"]
    assert cli("optimizer", path, path.with_name("out.pt"), *words).code == 0
    assert "epoch" in torch.load(path.with_name("out.pt"), weights_only=True)
