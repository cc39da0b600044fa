"""Every command in a hint runs as it stands, in the case that prints it.

A case is an entry of CASES: what is in the folder, and the command that says what to do next. A hint's
command goes to the end of its line, or to a semicolon; names in capitals are outputs that the user chooses.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import save_file

from tests.support.comparing import prefixed
from tests.support.other_files import F32, Tensor, gguf_file
from tests.support.running import Cli

PASTED = re.compile(r"\bckpttool ([a-z][a-z-]* [^;\n]+)")
CHOSEN = re.compile(r"(?<![^ ])([A-Z]+)(?= |$)")  # an output
LOOKS = ("inspect", "verify", "diff", "doctor")  # what they find is no failure


class Case(NamedTuple):
    """What is in the folder, and the command whose hint is followed."""

    files: Callable[[], object]
    command: str


def net(*sizes: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(sizes)))


def run_of(model: torch.nn.Module, **more: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def damaged() -> None:
    torch.save({"w": torch.arange(1000.0)}, "in.pt")
    raw = bytearray(Path("in.pt").read_bytes())
    raw[raw.index(torch.arange(1000.0).numpy().tobytes()) + 40] ^= 1
    Path("in.pt").write_bytes(raw)


def flat_of_fsdp() -> None:
    state = torch.nn.Embedding(40, 16).state_dict()
    save_file(prefixed(state, "embed."), "like.safetensors")
    torch.save({f"embed.{name}": value.flatten() for name, value in state.items()}, "in.pt")


def renamed(state: Any) -> None:
    save_file({f"b.{name}": value for name, value in state.items()}, "like.safetensors")


def from_gguf() -> None:
    """Write a layer of Llama as llama.cpp does, which reorders the rows of q and k, and as it was."""
    random, names = (
        np.random.default_rng(0),
        {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj"},
    )
    there, here = {}, {}
    for block in range(2):
        for ours, theirs in names.items():
            values = random.normal(size=(16, 16)).astype("<f4")
            there[f"model.layers.{block}.self_attn.{theirs}.weight"] = torch.from_numpy(values)
            turned = values.reshape(4, 2, 2, 16).swapaxes(1, 2).reshape(16, 16) if ours in "qk" else values
            here[f"blk.{block}.attn_{ours}.weight"] = Tensor(F32, (16, 16), turned.tobytes())
    save_file(there, "like.safetensors")
    Path("in.gguf").write_bytes(gguf_file(here, [("general.architecture", "llama")]))


def several() -> None:
    for number in range(2):
        torch.save(run_of(net(3, 3), epoch=number), f"epoch{number}.pt")


def in_other_order() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "b": torch.nn.Linear(4, 5)})
    torch.save(run_of(model), "in.pt")
    other = {f"m.{name}": value for name, value in reversed(model.state_dict().items())}
    torch.save(other, "like.pt")


CASES: dict[str, Case] = {
    "a wrong checksum": Case(damaged, "convert in.pt out.pt"),
    "a wrong checksum, doctor": Case(damaged, "doctor in.pt --like in.pt"),
    "no optimizer": Case(
        lambda: torch.save(net(3, 3).state_dict(), "in.pt"), "optimizer in.pt o.pt --to names"
    ),
    "nothing of this name": Case(
        lambda: torch.save({"w": torch.ones(2)}, "in.pt"), "convert in.pt o.pt --drop x"
    ),
    "another prefix": Case(
        lambda: torch.save({"_forward_module.w": torch.ones(2)}, "in.pt"), "strip-prefix in.pt out.pt"
    ),
    "a prefix inside": Case(
        lambda: torch.save({"0._orig_mod.w": torch.ones(2)}, "in.pt"), "strip-prefix in.pt out.pt"
    ),
    "a prefix left": Case(
        lambda: torch.save({"module.module.w": torch.ones(2)}, "in.pt"), "strip-prefix in.pt out.pt"
    ),
    "a flat parameter": Case(flat_of_fsdp, "doctor in.pt --like like.safetensors"),
    "names are equal": Case(
        lambda: [torch.save(net(3, 3).state_dict(), name) for name in ("in.pt", "like.pt")],
        "conform in.pt out.pt --like like.pt",
    ),
    "types differ": Case(
        lambda: [
            torch.save(net(3, 3).to(t).state_dict(), f"{n}.pt")
            for n, t in (("in", torch.float32), ("like", torch.bfloat16))
        ],
        "conform in.pt out.pt --like like.pt",
    ),
    "what the reference lacks": Case(
        lambda: [
            save_file({"a": torch.ones(3), "b": torch.ones(4)}, "in.safetensors"),
            renamed({"a": torch.ones(3)}),
        ],
        "conform in.safetensors out.pt --like like.safetensors",
    ),
    "GGUF of the same model": Case(from_gguf, "doctor in.gguf --like like.safetensors"),
    "an optimizer in another order": Case(in_other_order, "conform in.pt out.pt --like like.pt"),
    "averages of other names": Case(
        lambda: [torch.save({name: torch.ones(2)}, f"{name}.pt") for name in "ab"],
        "average a.pt b.pt mean.pt",
    ),
    "a prefix in one of two": Case(
        lambda: [torch.save({"w": torch.ones(2)}, "a.pt"), torch.save({"module.w": torch.ones(2)}, "b.pt")],
        "verify a.pt --against b.pt",
    ),
    "sparse tensors": Case(
        lambda: torch.save({"s": torch.eye(2).to_sparse(), "b": torch.ones(2)}, "in.pt"),
        "convert in.pt o.safetensors",
    ),
    "objects": Case(
        lambda: torch.save(
            {"model": {"w": torch.ones(2)}, "args": __import__("argparse").Namespace(a=1)}, "in.pt"
        ),
        "strip-prefix in.pt out.pt --prefix w --repeat",
    ),
    "a folder of several": Case(several, "inspect ."),
    "keys that DCP made text": Case(
        lambda: torch.save(run_of(net(3, 3)), "in.pt"), "convert in.pt dcp --to dcp"
    ),
    "LoRA of equal models": Case(
        lambda: [torch.save(net(8, 8).state_dict(), name) for name in ("a.pt", "b.pt")],
        "extract-lora a.pt b.pt adapter --rank 2",
    ),
    "a state that has no effect": Case(
        lambda: torch.save(run_of(net(3, 3)), "in.pt"), "convert in.pt o.pt --state model"
    ),
    "another's prefix before a split": Case(
        lambda: torch.save(prefixed(net(4, 4).state_dict(), "module."), "in.pt"),
        "split in.pt out --ranks 2 --as dtensor",
    ),
    "a map of a wrapped model": Case(
        lambda: torch.save(prefixed(net(4, 4).state_dict(), "module."), "in.pt"),
        "convert in.pt out.pt --map nanogpt-gpt2",
    ),
}

# Cases whose hint has no command, though it has flags
WITHOUT = {"objects"}


def pasted(text: str) -> Iterator[str]:
    """Yield the commands in what was said, on one line each."""
    joined = re.sub(r"\n#   +", " ", text)  # a comment of doctor's that was folded
    lines = (
        (line for line in joined.splitlines() if line.startswith("ckpttool "))
        if "\nckpttool " in joined
        else ()
    )
    yield from (line.removeprefix("ckpttool ") for line in lines)
    if not lines:
        yield from PASTED.findall(joined)


@pytest.mark.parametrize("name", CASES)
def test_the_command_in_a_hint_runs(name: str, cli: Cli, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files, command = CASES[name]
    files()
    said = cli(*shlex.split(command))
    found = [*pasted(f"{said.out}\n{said.err}")]
    assert found or name in WITHOUT, said.err + said.out
    for each in found:
        ran = cli(*shlex.split(CHOSEN.sub(lambda chosen: f"{chosen[1]}.pt", each)))
        allowed = (0, 1) if each.startswith(LOOKS) else (0,)
        assert ran.code in allowed, f"{said.out}{said.err}\n$ {each}\n{ran.err}"
