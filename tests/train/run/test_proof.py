"""`train/main.py --prove-every` and `ckpttool prove`: what was changed in a run is found and placed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.programs import ROOT, start
from tests.support.comparing import saved
from tests.support.run_log import record
from tests.support.running import Ran

Cli = Callable[..., Ran]

STEPS = 8
SAVES: list[object] = ["--save-every", "3steps", "--keep", 9]
SETTINGS = ["--batch-size", "6", "--epochs", "2", "--log-every", "100"]
OWN = """
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs = torch.load(Path(__file__).with_name("inputs.pt"))
    labels = torch.arange(30) % 3
    first, second = TensorDataset(inputs[:22], labels[:22]), TensorDataset(inputs[22:], labels[22:])
    first.classes = second.classes = list("abc")
    return first, second

def model():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
"""
"""22 samples to train on: four steps in an epoch."""


def train(folder: Path, *flags: object) -> None:
    own = [f"--data={folder.parent}/own.py:data", f"--model={folder.parent}/own.py:model"]
    given = [*own, *SETTINGS, *map(str, flags), "--out", str(folder)]
    done = start([sys.executable, "train/main.py", *given])
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one rank, with a checkpoint after each third step."""
    folder = tmp_path_factory.mktemp("proof")
    (folder / "own.py").write_text(OWN)
    torch.save(torch.rand(30, 5, generator=torch.Generator().manual_seed(1)), folder / "inputs.pt")
    train(folder / "run", "--prove-every", 2, *SAVES)
    return folder / "run"


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of that run, which may be tampered with."""
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def said_by(cli: Cli, code: int, *arguments: object) -> str:
    """Return what `ckpttool prove` says on stderr, if it ends with this exit code."""
    ran = cli("prove", *arguments)
    assert ran.code == code, ran.err
    return ran.err


def proved(cli: Cli, *arguments: object) -> Any:
    """Return what `ckpttool prove` says of a run that holds, after a replay."""
    ran = cli("prove", *arguments, "--run-code", "--json")
    assert ran.code == 0, ran.out
    return ran.json


def lines_of(run: Path) -> list[bytes]:
    return (run / "run.jsonl").read_bytes().splitlines()


def entries_of(run: Path) -> list[Any]:
    return [json.loads(line) for line in lines_of(run)]


def write(run: Path, lines: list[bytes]) -> None:
    (run / "run.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


def number_of(run: Path, kind: str, step: int) -> int:
    """Return the line, from 1, of an entry."""
    return next(n for n, one in enumerate(entries_of(run), 1) if (one["kind"], one["step"]) == (kind, step))


def rechained(run: Path, number: int, **changed: Any) -> None:
    """Change an entry and compute all hashes anew, as somebody would who knows the format."""
    entries = entries_of(run)
    entries[number - 1].update(changed)
    record(run, *entries)


def replaced(path: Path, content: bytes) -> None:
    """Write a file anew, and not what its other names lead to."""
    path.unlink()
    path.write_bytes(content)


# ---- what holds ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_is_proved_from_its_start(cli, original):
    found = proved(cli, original, "--from", 0)
    assert (found["ok"], found["replayed"], found["problems"]) == (True, [0, STEPS], [])
    assert found["ended"] is True
    steps = {one["file"]: one["step"] for one in found["checkpoints"]}
    assert steps["step-000003.pt"] == 3 and steps["last.pt"] == STEPS


def test_by_default_the_end_is_replayed_from_the_checkpoint_before_it(cli, original, forked_replays):
    ran = cli("prove", original, "--run-code")
    assert ran.code == 0, ran.err
    assert re.search(r": proved \(\d+ lines, 5 checkpoints, steps 7 to 8 replayed, [\d.]+ s\)\n$", ran.out)
    assert ran.err.startswith("replays: ") and "--resume" in ran.err and "--stop-at 8" in ran.err


def test_without_a_replay_nothing_is_run_and_torch_is_not_imported(original):
    code = "import sys; from ckpttool.core import cli"
    code += f"; code = cli.run(['prove', {str(original)!r}, '--no-replay'])"
    code += "; sys.exit(code or 10 * ('torch' in sys.modules))"
    done = start([sys.executable, "-c", code], cwd=ROOT, anew=True)
    assert done.returncode == 0, done.stderr
    assert ": the chain holds (" in done.stdout


def test_the_chain_changes_no_bit_of_the_weights(original):
    other = original.parent / "without"
    train(other)
    states = [torch.load(path / "last.pt", weights_only=True)["model"] for path in (original, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# ---- what was changed --------------------------------------------------------------------------------------


def flip_a_bit(run: Path) -> None:
    path = run / "step-000006.pt"
    weight = torch.load(path, weights_only=True)["model"]["module.0.weight"]
    raw = bytearray(path.read_bytes())
    raw[raw.index(weight.numpy().tobytes()) + 5] ^= 1
    replaced(path, raw)


def save_again(run: Path, part: str, changed: Callable[[Any], object]) -> None:
    """Change a value in a checkpoint and save it."""
    path = run / "step-000006.pt"
    state = torch.load(path, weights_only=True)
    changed(state[part])
    path.unlink()
    saved(state, path)


def rename(run: Path) -> None:
    first, second = sorted(run.glob("step-*.pt"))[:2]
    second.unlink()
    first.rename(second)


def put(run: Path, *lines: bytes, start: int = 3, end: int = 4) -> None:
    """Write these lines in place of some of the record's."""
    before = lines_of(run)
    write(run, [*before[:start], *lines, *before[end:]])


