"""The common part of the commands that read one file and write another: open, transform, save, report."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UsageFault
from .console import Console, counted, printable, show_bytes
from .options import console as console_of
from .states import note_state

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..checkpoint.state import State
    from ..formats import Saved
    from ..tensors.cast import CastReport
    from ..transforms.renaming import Renaming


@dataclass(slots=True)
class Outcome:
    """What a transform did, in words and figures.

    Attributes:
        done: the start of the result: `stripped 'module.' from 3 of 4 keys`.
        renamed: old name -> new name, of the keys that changed.
        left_out: names that the transform left out.
        kept: keys that kept their names while others changed.
        also: the dotted paths of other states that were renamed too -> number of keys.
        of_state: True if the transform concerns one state; False for the file as a whole.
        where: dotted path of the state in the new checkpoint, if it moved.
        casting: report of the cast, which is complete once the output is written.
        notes: what else is worth knowing, said when the output is written.
        fields: further fields of the command's JSON.
        not_copied: other files of the input's folder, by what is said of them; None for those that
            `formats.save` reports.
    """

    done: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    also: Mapping[str, int] = field(default_factory=dict)
    of_state: bool = True
    where: str | None = None
    casting: CastReport | None = None
    notes: list[str] = field(default_factory=list)
    fields: Mapping[str, object] = field(default_factory=dict)
    not_copied: Mapping[str, Sequence[str]] | None = None


OTHERS = "other files of the folder, not copied"
"""What is said of them when the output is written."""

Transform = Callable[["Checkpoint"], tuple["Checkpoint", Outcome]]


def renaming_outcome(done: str, renaming: Renaming) -> Outcome:
    """Return the outcome of a renaming.

    Args:
        done: what was done, to stand before "3 of 4 keys".
        renaming: report of the transform.
    """
    renamed = {old: new for old, new in renaming.names.items() if old != new}
    kept = tuple(old for old, new in renaming.names.items() if old == new)
    also = {where: theirs.renamed for where, theirs in renaming.also.items()}
    return Outcome(f"{done} {renaming.renamed} of {len(renaming.names)} keys", renamed, kept=kept, also=also)


def rewrite(
    options: dict[str, Any],
    transform: Transform,
    *,
    opening: Callable[[], Checkpoint] | None = None,
    **choices: Any,
) -> None:
    """Open INPUT, transform it, write OUTPUT and report what was done.

    Args:
        options: values of the options of `options.writing`, by name.
        transform: returns the new checkpoint and the outcome.
        opening: opens INPUT; None for `formats.open`.
        choices: further arguments of `formats.save`. Without `to`, a folder becomes a folder of the same
            format.

    Raises:
        UsageFault: --state names a state, and the output takes the whole file.
        CkptToolError: as `formats.open`, `transform` and `formats.save` raise.
    """
    from .. import formats
    from ..formats.saving.destination import destination

    started = time.perf_counter()
    console = console_of(options)
    choices |= {
        name: options[name] for name in ("state", "shard_size", "device", "verify", "force", "dry_run")
    }
    with opening() if opening else formats.open(options["input"]) as checkpoint:
        new, outcome = transform(checkpoint)
        if new.opened != checkpoint.opened:
            _name_attributes(checkpoint.state(options["state"]), outcome)
        if "to" not in choices:
            choices["to"] = destination(options["output"], checkpoint, None, keep=True).format
        if _keeps_everything(options, outcome, new, choices):
            _refuse_state(options)
        elif not choices.get("full"):
            note_state(console, checkpoint, options["state"])
        if outcome.where is not None:
            choices["state"] = outcome.where
        with console.bar("writing") as bar:
            if console.draws:
                choices |= {"progress": bar.add, "expect": bar.expect}
            saved = formats.save(new, options["output"], **choices)
    outcome.left_out += new.unread
    if saved.format == "dcp" and choices.get("full") and _has_optimizer(new):
        outcome.notes.append(
            "torch's dcp.load finds only the tensors of its optimizer: --full puts the settings into an "
            "entry of ckpttool's own; without --full dcp.load finds them too"
        )
    _report(console, outcome, saved, time.perf_counter() - started, dry=options["dry_run"])


def _has_optimizer(checkpoint: Checkpoint) -> bool:
    from ..checkpoint.states import is_optimizer

    tree = checkpoint.tree
    return isinstance(tree, dict) and any(map(is_optimizer, tree.values()))


def _name_attributes(state: State, outcome: Outcome) -> None:
    """Add the attributes of a pickled model to what is left out, where its tensors took its place."""
    from ..checkpoint.pickled_modules import own_attributes

    names = (".".join([*state.path, name]) for name, _ in own_attributes(state.module))
    outcome.left_out += tuple(name for name in names if name not in outcome.left_out)


def _keeps_everything(
    options: Mapping[str, Any], outcome: Outcome, new: Checkpoint, choices: Mapping[str, Any]
) -> bool:
    """Whether the choice of a state has no effect: none was changed, and the output takes the whole file."""
    from ..formats.saving.destination import destination

    if outcome.of_state or choices.get("full"):
        return False
    return destination(options["output"], new, choices["to"], full=False).holds_all


def _refuse_state(options: Mapping[str, Any]) -> None:
    """Raise UsageFault if --state is given, which would have no effect."""
    state, output = options["state"], options["output"]
    if state is not None:
        words = ["ckpttool", "slim", "--state", state, options["input"], output]
        raise UsageFault(
            f"{output}: gets everything in the input, so --state '{state}' would have no effect",
            hint=f"for that state alone: {shlex.join(words)}",
        )


def _report(console: Console, outcome: Outcome, saved: Saved, seconds: float, *, dry: bool) -> None:
    also = {where: count for where, count in outcome.also.items() if where not in saved.left_out}
    lost = [name for name in saved.left_out if name not in outcome.left_out]
    _note(console, outcome, saved, also, lost)
    verb = f"would have {outcome.done}" if dry else outcome.done
    about = "about " if dry and saved.format == "dcp" else ""
    shards = f" in {counted(saved.shards, 'shard', 'shards')}" if saved.shards else ""
    size = f"{about}{show_bytes(saved.nbytes)}{shards}, {seconds:.2f} s"
    data: dict[str, object] = {
        "output": saved.path,
        "format": saved.format,
        "keys": saved.keys,
        "renamed": len(outcome.renamed),
        "also_renamed": also,
        "left_out": [*outcome.left_out, *lost],
        "kept": outcome.kept,
        "tied": saved.tied,
        "copied": saved.copied,
        "mentions": saved.mentions,
        "devices": saved.devices,
        "bytes": saved.nbytes,
        "seconds": round(seconds, 4),
        **outcome.fields,
    }
    if saved.shards:
        data["shards"] = saved.shards
    if saved.text_keys:
        data["text_keys"] = saved.text_keys
    if saved.keyed_by_text:
        data["keyed_by_text"] = saved.keyed_by_text
    if not_copied := [name for names in _not_copied(outcome, saved).values() for name in names]:
        data["not_copied"] = not_copied
    if saved.given_back:
        data["given_back"] = saved.given_back
    if saved.not_removed:
        data["not_removed"] = saved.not_removed
    if dry:
        data["dry_run"] = True
    elif outcome.casting is not None:
        data["overflows"] = overflows = outcome.casting.overflows
        if overflows:
            console.note(f"{counted(overflows, 'finite value', 'finite values')} became infinite")
    console.result(f"{verb} -> {printable(saved.path)} ({size})", data)


def _note(
    console: Console, outcome: Outcome, saved: Saved, also: Mapping[str, int], lost: Sequence[str]
) -> None:
    """Note what else is worth knowing about the output, such as what its format has `lost`."""
    numbered = tuple(f"{name}.state" for name in saved.keyed_by_text)  # has a note of its own
    for note in outcome.notes:
        console.note(printable(note))
    if console.verbose:
        for old, new in outcome.renamed.items():
            console.note(f"{printable(old)} -> {printable(new)}")
    for said, names in (
        ("kept as they were", outcome.kept),
        ("renamed too", [f"{where} ({count} keys)" for where, count in also.items()]),
        ("left out", outcome.left_out),
        (f"left out, as {saved.format} {saved.why_left_out}", [n for n in lost if not _is_versions(n)]),
        ("written once, with the tie in the metadata", saved.tied),
        ("written once per name, though they share memory", saved.copied),
        *_not_copied(outcome, saved).items(),
        ("put into the folder by another process meanwhile, and kept", saved.given_back),
        ("could not be removed", saved.not_removed),
        (
            "keys became text, as dcp has no others (convert --full keeps them)",
            [n for n in saved.text_keys if n not in numbered],
        ),
    ):
        if names:
            console.note(f"{said}: {console.names(names)}")
    if saved.devices:
        console.note(
            f"its storages are tagged {', '.join(map(printable, saved.devices))}: torch.load needs "
            "map_location='cpu' on a machine without it; --device cpu writes it for any"
        )
    if saved.mentions:  # all of them: what is left out here may be what matters
        console.note(
            "its pickle names what could run when it is loaded without weights_only: "
            f"{', '.join(map(printable, saved.mentions))}; ckpttool disarm writes plain values in their place"
        )
    if console.verbose and (versions := [*filter(_is_versions, lost)]):
        where = console.names(versions)
        console.note(f"left out: torch's versions of modules ({where}), which load_state_dict can do without")
    if saved.keyed_by_text:
        console.note(
            "keyed by text, with which torch loads no momentum outside DCP: "
            f"{console.names(saved.keyed_by_text)}; numbers again: {_to_indices(saved)}"
        )


def _not_copied(outcome: Outcome, saved: Saved) -> Mapping[str, Sequence[str]]:
    return {OTHERS: saved.not_copied} if outcome.not_copied is None else outcome.not_copied


def _is_versions(name: str) -> bool:
    """Whether a name is that of torch's versions of modules, whose loss few care about."""
    return name == "_metadata" or name.endswith("._metadata")


def _unused(folder: str) -> str:
    """Return a name for a .pt file beside a folder that no file has."""
    stem = folder.rstrip("/")
    names = (f"{stem}{number}.pt" for number in ("", *range(2, 1000)))
    return next(name for name in names if not os.path.lexists(name))


def _to_indices(saved: Saved) -> str:
    """Return the command that keys the optimizers of the output by numbers."""
    if saved.path == "-":
        return "ckpttool optimizer IN OUT --to indices"
    path = shlex.quote(saved.path)
    output = shlex.quote(_unused(saved.path)) if saved.format == "dcp" else f"{path} --force"
    return f"ckpttool optimizer {path} {output} --to indices"
