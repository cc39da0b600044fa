"""Commands one after another at random, and at the same time in one folder: outputs are whole and right."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import ckpttool
from ckpttool.core import cli
from tests.support.comparing import values

# ---- Random sequences of commands on a checkpoint: after each step the same as a reference in plain torch
# Compared are names, their order, values bit for bit, dtypes, shapes, which names share memory, what else
# the file holds, and the momentum of each parameter.


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
NAMED = ["conv.weight", "conv.bias", "bn.running_mean", "head.weight", "a", "b.module.c", "é"]
NAMES = st.lists(st.sampled_from(NAMED), min_size=1, max_size=5, unique=True)
KINDS = st.sampled_from([torch.float32, torch.float16, torch.float64, torch.int64, torch.bool])

ENDINGS = ("x.pt", "x.safetensors", "x/")


class Commands(RuleBasedStateMachine):
    """A file that commands change, and what it must hold.

    Attributes:
        path: the file, or folder of shards.
        state: what the model's state must be; tied names hold one tensor.
        momentum: by parameter; None where the file has no optimizer.
        by_name: whether the optimizer is keyed by names.
        epoch: what else the file holds; None where it holds the state alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.steps = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(names=NAMES, data=st.data(), seed=st.integers(0, 9))
    def save(self, names: list[str], data: st.DataObject, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.state: OrderedDict[str, torch.Tensor] = OrderedDict()
        for name in names:
            shape, dtype = data.draw(SHAPES), data.draw(KINDS)
            self.state[name] = (torch.rand(shape, generator=made, dtype=torch.float64) * 8 - 2).to(dtype)
        if len(names) > 1 and data.draw(st.booleans()):
            self.state[f"{names[0]}_tied"] = self.state[names[0]]
        trained = [name for name, value in self.state.items() if value.is_floating_point()]
        filled = (torch.full(self.state[name].shape, float(at)) for at, name in enumerate(trained))
        self.momentum: dict[str, torch.Tensor] | None = dict(zip(trained, filled, strict=True))
        self.by_name, self.epoch = False, 3
        numbered = {at: {"m": value} for at, value in enumerate(self.momentum.values())}
        group = {"lr": 0.1, "params": [*numbered], "param_names": trained}
        whole = {"model": self.state, "optimizer": {"state": numbered, "param_groups": [group]}, "epoch": 3}
        self.path = self.folder / "0.pt"
        torch.save(whole, self.path)

    def do(self, command: str, *options: object, to: str = "") -> None:
        """Run a command that must succeed; its output is the next step's input."""
        self.steps += 1
        output = f"{self.folder}/{self.steps}{(to or self.same())[1:]}"
        words = [command, str(self.path), output, *map(str, options), "-q"]
        assert cli.run(words) == 0, words
        self.path = Path(output)
        self.compare()

    def rename(self, new: dict[str, str]) -> None:
        self.state = OrderedDict((new.get(name, name), value) for name, value in self.state.items())
        if self.momentum is not None:
            self.momentum = {new.get(name, name): value for name, value in self.momentum.items()}

    def compare(self) -> None:
        """Convert the file to `.pt`, have torch load it, and compare all of it."""
        check = self.folder / "check.pt"
        with ckpttool.open(self.path) as checkpoint:
            ckpttool.save(checkpoint, check, force=True)
        whole = torch.load(check, weights_only=True)
        state = whole["model"] if self.epoch is not None else whole
        if self.epoch is None and self.path.suffix != ".pt":  # sorted, as by save_file
            assert {*state} == {*self.state}
            self.state = OrderedDict((name, self.state[name]) for name in state)
        assert [*state] == [*self.state]
        for name, value in self.state.items():
            assert (state[name].dtype, state[name].shape) == (value.dtype, value.shape), name
            assert values(state[name]) == values(value), name
        assert shared(state) == shared(self.state)
        if self.epoch is not None:
            assert whole["epoch"] == self.epoch
        if self.momentum is not None:
            self.compare_momentum(whole["optimizer"])

    def compare_momentum(self, optimizer: dict[str, Any]) -> None:
        assert self.momentum is not None
        (group,) = optimizer["param_groups"]
        named = group["params"] if self.by_name else group["param_names"]
        assert named == [*self.momentum]
        for key, name in zip(group["params"], named, strict=True):
            assert values(optimizer["state"][key]["m"]) == values(self.momentum[name]), name

    # ---- commands

    @rule(prefix=st.sampled_from(["module.", "_orig_mod.", "x."]))
    def add_prefix(self, prefix: str) -> None:
        self.rename({name: prefix + name for name in self.state})
        self.do("add-prefix", "--prefix", prefix)

    @rule(prefix=st.sampled_from(["module.", "_orig_mod.", "x."]))
    def strip_prefix(self, prefix: str) -> None:
        new = {name: name.removeprefix(prefix) for name in self.state}
        if len({*new.values()}) < len(new) or new == {name: name for name in new} or "" in new.values():
            before = self.path
            words = ["strip-prefix", str(before), str(self.folder / "refused.pt"), "--prefix", prefix, "-q"]
            assert cli.run(words) in (1, 2, 3)
            assert not (self.folder / "refused.pt").exists()
            return
        self.rename(new)
        self.do("strip-prefix", "--prefix", prefix)

    @rule(pair=st.sampled_from([("conv", "c"), (r"\bc\b", "conv"), ("weight$", "w"), ("^", "model.")]))
    def rename_keys(self, pair: tuple[str, str]) -> None:
        pattern, to = pair
        new = {name: re.sub(pattern, to, name) for name in self.state}
        if len({*new.values()}) < len(new) or new == {name: name for name in new}:
            return
        self.rename(new)
        self.do("rename-keys", "--map", f"{pattern}={to}")

    @rule(to=st.sampled_from(ENDINGS))
    def convert(self, to: str) -> None:
        self.do("convert", *self.whole(to), *["--shard-size", 64] * (to == "x/"), to=to)

    @rule(dtype=st.sampled_from([*DTYPES]))
    def cast(self, dtype: str) -> None:
        made: dict[int, torch.Tensor] = {}
        for value in self.state.values():
            made[id(value)] = value.to(DTYPES[dtype]) if value.is_floating_point() else value
        if all(made[id(value)] is value for value in self.state.values()):
            return
        self.state = OrderedDict((name, made[id(value)]) for name, value in self.state.items())
        self.do("convert", "--dtype", dtype, *self.whole(self.same()))

    @rule(data=st.data())
    def tie(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from([*self.state]))
        new = f"tied{self.steps}"
        if "=" in old or not self.state[old].numel():
            return
        self.state[new] = self.state[old]
        self.do("convert", "--tie", f"{new}={old}", *self.whole(self.same()))

    @rule()
    def slim(self) -> None:
        self.momentum = self.epoch = None  # type: ignore[assignment]
        self.do("slim")

    @precondition(lambda self: any(map(torch.is_floating_point, self.state.values())))
    @rule()
    def average(self) -> None:
        """The mean of a file and itself is the file's state."""
        self.steps += 1
        self.momentum = self.epoch = None  # type: ignore[assignment]
        output = f"{self.folder}/{self.steps}{self.same()[1:]}"
        assert cli.run(["average", str(self.path), str(self.path), output, "-q"]) == 0
        self.path = Path(output)
        self.compare()

    @precondition(lambda self: self.momentum)
    @rule()
    def rekey_optimizer(self) -> None:
        self.by_name = not self.by_name
        self.do("optimizer", "--to", "names" if self.by_name else "indices", "--order", "state")

    @rule()
    def in_place(self) -> None:
        """The output may be the input."""
        self.rename({name: f"y.{name}" for name in self.state})
        assert cli.run(["add-prefix", str(self.path), str(self.path), "--prefix", "y.", "--force", "-q"]) == 0
        self.compare()

    def whole(self, to: str) -> list[str]:
        """Return the option of `convert` that keeps everything, where there is more than a state."""
        return ["--full"] if self.epoch is not None and to != "x.pt" else []

    def same(self) -> str:
        """Return the ending that keeps the format."""
        return "x/" if self.path.is_dir() else f"x{self.path.suffix}"


def shared(state: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """Return the sets of names whose tensors are one; empty tensors have no memory to share."""
    found: dict[int, set[str]] = {}
    for name, value in state.items():
        if value.numel():
            found.setdefault(value.data_ptr(), set()).add(name)
    return {frozenset(names) for names in found.values()}


PHASES = [Phase.explicit, Phase.generate, Phase.target]
Commands.TestCase.settings = settings(max_examples=25, stateful_step_count=8, phases=PHASES)
test_commands = Commands.TestCase


# ---- Commands that run at the same time in one folder: each output is that of one of them, whole ------


TOGETHER = """
    import json, os, sys
    from ckpttool.core import cli
    jobs = json.loads(sys.argv[1])
    cli.run([*jobs[0], "-q", "--dry-run"])  # import what forks need
    gate, start = os.pipe()
    pids = []
    for words in jobs:
        pid = os.fork()
        if pid == 0:
            os.close(start)
            os.read(gate, 1)  # until all are there
            code = 0
            for _ in range(int(sys.argv[2])):
                code = code or cli.run([*words, "-q"])
            os._exit(code)
        pids.append(pid)
    os.close(start)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


@contextmanager
def together(folder: Path, jobs: list[list[str]], times: int = 1) -> Iterator[tuple[list[int], Any]]:
    """Run several commands in processes that start at the same moment."""
    command = [sys.executable, "-c", textwrap.dedent(TOGETHER), json.dumps(jobs), f"{times}"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, **streams) as running:  # type: ignore[call-overload]
        assert running.stdout is not None
        yield json.loads(running.stdout.readline()), running


def codes_of(running: subprocess.Popen[str]) -> list[int]:
    """Wait for all and return their exit codes; nobody may have shown a traceback."""
    out, err = running.communicate(timeout=100)
    assert err == "", err
    found: list[int] = json.loads(out)
    return found


def prepare(folder: Path, count: int = 2) -> list[str]:
    """Write inputs in.0.pt, in.1.pt, … of different values; return the digests of their states stripped."""
    digests = []
    for number in range(count):
        torch.save({"module.a": torch.full((50_000,), float(number))}, folder / f"in.{number}.pt")
        stripped, _ = ckpttool.strip_prefix(ckpttool.open(folder / f"in.{number}.pt"))
        digests.append(ckpttool.digest(stripped))
    return digests


def left_in(folder: Path) -> list[str]:
    """Return what is in a folder beside inputs and outputs."""
    return [name for name in os.listdir(folder) if not name.startswith(("in.", "out"))]


def run(folder: Path, words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "ckpttool", *words, "-q"], cwd=folder, check=True)


OUTPUTS = ["out.pt", "out.safetensors", "out/"]


@pytest.mark.covered(lambda output: output == "out.safetensors")
@pytest.mark.parametrize("output", OUTPUTS)
def test_two_writers_both_succeed_and_a_reader_has_what_one_wrote(output: str, tmp_path: Path) -> None:
    digests = prepare(tmp_path)
    jobs = [["strip-prefix", f"in.{number}.pt", output, "--force"] for number in range(2)]
    seen: list[str] = []
    with together(tmp_path, jobs, times=20) as (_, running):
        while running.poll() is None and not is_done(running):
            if (tmp_path / output).exists():
                with ckpttool.open(tmp_path / output) as checkpoint:
                    time.sleep(0.001)  # it may be replaced between opening and reading
                    seen.append(ckpttool.digest(checkpoint))
        assert codes_of(running) == [0, 0]
    assert {*seen, ckpttool.digest(tmp_path / output)} <= {*digests}
    assert len(seen) > 1
    assert left_in(tmp_path) == []


def is_done(running: subprocess.Popen[str]) -> bool:
    """Return whether the processes have ended: then their exit codes can be read."""
    assert running.stdout is not None
    return bool(select.select([running.stdout], [], [], 0)[0])


@pytest.mark.long
def test_a_hundred_processes_write_into_one_folder_at_once(tmp_path: Path) -> None:
    """Half of them write one output, the others one each."""
    digests = prepare(tmp_path)
    outputs = ["out.pt" if number % 4 < 2 else f"out{number}.pt" for number in range(100)]
    jobs = [["strip-prefix", f"in.{at % 2}.pt", output, "--force"] for at, output in enumerate(outputs)]
    with together(tmp_path, jobs) as (_, running):
        assert codes_of(running) == [0] * 100
    assert ckpttool.digest(tmp_path / "out.pt") in digests
    for number in range(2, 100, 4):
        assert ckpttool.digest(tmp_path / f"out{number}.pt") == digests[0]
    assert left_in(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("output", OUTPUTS)
def test_killed_writers_leave_a_whole_output_and_the_next_one_cleans_up(output: str, tmp_path: Path) -> None:
    digests = prepare(tmp_path)
    jobs: list[list[str]] = [["strip-prefix", f"in.{n % 2}.pt", output, "--force"] for n in range(6)]
    run(tmp_path, jobs[0])
    drawn = random.Random(0)
    with together(tmp_path, jobs, times=10) as (pids, running):
        for pid in pids[:4]:
            time.sleep(drawn.random() / 20)
            with contextlib.suppress(ProcessLookupError):  # it was done already
                os.kill(pid, signal.SIGKILL)
        codes = codes_of(running)
    assert codes[4:] == [0, 0]
    assert {*codes[:4]} <= {0, -signal.SIGKILL}
    assert ckpttool.digest(tmp_path / output) in digests
    run(tmp_path, jobs[0])
    assert ckpttool.digest(tmp_path / output) == digests[0]
    assert left_in(tmp_path) == []