ZEROS, WEIGHTS = "0" * 64, b'"weights": "'
CHANGED: dict[str, Callable[[Path], object]] = {
    "chain: line 4: was changed": lambda run: put(run, lines_of(run)[3].replace(WEIGHTS, WEIGHTS + b"0")),
    "chain: line 4: 1 line before it is missing": put,
    "chain: line 5: was inserted or moved": lambda run: put(run, lines_of(run)[2], start=4, end=4),
    "last.pt: is of step 8, for which the chain has no checkpoint": lambda run: put(run, start=4, end=99),
    "step-000003.pt: was saved with another chain": lambda run: rechained(run, 2, plan=ZEROS),
    "step-000006.pt: .*module.0.weight": flip_a_bit,
    "step-000006.pt: the model's values are not those that step 6 saved": lambda run: save_again(
        run, "model", lambda model: model["module.0.weight"].add_(1)
    ),
    "step-000006.pt: its model is not the one of step 6 in the chain": lambda run: save_again(
        run, "digests", lambda digests: digests.update(model=ZEROS)
    ),
    "not the one in its name": rename,
}


@pytest.mark.covered(lambda said: "is missing" in said or "is not the one of" in said)
@pytest.mark.parametrize("said", CHANGED)
def test_what_is_not_the_runs_is_found_and_placed(cli, run, said):
    assert number_of(run, "step", 4) == 4
    CHANGED[said](run)
    err, ran = said_by(cli, 1, run, "--no-replay"), cli("prove", run, "--no-replay", "--json")
    problems = [f"{one['kind']}: {one['where']}: {one['message']}" for one in ran.json["problems"]]
    assert ran.code == 1 and all(problem in err for problem in problems)
    pattern = said if said.startswith("chain") else f"checkpoint: .*{said}"
    assert any(re.match(pattern, problem) for problem in problems)
    assert len(problems) == 1 or CHANGED[said] is not flip_a_bit
    assert ("chain: line" in err) == said.startswith("chain")


def test_other_weights_in_a_chain_that_was_written_anew_are_found_by_a_replay(cli, run, forked_replays):
    rechained(run, number_of(run, "step", 6), weights=ZEROS)
    for name in ("last.pt", "best.pt", *(f"step-00000{step}.pt" for step in (3, 6, 8))):
        (run / name).unlink(missing_ok=True)
    ran = cli("prove", run, "--run-code")
    assert ran.code == 1
    assert "replay: step 6: the weights differ after step 4, by step 6" in ran.err
    assert ": differs at step 6 (" in ran.out


def test_other_moments_in_a_checkpoint_that_was_saved_again_are_found_by_a_replay(cli, run, forked_replays):
    save_again(run, "optimizer", lambda state: state["state"][0]["momentum_buffer"].add_(1))
    assert "replay: step 6: the replay ended with exit code 3: " in said_by(cli, 1, run, "--run-code")


@pytest.fixture
def samples(original: Path) -> Iterator[torch.Tensor]:
    """Return the samples of the run, to be changed and saved; put them back afterwards."""
    path = original.parent / "inputs.pt"
    before = path.read_bytes()
    yield torch.load(path)
    path.write_bytes(before)


