"""The commands that read every byte: `verify` and `digest`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..core.cli import joined, options
from ..core.cli.console import Console, counted, printable, show_bytes
from ..core.cli.reading import Answer, answer_each, fields_of, note_keys, note_state, note_unread, open_file
from ..core.cli.schemas import Fields, fields_like

if TYPE_CHECKING:
    from .verify import Verified


def _printed() -> Fields:
    from .verify import Verified

    return {
        "path": (str, "the file as it was named"),
        "ok": (bool, "whether there is no problem"),
        **fields_like(Verified),
    }


@options.command("Check", "Read every byte: structure, checksums, NaN, infinity", _printed, several=True)
@options.files_argument
@options.option(
    "--against OTHER",
    "Also compare the contents with those of OTHER, whatever its format.",
    type=options.PATH,
)
@options.option(
    "--seal FILE", "The seal to compare with, e.g. of the same model in another format.", type=options.PATH
)
@options.flag("--finite", "Count NaN and infinity as problems.")
@options.flag(
    "--no-code",
    "Count as problems names that could run, all but harmless ones, and records nothing refers to.",
)
@options.state_option
@joined.reading_in_parts
def verify(
    console: Console,
    files: tuple[str, ...],
    against: str | None,
    state: str | None,
    seal: str | None,
    **flags: bool,
) -> int:
    """Read every byte of each FILE: structure, checksums, values that are not finite.

    torch never checks the checksums it writes, so it loads a flipped bit silently; verify finds it. Of a
    delta it compares the digests too, of an adapter the factors with adapter_config.json beside them, of a
    model the numbers of tokens and layers with config.json, and of what has a seal each tensor and each file.

    \b
    Examples:
      ckpttool verify last.pt
      ckpttool verify model.safetensors --against last.pt
      ckpttool verify last.pt --no-code
    """
    from ..core import formats
    from . import verify as checks

    def answer(file: str) -> Answer:
        with ExitStack() as stack:
            checkpoint = stack.enter_context(open_file(console, file))
            other = stack.enter_context(formats.open(against)) if against else None
            if state is not None and other is None:
                checkpoint.state(state)
            once = checkpoint.nbytes * (2 if checkpoint.format == "delta" else 1)  # digests, too
            passes = once + (checkpoint.nbytes + other.nbytes if other else 0)
            with console.progress(passes, "reading") as progress:
                sealed_by = checks.seal_for(file, seal)
                verified = checks.verify(
                    checkpoint, against=other, state=state, seal=sealed_by, progress=progress, **flags
                )
            compared = [checkpoint, other] if other is not None else []
            note_unread(console, *compared)
            if other is not None:
                keyed = verified.text_keys_here, verified.text_keys_there
                note_keys(console, (checkpoint, other), keyed)
            for checkpoint in compared if verified.compared == "state" else ():
                note_state(console, checkpoint, state, named=True)
        _note(console, verified)
        data = {"path": file, "ok": verified.ok, **fields_of(verified)}
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
    console.note_names("only the tensors were compared with the seal, of", [*verified.unsealed])
    if verified.hint:
        console.note(f"hint: {printable(verified.hint)}", pasted=True)


def _line(file: str, against: str | None, verified: Verified) -> str:
    what = "contents" if verified.compared == "everything" else "model state"
    same = f", same {what} as {printable(against)}" if against and verified.ok else ""
    ok = "not finite, but not damaged" if verified.non_finite else "ok"
    same += ", as it was sealed" if verified.sealed else ""
    verdict = f"{ok}{same}" if verified.ok else counted(len(verified.problems), "problem")
    free = ", ".join(f"{show_bytes(count)} of {what}" for what, count in verified.free.items())
    uncovered = f"; no checksum covers {free}" if free else ""
    return f"{printable(file)}: {verdict} ({show_bytes(verified.checked_bytes)} checked{uncovered})"


DIGEST: Fields = {
    "digest": (str, "SHA-256 of names, types, shapes and values; docs/digest.md"),
    "state": (str, "dotted path of the state that was hashed"),
    "keys": (int, "how many tensors it has"),
    "path": (str, "the file as it was named"),
}


@options.command("Look", "One SHA-256 for a model, the same in every format", DIGEST, several=True)
@options.files_argument
@options.state_option
@options.no_verify_option
@joined.reading_in_parts
def digest(console: Console, files: tuple[str, ...], state: str | None, no_verify: bool) -> int:
    """Print one SHA-256 for the names, types, shapes and values of the model in each FILE.

    It is the same in every format; docs/digest.md defines it. With -q only the digest is printed.

    \b
    Example:
      ckpttool digest model.safetensors
    """
    from . import verify as checks

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
