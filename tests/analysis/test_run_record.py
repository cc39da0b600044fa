"""A record of a run that was damaged, or made by somebody else, is refused in words, by line and field."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

import ckpttool
from ckpttool.proving import replay
from tests.support.run_log import BEGIN, STEP, record
from tests.support.running import Cli


def without(entry: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != name}


@pytest.mark.parametrize("name", [key for key in BEGIN if key != "kind"])
def test_a_field_that_is_missing_is_named(name: str, cli: Cli, tmp_path: Path) -> None:
    folder = record(tmp_path, without(BEGIN, name), STEP)
    for flags in (["--no-replay"], ["--dry-run", "--from", "0"]):
        ran = cli("prove", folder, *flags)
        assert ran.code == 3
        said = f"line 1 is no entry of a run: 'begin' lacks '{name}'\n"
        assert ran.err.startswith(f"error: {folder}/run.jsonl: {said}")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (without(STEP, "weights"), "'step' lacks 'weights'"),
        ({**STEP, "samples": [1]}, "'samples' of 'step' is a list"),
        ({**STEP, "step": "2"}, "'step' of 'step' is a str"),
        ({**STEP, "step": True}, "'step' of 'step' is a bool"),
        ({"kind": "checkpoint", "step": 2, "digests": 7}, "'digests' of 'checkpoint' is a int"),
        ({"kind": "epoch", "step": 2, "epoch": 1}, "'epoch' lacks 'plan'"),
        ({**BEGIN, "source": {"step": 1}}, "'source' of 'begin' lacks 'digests'"),
    ],
)
def test_an_entry_of_other_form_is_named(entry: dict[str, Any], said: str, cli: Cli, tmp_path: Path) -> None:
    ran = cli("prove", record(tmp_path, BEGIN, entry), "--no-replay")
    assert ran.code == 3
    assert f"run.jsonl: line 2 is no entry of a run: {said}\n" in ran.err


def test_entries_of_other_kinds_are_left_alone(cli: Cli, tmp_path: Path) -> None:
    folder = record(tmp_path, BEGIN, STEP, {"kind": "note", "text": "mine"}, {"kind": ["x"], "step": 1})
    assert cli("prove", folder, "--no-replay").code == 0


TRAINER = """
import pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
for step in range(1, 4):
    with open(out / "run.jsonl", "a") as file:
        file.write('{"n": 1, "prev": "", "kind": "step", "step": %d}\\n' % (2 * step))
    time.sleep(0.3)
print("error: nothing can be replayed here", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def replayed_by(tmp_path: Path, monkeypatch: MonkeyPatch) -> Callable[[str], replay.Replay]:
    """Return a function that makes a replay by a program in place of the trainer's."""
    monkeypatch.setattr(replay, "POLL", 0.05)
    program = tmp_path / "train" / "main.py"
    program.parent.mkdir()

    def of(source: str) -> replay.Replay:
        program.write_text(source)
        return replay.Replay(start=0, program=str(program))

    return of


def test_a_replay_shows_how_far_it_is_and_why_it_ended(replayed_by: Any, tmp_path: Path) -> None:
    folder = record(tmp_path, BEGIN, STEP, {**STEP, "step": 6})
    seen: list[tuple[int, int]] = []
    proved = ckpttool.prove(folder, replay=replayed_by(TRAINER), progress=lambda *steps: seen.append(steps))
    (finding,) = proved.findings
    assert finding.message == "the replay ended with exit code 3: nothing can be replayed here"
    assert {(2, 6), (4, 6), (6, 6)} <= {*seen}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_interrupted_replay_leaves_no_trainer_behind(replayed_by: Any, tmp_path: Path) -> None:
    def interrupt(done: int, of: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    says = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    again = replayed_by(f"import os, pathlib, time\n{says}\ntime.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        ckpttool.prove(record(tmp_path, BEGIN, STEP), replay=again, progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