def test_an_exchanged_sample_is_found_and_placed(cli, original, samples, forked_replays):
    """Sample 10 is none of those that are compared before training."""
    from ckpttool.distributed.plan import Plan
    from train.data.data_set import places

    assert 10 not in places(22)
    step = next(n for n, batch in enumerate(Plan(22, 6).batches(0), 1) if 10 in batch)
    samples[10, 2] += 1
    torch.save(samples, original.parent / "inputs.pt")
    said = said_by(cli, 1, original, "--from", 0, "--run-code")
    assert f"replay: step {step}: training sample 10 differs in step {step}\n" in said


def test_a_changed_data_set_is_found(cli, original, samples, forked_replays):
    torch.save(samples + 1, original.parent / "inputs.pt")
    err = said_by(cli, 1, original, "--run-code")
    assert re.search("belongs to a run on other samples: (training|test) sample 0", err)


# ---- runs that were resumed ------------------------------------------------------------------------------


@pytest.mark.long
def test_a_resumed_run_goes_on_with_its_chain_and_a_way_back_is_recorded(cli, original):
    folder = original.parent / "resumed"
    train(folder, "--prove-every", 1, *SAVES, "--stop-at", 5)
    before = lines_of(folder)
    with open(folder / "run.jsonl", "ab") as file:
        file.write(b'{"n": 99, "cut')  # as a run that is killed leaves it
    train(folder, "--resume", folder / "step-000003.pt", *SAVES)
    after = lines_of(folder)
    assert after[: len(before)] == before
    again = cli("prove", folder, "--no-replay")
    assert again.code == 0, again.err
    assert f"line {len(before) + 1}: the run went back from step 5 to step 3" in again.err
    assert proved(cli, folder, "--from", 0)["replayed"] == [0, STEPS]


@pytest.mark.long
def test_a_replay_ends_where_the_run_went_on_with_other_settings(cli, original):
    folder = original.parent / "longer"
    train(folder, "--prove-every", 1, *SAVES, "--stop-at", 6)
    train(folder, "--resume", "auto", "--epochs", 3, *SAVES)
    for first, end in ((3, 6), (6, 12)):
        found = proved(cli, folder, "--from", first)
        assert (found["ok"], found["replayed"]) == (True, [first, end])


@pytest.mark.long
@pytest.mark.parametrize("flags", [[], ["--save", "sync"]], ids=["async", "sync"])
def test_a_run_of_two_ranks_is_replayed_on_two(cli, original, flags):
    folder = original.parent / f"two{len(flags)}"
    train(folder, "--spawn", 2, "--prove-every", 3, "--save-every", "4steps", "--keep", 9, *flags)
    found = proved(cli, folder)
    assert (found["replayed"], found["ranks"]) == ([4, STEPS], 2)
    refused = cli("prove", folder, "--run-code", "--ranks", 1)
    assert refused.code == 2 and "the run had 2" in refused.err


@pytest.mark.long
def test_virtual_ranks_are_replayed_on_another_number(cli, original):
    folder = original.parent / "virtual"
    train(folder, "--virtual-ranks", 2, "--prove-every", 1)
    found = proved(cli, folder, "--ranks", 2, "--from", 0)
    assert (found["replayed"], found["ranks"]) == ([0, STEPS], 2)


# ---- what is refused -------------------------------------------------------------------------------------


def test_code_that_the_run_names_is_not_run_unless_that_is_allowed(cli, run):
    said = said_by(cli, 2, run)
    assert "the replay would run code that the run names: " in said and "--run-code" in said
    code = {"model": "simple-cnn", "data": "digits", "task": "classification"}
    rechained(run, 1, code=code, arguments=["--model=/evil.py:model", "--wandb"])
    assert "code that the run names: /evil.py:model" in said_by(cli, 2, run)  # the arguments alone name it
    rechained(run, 1, code=code, arguments=["--optimizer", "/evil.py:one", "--scheduler=/evil.py:other"])
    assert "code that the run names: /evil.py:one, /evil.py:other" in said_by(cli, 2, run)


def test_a_dry_run_says_the_command_and_runs_nothing(cli, run):
    ran = cli("prove", run, "--run-code", "--dry-run")
    assert ran.code == 0
    assert ran.err.startswith("would replay: ") and f" --stop-at {STEPS} --save-every {STEPS}steps" in ran.err
    assert ": the chain holds (" in ran.out


