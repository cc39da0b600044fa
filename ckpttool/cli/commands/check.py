"""The commands that check: `verify` and `digest`, which read every byte, `prove` and `gather-metrics`."""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import Console, counted, printable, show_bytes, to_json
from ..reading import Answer, answer_each, fields_of, note_keys, note_state, note_unread, open_file

if TYPE_CHECKING:
    from ...analysis.verify import Verified
    from ...formats.output import OutputPlace
    from ...metrics.certificate import Certificate
    from ...proving.proof import Proved


@click.command("verify")
@options.files_argument
@options.option(
    "--against OTHER",
    "Also compare the contents with those of OTHER, whatever its format.",
    type=options.PATH,
)
@options.flag("--finite", "Count NaN and infinity as problems.")
@options.flag(
    "--no-code",
    "Count as problems names that could run, all but harmless ones, and records nothing refers to.",
)
@options.state_option
@options.reading
def verify(
    console: Console, files: tuple[str, ...], against: str | None, state: str | None, **flags: bool
) -> int:
    """Read every byte of each FILE: structure, checksums, values that are not finite.

    torch never checks the checksums it writes, so it loads a flipped bit silently; verify finds it.

    \b
    Examples:
      ckpttool verify last.pt
      ckpttool verify model.safetensors --against last.pt
      ckpttool verify last.pt --no-code
    """
    from ... import formats
    from ...analysis import verify as checks

    def answer(file: str) -> Answer:
        with ExitStack() as stack:
            checkpoint = stack.enter_context(open_file(console, file))
            other = stack.enter_context(formats.open(against)) if against else None
            if state is not None and other is None:
                checkpoint.state(state)
            passes = checkpoint.nbytes + (checkpoint.nbytes + other.nbytes if other else 0)
            with console.progress(passes, "reading") as progress:
                verified = checks.verify(checkpoint, against=other, state=state, progress=progress, **flags)
            compared = [checkpoint, other] if other is not None else []
            note_unread(console, *compared)
            if other is not None:
                keyed = verified.text_keys_here, verified.text_keys_there
                note_keys(console, (checkpoint, other), keyed)
            for checkpoint in compared if verified.compared == "state" else ():
                note_state(console, checkpoint, state, named=True)
        _note(console, verified)
        data = {"path": file, "ok": verified.ok, **fields_of(verified, {"free": "unvouched"})}
        return Answer(console.sentence(_line(file, against, verified)), data, 0 if verified.ok else 1)

    return answer_each(files, console, answer)


def _note(console: Console, verified: Verified) -> None:
    code = sum(problem.kind == "code" for problem in verified.problems)  # never shortened
    shown = verified.problems[: None if console.verbose else 10 + code]
    for problem in shown:
        name = printable(problem.name) if problem.kind == "code" else console.names([problem.name])
        console.note(f"{problem.kind}: {name}: {problem.message}")
    if len(verified.problems) > len(shown):
        console.note(f"and {len(verified.problems) - len(shown)} more: -v shows them")
    names = [f"{name} ({count})" for name, count in verified.non_finite.items()]
    console.note_names("NaN or infinite values", names)
    if verified.hint:
        console.note(f"hint: {printable(verified.hint)}", pasted=True)


def _line(file: str, against: str | None, verified: Verified) -> str:
    what = "contents" if verified.compared == "everything" else "model state"
    same = f", same {what} as {printable(against)}" if against and verified.ok else ""
    ok = "not finite, but not damaged" if verified.non_finite else "ok"
    verdict = f"{ok}{same}" if verified.ok else counted(len(verified.problems), "problem")
    free = ", ".join(f"{show_bytes(count)} of {what}" for what, count in verified.free.items())
    uncovered = f"; no checksum covers {free}" if free else ""
    return f"{printable(file)}: {verdict} ({show_bytes(verified.checked_bytes)} checked{uncovered})"


