"""ckpttool optimizer and average, as people and scripts use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_to_names_and_back_keeps_everything_else(path: Path, cli: Any) -> None:
    named, back = path.with_name("named.pt"), path.with_name("back.pt")
    ran = cli("optimizer", path, named, "--to", "names", "--order", "state")
    assert ran.code == 0, ran.err
    assert "it names no parameters: they were taken in the order of the file's state" in ran.err
    assert ran.out.startswith(f"keyed 1 optimizer of 4 parameters by names -> {named} (")
    wanted = ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(torch.load(named, weights_only=True)["optimizer"]["state"]) == wanted
    assert cli("optimizer", named, back, "--to", "indices").code == 0
    assert cli("diff", path, back).code == 0


def test_the_order_of_another_model(path: Path, cli: Any) -> None:
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


def test_everything_stays_in_safetensors_too(path: Path, cli: Any) -> None:
    out = path.with_name("out.safetensors")
    assert cli("optimizer", path, out, "--to", "names", "--order", "state").code == 0
    assert cli("optimizer", out, path.with_name("back.pt"), "--to", "indices").code == 0
    assert cli("diff", path, path.with_name("back.pt")).code == 0


def test_what_can_not_be_known_is_exit_3_and_a_file_without_an_optimizer_exit_1(path: Path, cli: Any) -> None:
    torch.save(torch.load(path, weights_only=True)["optimizer"], path)
    ran = cli("optimizer", path, path.with_name("out.pt"), "--to", "names")
    assert ran.code == 3 and "names no parameters" in ran.err and "--model SPEC" in ran.err
    torch.save({"w": torch.ones(1)}, path)
    assert cli("optimizer", path, path.with_name("out.pt"), "--to", "names").code == 1
    assert cli("optimizer", path, path.with_name("out.pt")).code == 2


def test_a_state_can_be_named(path: Path, cli: Any) -> None:
    words = ["--to", "names", "--order", "state", "--state", "model"]
    assert cli("optimizer", path, path.with_name("out.pt"), *words).code == 0
    assert "epoch" in torch.load(path.with_name("out.pt"), weights_only=True)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for i in (0, 1, 5):
        state = {"w": torch.full((3,), float(i)), "n": torch.tensor(i), "bn.running_var": torch.ones(1) * i}
        torch.save({"model": state, "epoch": i}, tmp_path / f"{i}.pt")
    return [tmp_path / f"{i}.pt" for i in (0, 1, 5)]


def test_the_mean_is_written_and_what_is_not_averaged_is_said(files: list[Path], cli: Any) -> None:
    out = files[0].with_name("mean.pt")
    ran = cli("average", *files, out)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"averaged 2 tensors of 3 files -> {out} (")
    assert f"integers that differ, taken from {files[2]}: n" in ran.err
    assert "1 running statistics of BatchNorm were averaged too" in ran.err
    assert "left out: epoch" in ran.err
    found = torch.load(out, weights_only=True)
    assert (found["w"].tolist(), found["n"].item()) == ([2.0] * 3, 5)


def test_weights_json_dry_run_and_force(files: list[Path], cli: Any) -> None:
    out = files[0].with_name("mean.safetensors")
    ran = cli("average", *files, out, "--weights", "0,3,1", "--json", "--dry-run")
    assert (ran.code, ran.json["files"], ran.json["averaged"], ran.json["dry_run"]) == (0, 3, 2, True)
    assert ran.json["taken_from_last"] == ["n"] and not out.exists()
    assert cli("average", *files, out, "--weights", "0,3,1", "--verify").code == 0
    assert (cli("inspect", out).code, cli("average", *files, out).code) == (0, 2)
    assert cli("average", *files, out, "--force").code == 0
    for wrong in ("1,2", "a,b,c", "0,0,0", "1,-1,1"):
        assert cli("average", *files, out, "--force", "--weights", wrong).code == 2


def test_other_structures_are_refused_with_the_command_that_tells_more(files: list[Path], cli: Any) -> None:
    torch.save({"model": {"w": torch.ones(4)}}, files[1])
    ran = cli("average", *files, files[0].with_name("mean.pt"))
    assert ran.code == 3 and "hint: ckpttool diff --model-only" in ran.err
    assert cli("average", files[0], files[0].with_name("mean.pt")).code == 2
