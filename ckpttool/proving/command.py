"""The command `ckpttool prove`."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

import click

from ..core.cli import options
from ..core.cli.console import Console, counted, printable
from ..core.cli.reading import fields_of
from ..core.cli.schemas import Fields, fields_like

if TYPE_CHECKING:
    from .proof import Proved


def _printed() -> Fields:
    from .proof import Proved

    checkpoint: Fields = {"file": (str, "its name"), "step": (int, "of the training")}
    return {
        "path": (str, "the folder of the run"),
        "ok": (bool, "whether everything holds"),
        **fields_like(Proved),
        "checkpoints": ([checkpoint], "the files that were compared with the chain"),
        "seconds": (float, "how long it took"),
    }


@options.command("Check", "Whether a training run's record holds, bit for bit", _printed)
@options.argument("run", "RUN", type=options.PATH)
@click.argument("flags", metavar="[-- TRAINER FLAGS…]", nargs=-1)
@options.option(
    "--from STEP",
    "Replay from the last checkpoint up to STEP; 0: from the start.",
    "start",
    type=click.IntRange(0),
)
@options.option("--to STEP", "Replay up to STEP.  [default: the last one]", "end", type=click.IntRange(1))
@options.option(
    "--ranks N",
    "Replay on N ranks, if the run has --virtual-ranks.  [default: the run's]",
    type=click.IntRange(1),
)
@options.flag("--no-replay", "Check the chain and the checkpoints only; needs no torch.")
@options.option(
    "--program FILE",
    "The train/main.py to replay with.  [default: that of this repository]",
    type=options.PATH,
)
@options.flag("--run-code", "Let the replay run files that the run names as model, data or task.")
@options.dry_run_option
@options.reading
def prove(
    console: Console, run: str, no_replay: bool, program: str | None, dry_run: bool, **replayed: Any
) -> int:
    """Check the record of a training run, and repeat a part of it, to the same bits.

    RUN is a folder of train/main.py --prove-every K. Its run.jsonl chains digests of the samples, the
    weights and the checkpoints. By default the steps from the last checkpoint before the end are
    replayed. docs/proof.md says what is proved.

    \b
    Examples:
      ckpttool prove runs/a --no-replay
      ckpttool prove runs/a --from 0 --to 20
      ckpttool prove runs/a -- --data folder:elsewhere
    """
    from pathlib import Path

    from . import proof
    from .replay import Replay

    program = program or str(Path(__file__).parents[2] / "train" / "main.py")  # not in an installed wheel
    replay = None if no_replay else Replay(program=program, dry=dry_run, **replayed)
    began = time.perf_counter()

    with console.bar("replaying") as bar:
        calls = {"announce": lambda command: console.note(f"replays: {command}", pasted=True)}
        proved = proof.prove(run, replay=replay, progress=bar.step, **calls)
    if dry_run and proved.command:
        console.note(f"would replay: {shlex.join(proved.command)}", pasted=True)
    for note in proved.notes:
        console.note(note)
    for finding in proved.findings:
        console.note(f"{finding.kind}: {printable(finding.where)}: {printable(finding.message)}")
    seconds = time.perf_counter() - began
    console.result(console.sentence(_proof(console, run, proved, seconds)), _fields(run, proved, seconds))
    return 0 if proved.ok else 1


def _proof(console: Console, run: str, proved: Proved, seconds: float) -> str:
    checked = [counted(proved.lines, "line"), counted(len(proved.checkpoints), "checkpoint")]
    verdict = "the chain holds"
    if proved.replayed:
        on = f" on {counted(proved.ranks, 'rank')}" if proved.ranks > 1 else ""
        checked.append(f"steps {proved.replayed[0] + 1} to {proved.replayed[1]} replayed{on}")
        verdict = "proved"
    if not proved.ok:
        replays = (finding.step for finding in proved.findings if finding.kind == "replay")
        step = next((step for step in replays if step is not None), None)
        verdict = counted(len(proved.findings), "problem") if step is None else f"differs at step {step}"
    head = f"; head {proved.head}" if console.verbose else ""
    return f"{printable(run)}: {verdict} ({', '.join(checked)}, {seconds:.1f} s){head}"


def _fields(run: str, proved: Proved, seconds: float) -> dict[str, object]:
    checkpoints = [{"file": name, "step": step} for name, step in proved.checkpoints]
    data = {"path": run, "ok": proved.ok, **fields_of(proved)}
    return data | {"checkpoints": checkpoints, "seconds": round(seconds, 3)}