def test_a_step_that_is_not_in_the_record_is_refused_or_named(cli, run):
    ran = cli("prove", run, "--run-code", "--dry-run", "--from", 0, "--to", STEPS + 1)
    assert (ran.code, ran.out) == (2, "")
    assert f"--to {STEPS + 1}: the last step in the record is {STEPS}\n" in ran.err
    ran = cli("prove", run, "--run-code", "--dry-run", "--from", 0, "--to", 5)
    assert ran.code == 0 and "replays up to step 4: step 5 is not in the record\n" in ran.err


@pytest.mark.parametrize(("text", "said"), [
    (None, "no such file"),
    (b"", "holds no entries"),
    (b"\x00\xff garbage\n", "holds no entries"),
    (b'{"n": 1, "prev": "", "kind": "step", "step": 1}\n', "is no record of a run"),
    (b'{"n": 1, "prev": "", "kind": "begin"}\n', "line 1 is no entry of a run: 'begin' lacks 'step'"),
])  # fmt: skip
def test_what_is_no_record_is_refused(cli, tmp_path, text, said):
    if text is not None:
        (tmp_path / "run.jsonl").write_bytes(text)
    ran = cli("prove", tmp_path)
    assert (ran.code, ran.out) == (3, "")
    assert said in ran.err


@pytest.mark.long
def test_a_record_that_begins_with_a_resume_is_proved_from_there_and_not_before(cli, original):
    folder = original.parent / "late"
    train(folder, *SAVES, "--stop-at", 3)
    train(folder, *SAVES, "--resume", "auto", "--prove-every", 1)
    assert "the run has checkpoints of steps 3, 4, 6, 8" in said_by(cli, 2, folder, "--from", 2, "--run-code")
    assert "the record begins at step 3, with a resume" in said_by(cli, 0, folder, "--from", 4, "--run-code")


def test_a_record_that_is_no_regular_file_is_refused_and_not_waited_for(cli, tmp_path):
    os.mkfifo(tmp_path / "run.jsonl")
    assert "is not a regular file" in said_by(cli, 3, tmp_path, "--no-replay")


def test_files_of_the_users_are_no_problem_and_named_if_the_trainer_could_have_named_them(cli, run):
    for name in ("step-7.pt", "step-000007.pt"):
        (run / name).write_text("text")
    torch.save({"digests": "abc", "progress": {"global_step": 9}}, run / "step-000009.pt")
    err = said_by(cli, 0, run, "--no-replay")
    assert "step-7.pt" not in err and "the record has no checkpoint of that step" in err
    assert "step-000009.pt: is no checkpoint of the trainer" in err
    replaced(run / "step-000006.pt", b"text")
    assert "checkpoint: step-000006.pt: " in said_by(cli, 1, run, "--no-replay")


@pytest.mark.parametrize("before", ["step-000006.pt", None], ids=["another save", "no save"])
def test_a_checkpoint_that_a_kill_kept_from_its_place_is_a_note(cli, run, before):
    """The line of a checkpoint is in the record before its file has a name."""
    step = STEPS if before else 3
    write(run, lines_of(run)[: number_of(run, "checkpoint", step)])
    last = before and (run / before).read_bytes()
    for path in run.glob("*.pt"):
        if before is None or path.name in ("last.pt", "best.pt", f"step-{STEPS:06}.pt"):
            path.unlink()
    if last:
        (run / "last.pt").write_bytes(last)
    err = said_by(cli, 0, run, "--no-replay")
    said = "last.pt is of step 6, and the record's last checkpoint of 8"
    assert (said if before else "none of the 1 recorded checkpoints is in the folder") in err
    assert "the record has no end" in err


def test_a_resume_from_a_checkpoint_that_the_record_does_not_hold_is_found(cli, run):
    entries = entries_of(run)
    begin, step = (next(one for one in entries if one["kind"] == kind) for kind in ("begin", "step"))
    other = {**begin, "step": 99, "source": {"digests": {"model": "0"}}, "ranks": 3}
    record(run, *entries, other, {**step, "step": 100})
    err = said_by(cli, 1, run, "--run-code", "--dry-run")
    assert "goes on from a checkpoint of step 99" in err
    assert "--stop-at 8 " in err and "the run went on from step 99 with other settings" in err
    said = "--from 8: the record has no step from 8 up to 100 with the same settings"
    assert said in said_by(cli, 2, run, "--run-code", "--dry-run", "--from", 8)
