"""The common part of the commands that read one file and write another: open, transform, save, report."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...errors import UsageFault
from ..words import first_few, noted
from .console import Console, counted, printable, show_bytes
from .options import WriteJob, recipe_of_parts, words_of_parts
from .reading import fields_of, note_fields, note_piece, note_state
from .schemas import NAMES, Fields, fields_like

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..checkpoint.state import State
    from ..formats import Saved
    from ..formats.destination import Destination
    from ..tensors.cast import CastReport

# What a report of casting counts, in words
LOSSES = {
    "overflows": ("finite value", "infinite"),
    "underflows": ("nonzero value", "0"),
    "nans": ("finite value", "NaN"),
}

# Fields of all that write, and of those that may copy what lies beside INPUT
WRITTEN: Fields = {"seconds": (float, "how long it took"), "dry_run?": (Literal[True], "nothing was written")}
BESIDE: Fields = {
    "companions?": (NAMES, "files that were copied along"),
    "not_copied?": (NAMES, "other files of the input's folder, which stay behind"),
}


class Target(NamedTuple):
    """What the user asked for: which state of INPUT, and where the output goes."""

    state: str | None
    place: Destination


@dataclass(slots=True)
class Outcome:
    """What a transform did."""

    done: str  # the start of the result: `stripped 'module.' from 3 of 4 keys`
    renamed: Mapping[str, str] = field(default_factory=dict)  # old name -> new name
    # Keys that kept their names while others changed
    kept: tuple[str, ...] = noted("kept as they were")
    left_out: tuple[str, ...] = noted("left out")
    # Dotted paths of other states that were renamed too -> number of keys
    also_renamed: Mapping[str, int] = field(default_factory=dict)
    of_state: bool = True  # it concerns one state, rather than the file as a whole
    where: str | None = None  # dotted path of the state in the new checkpoint, if it moved
    casting: CastReport | None = None  # complete once the output is written
    notes: list[str] = field(default_factory=list)  # said when the output is written
    table: Sequence[str] = ()  # lines of the result after the first, which says what was written
    settings: Mapping[str, object] = field(default_factory=dict)  # what a config.json copied along must say
    before: State | None = None  # what it was written for; None for the state that was read
    untrue: Sequence[str] = ()  # companions that are not true of the output, and are not copied along
    result: object = None  # the library's report; its fields go into the JSON, and into notes
    fields: Mapping[str, object] = field(default_factory=dict)  # more of the JSON
    written: Callable[[], object] | None = None  # adds to them and to the notes what writing has told


# What a transform makes of the checkpoint that was read, and how it is told
Change = tuple["Checkpoint", Outcome]
Transform = Callable[["Checkpoint", Target], Change]


@dataclass(frozen=True, slots=True)
class Companions:
    """What lies next to INPUT in its folder: what is copied along, and what stays behind."""

    copied: Mapping[str, str]  # path -> where it is copied to
    left: Sequence[str] = ()  # names that --companions would copy
    others: Sequence[str] = ()
    untrue: Sequence[str] = ()  # names of what would be copied, or could be, and is not true of the output

    @classmethod
    def of(cls, checkpoint: Checkpoint, job: WriteJob, place: Destination) -> Companions:
        """Look into INPUT's folder; an existing file in a companion's place is refused without --force."""
        from ..formats import folders
        from ..remote.places import identity_of, is_folder

        folder = job.input if is_folder(job.input) else None
        wanted = job.companions
        if folders.is_in_place(checkpoint, place.path):
            return cls({})
        if wanted and place.path == "-":
            raise UsageFault("--companions: stdout has no room for them", hint="name a file or a folder")
        is_lone = folder is None and folders.folder_of(checkpoint) is None
        if wanted and is_lone:
            if job.input == "-":
                raise UsageFault("--companions: stdin has no files beside it", hint="name a file or a folder")
            folder = os.path.dirname(job.input) or "."
        beside, others = folders.listed_beside(checkpoint, place.path, folder)
        if not wanted:
            shown = folder is not None or place.is_folder
            return cls({}, [os.path.basename(path) for path in beside], others) if shown else cls({})
        places = folders.companion_targets(beside, place.path, is_folder=place.is_folder, force=job.force)
        steps = [map(os.path.dirname, pair) for pair in places.items() if os.path.lexists(pair[1])]
        if any(identity_of(old or ".") == identity_of(new or ".") for old, new in steps):
            what = f"--companions: {place.path} is written beside them"
            raise UsageFault(what, hint="leave it out, or write into another folder")
        return cls(places, others=() if is_lone else others)

    @property
    def names(self) -> list[str]:
        """The names of what is copied, which may be in a folder that is replaced."""
        return [os.path.basename(place) for place in self.copied.values()]

    def without(self, names: Sequence[str]) -> Companions:
        """Return the same without the companions of some names, which are not true of the output."""
        copied = {path: to for path, to in self.copied.items() if os.path.basename(path) not in names}
        left = [name for name in self.left if name not in names]
        before = [*map(os.path.basename, self.copied), *self.left]
        return replace(self, copied=copied, left=left, untrue=[name for name in before if name in names])

    def copy(self, job: WriteJob, settings: Mapping[str, object] | None = None) -> None:
        """Copy what is to be copied, a config.json with these settings changed; name what is not."""
        from ..formats import folders

        console = job.console
        console.note_names("not copied (--companions does)", self.left)
        console.note_names("other files of the folder, not copied", self.others)
        console.note_names("not true of the output, so not copied", self.untrue)
        if not job.dry_run:
            console.note_names("copying along", list(self.copied.values()))
            folders.copy_companions(self.copied, settings, force=job.force)

    def fields(self) -> dict[str, object]:
        """Return the JSON fields, of which each is there only if there is something to say."""
        fields = {
            "companions": [*self.copied.values()],
            "not_copied": [*self.left, *self.others, *self.untrue],
        }
        return {name: value for name, value in fields.items() if value}


def rewritten(*more: type | Fields) -> Fields:
    """Return what a command prints that calls `rewrite`: the fields of all of them, then `more`."""
    from ..formats import Saved
    from ..formats.shards import ModelFile

    printed: Fields = {
        **fields_like(Saved),
        "renamed": (int, "how many keys of the state got another name"),
        "also_renamed": (dict[str, int], "dotted path of another state -> how many of its keys did"),
        "left_out": (NAMES, "dotted names of what the output lacks"),
        "kept": (NAMES, "keys that kept their names while others changed"),
        **BESIDE,
        "piece?": (fields_like(ModelFile), "of an input that is one of several files of one model"),
        "overflows?": (int, "how many finite values became infinite"),
        "underflows?": (int, "how many values became 0 when they were cast"),
        "nans?": (int, "how many finite values became NaN"),
    }
    for each in more:
        own = each if isinstance(each, dict) else fields_like(each)
        printed |= {name: said for name, said in own.items() if name not in printed}
    return {**printed, **WRITTEN}


def rewrite(
    job: WriteJob, transform: Transform, *, opening: Callable[[], Checkpoint] | None = None, **choices: Any
) -> None:
    """Open INPUT, transform it, write OUTPUT and report it; `choices` are further ones of `formats.save`."""
    from .. import formats
    from ..checkpoint.optimizer_view import is_optimizer
    from ..formats.destination import WHOLE, destination

    started, console = time.perf_counter(), job.console
    needed = job.inputs if job.inputs[1:] else ()  # what is made of one may take its place
    of_parts = {"part": job.part, "words": words_of_parts(), "recipe": recipe_of_parts()}
    choices = job.saving() | of_parts | {"resume": job.resume, "needed": needed} | choices
    with opening() if opening else formats.open(job.input) as checkpoint:
        piece = None if opening else note_piece(console, job.input)
        to, full = choices.get("to"), choices.get("full")
        place = destination(job.output, checkpoint, to, full=full, keep="to" not in choices)
        choices["to"] = place.format
        companions = Companions.of(checkpoint, job, place)
        new, outcome = transform(checkpoint, Target(job.state, place))
        if place.format in WHOLE and not (outcome.of_state or full):
            _refuse_state(choices["state"], job.input, place.path)
        elif not full:
            note_state(console, checkpoint, choices["state"])
        companions = companions.without(outcome.untrue)
        if new.opened != checkpoint.opened:
            outcome.left_out += _attributes(checkpoint, choices["state"], outcome.left_out)
        if place.holds_all and outcome.where is None:
            outcome.notes += _of_the_same_dict(checkpoint, new, choices["state"])
        if outcome.where is not None:
            choices["state"] = outcome.where
        outcome.settings = {**_untrue(job, checkpoint, new, outcome, place.path), **outcome.settings}
        with console.bar("writing") as bar:
            saved = formats.save(new, place.path, kept=companions.names, **bar.calls, **choices)
    if piece:
        outcome.fields = {**outcome.fields, "piece": fields_of(piece)}
    outcome.left_out += new.unread
    values = new.tree.values() if isinstance(new.tree, dict) else ()
    if saved.format == "dcp" and full and any(map(is_optimizer, values)):
        outcome.notes.append(
            "torch's dcp.load finds only the tensors of its optimizer: --full puts the settings into an "
            "entry of ckpttool's own; without --full dcp.load finds them too"
        )
    _report(job, outcome, saved, companions, time.perf_counter() - started)


def _untrue(
    job: WriteJob, old: Checkpoint, new: Checkpoint, outcome: Outcome, path: str
) -> dict[str, object]:
    """Return what a config.json must say of other tensors; note it where that is not copied but stays."""
    from ..checkpoint.settings import config_of, true_settings
    from ..formats.folders import is_in_place

    stays = is_in_place(old, path)
    before, after = outcome.before or old.found_state(), new.found_state()
    if not (stays or job.companions) or before is None or after is None:
        return {}
    untrue = true_settings(config_of(job.input), before, after)
    if outcome.settings.get("quantization_config"):  # what is left of floats says nothing of the rest
        untrue = {name: value for name, value in untrue.items() if not name.endswith("dtype")}
    for name, value in untrue.items() if stays else ():
        outcome.notes.append(f'config.json beside the output must have "{name}": {json.dumps(value)}')
    return untrue


def _refuse_state(state: str | None, path: str, output: str) -> None:
    """Raise UsageFault if --state is given, which has no effect where everything is written unchanged."""
    if state is not None:
        words = ["ckpttool", "slim", "--state", state, path, output]
        what = f"{output}: gets everything in the input, so --state '{state}' would have no effect"
        raise UsageFault(what, hint=f"for that state alone: {shlex.join(words)}")


def _attributes(checkpoint: Checkpoint, where: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """Return the attributes of a pickled model, which are left out where its tensors took its place."""
    from ..checkpoint.pickled_modules import own_attributes

    state = checkpoint.state(where)
    names = (".".join([*state.path, name]) for name, _ in own_attributes(state.module))
    return tuple(name for name in names if name not in known)


def _of_the_same_dict(old: Checkpoint, new: Checkpoint, where: str | None) -> Iterator[str]:
    """Yield, in words, other entries that are the very dict of the state, which changed with it."""
    from ..checkpoint.dotted_names import dotted, follow
    from ..checkpoint.state import places_of

    state = old.state(where) if where is not None else old.found_state()
    places = places_of(old.tree, state.anchor) if state is not None else []
    if state is None or len(places) < 2:
        return
    changed = new.state_at(state.path)
    if ([*changed.container], [*changed.items()]) == ([*state.container], [*state.items()]):
        return
    for path in places:
        if path != state.path and follow(new.tree, path) is changed.anchor:
            yield f"'{dotted(path)}' is the same dict as '{state.where}', and changed with it"


def _report(job: WriteJob, outcome: Outcome, saved: Saved, companions: Companions, seconds: float) -> None:
    console, dry = job.console, job.dry_run
    if outcome.written and not dry:
        outcome.written()
    lost = [name for name in saved.left_out if name not in outcome.left_out]
    versions = [name for name in lost if name == "_metadata" or name.endswith("._metadata")]
    also = {where: count for where, count in outcome.also_renamed.items() if where not in saved.left_out}
    for note in map(printable, outcome.notes):
        console.note(note)
    if console.verbose:
        for old, new in outcome.renamed.items():
            console.note(f"{printable(old)} -> {printable(new)}")
    note_fields(console, outcome.result)
    note_fields(console, outcome)
    console.note_names("renamed too", [f"{where} ({count} keys)" for where, count in also.items()])
    is_said = console.verbose or not job.part or job.part.number < 2  # of many parts by the first alone
    others = [name for name in lost if name not in versions and is_said]
    console.note_names(f"left out, as {saved.format} {saved.why_left_out}", others)
    note_fields(console, saved)
    data = {
        **fields_of(outcome.result),
        **fields_of(saved),
        "renamed": len(outcome.renamed),
        "also_renamed": also,
        "left_out": [*outcome.left_out, *lost],
        "kept": outcome.kept,
        **companions.fields(),
        **outcome.fields,
    }
    if not dry and outcome.casting is not None:
        for name, (value, became) in LOSSES.items():
            others = sum(said.get(name, 0) for said in job.said)
            data[name] = count = getattr(outcome.casting, name) + others
            if count:
                where = f" in part {job.part}" if job.part and not job.jobs else ""
                console.note(f"{counted(count, value)} became {became}{where}")
    for note in _warnings(console, saved, versions):
        console.note(note)
    done = outcome.done
    if saved.part:
        done, rest = f"wrote part {saved.part}", "all are written: another process puts them in place"
        if saved.waiting:
            those = f"part{'s' * (len(saved.waiting) > 1)} {first_few(saved.waiting)}"
            rest = f"still to come: {those}; the last one puts all in place"
        console.note(rest)
    else:
        companions.copy(job, outcome.settings)
    about = "about " if dry and saved.format == "dcp" else ""
    shards = f" in {counted(saved.shards, 'shard')}" if saved.shards else ""
    size = f"{about}{show_bytes(saved.nbytes)}{shards}"
    report_written(console, done, saved.path, size, seconds, data, dry=dry, table=outcome.table)


def report_written(
    console: Console,
    done: str,
    path: str,
    size: str,
    seconds: float,
    data: dict[str, object],
    *,
    dry: bool,
    table: Sequence[str] = (),
) -> None:
    """Print what was done and where it was written, in one line before those of a table, or as JSON."""
    data["seconds"] = round(seconds, 4)
    if dry:
        done, data["dry_run"] = f"would have {done}", True
    line = f"{done} -> {printable(path)} ({size}, {seconds:.2f} s)"
    console.result("\n".join([console.sentence(line), *map(printable, table)]), data)


def _warnings(console: Console, saved: Saved, versions: Sequence[str]) -> Iterator[str]:
    """Yield what the user may have to do about the output."""
    numbered = tuple(f"{name}.state" for name in saved.keyed_by_text)  # has a note of its own
    if text_keys := [name for name in saved.text_keys if name not in numbered]:
        names = console.names(text_keys)
        yield f"keys became text, as dcp has no others (convert --full keeps them): {names}"
    if saved.devices:
        devices = ", ".join(map(printable, saved.devices))
        way = "map_location='cpu' on a machine without it; --device cpu writes it for any"
        yield f"its storages are tagged {devices}: torch.load needs {way}"
    if saved.mentions:  # all of them: what is left out here may be what matters
        names = ", ".join(map(printable, saved.mentions))
        what = f"its pickle names what could run when it is loaded without weights_only: {names}"
        plain = f"ckpttool disarm {shlex.quote(saved.path)} plain.pt"
        yield f"{what}; with plain values in their place: {plain}"
    if console.verbose and versions:  # whose loss few care about
        names = console.names(versions)
        yield f"left out: torch's versions of modules ({names}), which load_state_dict can do without"
    if saved.keyed_by_text:
        names = console.names(saved.keyed_by_text)
        what = f"keyed by text, with which torch loads no momentum outside DCP: {names}"
        yield f"{what}; numbers again: {_to_indices(saved)}"


def _to_indices(saved: Saved) -> str:
    """Return the command that keys the optimizers of the output by numbers."""
    if saved.path == "-":
        return "ckpttool optimizer IN OUT --to indices"
    path = shlex.quote(saved.path)
    if saved.format != "dcp":
        return f"ckpttool optimizer {path} {path} --force --to indices"
    files = (f"{saved.path.rstrip('/')}{number}.pt" for number in ("", *range(2, 1000)))
    unused = next(file for file in files if not os.path.lexists(file))
    return f"ckpttool optimizer {path} {shlex.quote(unused)} --to indices"