@click.command("digest")
@options.files_argument
@options.state_option
@options.no_verify_option
@options.reading
def digest(console: Console, files: tuple[str, ...], state: str | None, no_verify: bool) -> int:
    """Print one SHA-256 for the names, types, shapes and values of the model in each FILE.

    It is the same in every format; docs/digest.md defines it. With -q only the digest is printed.

    \b
    Example:
      ckpttool digest model.safetensors
    """
    from ...analysis import checks

    known: dict[object, bytes] = {}  # of files that several FILEs share

    def answer(file: str) -> Answer:
        with open_file(console, file) as checkpoint:
            found = checkpoint.state(state)
            note_state(console, checkpoint, state)
            with console.progress(checkpoint.nbytes, "hashing") as progress:
                value = checks.digest(
                    checkpoint, state=state, verify=not no_verify, progress=progress, known=known
                )
        data = {"digest": value, "state": found.where, "keys": len(found.tensors), "path": file}
        return Answer(f"{value}  {printable(file)}", data, in_quiet=value)

    return answer_each(files, console, answer)


@click.command("prove")
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

    from ...proving import proof
    from ...proving.replay import Replay

    program = program or str(Path(__file__).parents[3] / "train" / "main.py")  # not in an installed wheel
    replay = None if no_replay else Replay(program=program, dry=dry_run, **replayed)
    began = time.perf_counter()

    def announce(command: str) -> None:
        console.note(f"replays: {command}", pasted=True)

    with console.bar("replaying") as bar:
        proved = proof.prove(run, replay=replay, announce=announce, progress=bar.step)
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
    data = {"path": run, "ok": proved.ok, **fields_of(proved, {"findings": "problems"})}
    return data | {"checkpoints": checkpoints, "seconds": round(seconds, 3)}


@click.command("gather-metrics")
@options.files_argument
@options.option("--samples N", "How many samples there must be.", type=click.IntRange(min=0))
@options.option("--out FILE", "Also write the certificate to FILE, as JSON.", type=options.PATH)
@options.flag("--force", "Replace the file of --out if it exists.")
@options.reading
def gather_metrics(
    console: Console, files: tuple[str, ...], samples: int | None, out: str | None, force: bool
) -> None:
    """Recompute an evaluation's metrics from the prediction files of its ranks, one each, in any order.

    Every sample must appear in them exactly once. If a rank's file is missing, a sample appears twice or in
    no file, or a file is of another evaluation, the exit code is 1, and samples and files are named. A file
    holds index, prediction and label as int64 and loss as float64; train/evaluate.py --out writes them.

    \b
    Example:
      ckpttool gather-metrics eval/rank*.safetensors
    """
    from ...metrics.certificate import recompute
    from ...metrics.predictions import read

    place = None if out is None else _certificate_place(out, files, force)
    certificate = recompute([*map(read, files)], samples)
    if place is not None:
        with place.file() as file:
            file.write(f"{to_json(certificate.statement())}\n".encode())
    console.result(_in_words(certificate, out), certificate.statement())


def _certificate_place(out: str, files: tuple[str, ...], force: bool) -> OutputPlace:
    """Return where the certificate goes; refuse a file of predictions, whether it is an input or not."""
    from ...errors import CkptToolError, OutputExists
    from ...formats.output import OutputPlace
    from ...metrics.predictions import read

    try:
        read(out)
    except CkptToolError:
        place = OutputPlace(out, force, files)
        place.require()
        return place
    what = f"{out}: is a prediction file, and --out names the certificate to write"
    raise OutputExists(what, hint="name a file that is not there yet, e.g. --out metrics.json")


def _in_words(certificate: Certificate, out: str | None) -> str:
    where = "" if out is None else f" -> {printable(out)}"
    samples = counted(certificate.samples, "sample")
    return (
        f"{certificate.correct} of {samples} correct ({certificate.accuracy:.2%}), "
        f"loss {certificate.loss:.4f}, each once in {counted(certificate.ranks, 'file')}{where}"
    )
