"""Compare a state with a model, describe the differences, and quote commands for a shell."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ..conforming.modules import ADAPTED, OF_ADAPTER, Blueprint, StateEntry
from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.optimizer_names import without_prefix
from ..core.checkpoint.optimizer_view import BadOptimizer, OptimizerGroups, OptimizerView
from ..core.checkpoint.special_tensors import UNINITIALISED, SpecialTensor
from ..core.checkpoint.state import COUNTER, State
from ..core.tensors.ref import TensorRef
from ..core.words import counted, in_short
from ..errors import Mismatch


def command_line(words: Iterable[str]) -> str:
    """Join words into a line that a shell splits into the same words, as `shlex.join` does."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    # bash, zsh and POSIX.1-2024 know $'…'. It contains no quote, so that a shell that does not know it reads
    # another word, never a command.
    return "$'" + "".join(map(_escaped, word)) + "'"


def _escaped(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    try:
        raw = os.fsencode(character)  # keeps bytes of a file's name that are not text
    except UnicodeEncodeError:
        raw = character.encode("utf-8", "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in raw)


# ---- Numbers of layers


NUMBER = re.compile(r"(?<![^.])([0-9]{1,6})(?=\.)")
MAX_NUMBERS = 24  # of a name: no model has as many levels of layers


def numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """Return stem -> numbers that follow it in names: `layers.` -> {0, 1, 2}."""
    found: dict[str, set[int]] = {}
    for name in names:
        for part in islice(NUMBER.finditer(name), MAX_NUMBERS):
            found.setdefault(name[: part.start(1)], set()).add(int(part[1]))
    return found


# ---- The order of an optimizer's parameters


FEW = 8  # misfits of each kind that are listed

Shapes = Mapping[str, Sequence[int]]  # of parameters, by name


@dataclass(frozen=True, slots=True)
class Misfit:
    """A parameter that would get the momentum of another."""

    position: int  # in the optimizer, counted through all groups
    parameter: str  # of the model, at that place; "" when it has none
    there: str  # name or shape in the file
    here: str  # in the model


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """Whether an optimizer's state fits a model's parameters when torch loads it by index."""

    # The first few of each kind: momentum of another shape; names in another order, or unknown to the model;
    # no names, and momentum that fits the order of the file's own state, which is not the model's.
    shapes: tuple[Misfit, ...] = ()
    names: tuple[Misfit, ...] = ()
    order: tuple[Misfit, ...] = ()
    problem: str = ""  # why nothing could be compared

    @property
    def fits(self) -> bool:
        """Whether no misfit was found."""
        return not (self.shapes or self.names or self.order)

    def __str__(self) -> str:
        """Return the first misfit in words."""
        first = (self.shapes or self.names or self.order)[0]
        whose = f"a parameter of shape {first.there}" if self.shapes else first.there
        proviso = " (if it lists them as the file's state does)" if self.order else ""
        return (
            "the optimizer's state is keyed by index, and the model has its parameters in another order: "
            f"'{first.parameter}' would get what belongs to {whose}, without an error{proviso}"
        )


def mismatched_order(
    state: Mapping[str, Any], optimizer: Mapping[Any, Any], parameters: Shapes
) -> OrderCheck:
    """Check whether loading an optimizer's state by index gives each parameter its own momentum."""
    try:
        groups = OptimizerView(optimizer).parameters()
    except BadOptimizer as fault:
        return OrderCheck(problem=str(fault))
    count, live = sum(map(len, groups)), list(parameters)
    # Scripts make several groups (weight decay or none) by one rule, going through the model's parameters in
    # their order; so the order is compared inside each group.
    if all(kept.name is not None for group in groups for kept in group):
        named = [without_prefix([str(kept.name) for kept in group], parameters) for group in groups]
        return _compared(groups, named, parameters)
    if len(groups) != 1 or count != len(live):
        counts = f"{count} parameters in {len(groups)} groups, without names; the model has {len(live)}"
        return OrderCheck(problem=counts)
    check = _compared(groups, [live], parameters)
    theirs = [name for name in without_prefix(state, parameters) if name in parameters]
    if check.shapes or len(theirs) != len(live):
        return check
    pairs = zip(groups[0], theirs, strict=True)
    if not all(kept.shape in (None, tuple(parameters[name])) for kept, name in pairs):
        return check
    return OrderCheck(order=tuple(_different(theirs, live, 0)[:FEW]))


def _compared(groups: OptimizerGroups, named: list[list[str]], parameters: Shapes) -> OrderCheck:
    """Compare the names and momenta of each group with the parameters that the model would put there."""
    place = {name: index for index, name in enumerate(parameters)}
    shapes: list[Misfit] = []
    names: list[Misfit] = []
    first = 0
    for group, theirs in zip(groups, named, strict=True):
        live = sorted(theirs, key=lambda name: place.get(name, len(place)))
        unknown = [(i, name) for i, name in enumerate(theirs, first) if name not in place]
        misfits = [Misfit(i, "", name, "no such parameter") for i, name in unknown]
        names += misfits or _different(theirs, live, first)
        for position, (kept, name) in enumerate(zip(group, live, strict=True), first):
            if name in place and kept.shape not in (None, shape := tuple(parameters[name])):
                shapes.append(Misfit(position, name, str(list(kept.shape or ())), str(list(shape))))
        first += len(group)
    return OrderCheck(tuple(shapes[:FEW]), tuple(names[:FEW]))


def _different(theirs: Sequence[str], live: Sequence[str], first: int) -> list[Misfit]:
    pairs = enumerate(zip(theirs, live, strict=True), first)
    return [Misfit(position, here, there, here) for position, (there, here) in pairs if there != here]


# ---- Differences between a state and a model; no values are read

SHOWN = 3  # names in a message, which counts the rest


@dataclass(frozen=True, slots=True)
class Aim:
    """What a state should fit, as commands name it: a model, or a checkpoint that fits one."""

    name: str
    flag: str = "--model"

    @property
    def words(self) -> tuple[str, str]:
        """The option that names it."""
        return self.flag, self.name

    def trial(self, file: str, where: Iterable[str] = ()) -> str:
        """Return the command that shows that a file fits: it loads it, or compares it with the reference."""
        verb = "reload" if self.flag == "--model" else "doctor"
        return command_line(["ckpttool", verb, file, *self.words, *where])


@dataclass(frozen=True, slots=True)
class Fit:
    """The differences that keep a state from loading strictly."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, str, str], ...] = ()  # (name, in the file, in the model): shapes or dtypes
    added: tuple[str, ...] = ()  # BatchNorm's counters that torch adds; they keep nothing from loading

    @property
    def distance(self) -> int:
        """The number of names, of the file and of the model, that keep the state from loading strictly."""
        return len(self.missing) + len(self.unexpected) + 2 * len(self.mismatched)

    def __str__(self) -> str:
        """Return `2 missing (a, b); 1 of another shape or type (w [9] in the file, [5] in the model)`."""
        kinds = "missing", "unexpected", "of another shape or type"
        parts = zip(kinds, (self.missing, self.unexpected, self.sizes), strict=True)
        return "; ".join(f"{len(names)} {what} ({shortened(names)})" for what, names in parts if names)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The mismatches in words."""
        return tuple(f"{name} {a} in the file, {b} in the model" for name, a, b in self.mismatched)

    def error(self, message: str, hint: str | None = None) -> Mismatch:
        """Return the error that lists the differences."""
        lists = {"missing": self.missing, "unexpected": self.unexpected}
        return Mismatch(message, mismatched=self.mismatched, hint=hint, **lists)


def shortened(names: tuple[str, ...]) -> str:
    """Return the first few names, and how many more there are."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(in_short, names[:SHOWN])) + more


def compare(state: State, blueprint: Blueprint) -> Fit:
    """Return what `load_state_dict(strict=True)` would find wrong with a state, under the names it has."""
    places = blueprint.places
    absent = [
        name
        for name, place in places.items()
        if name not in state.tensors and not (place.shape is None and name in state.others)
    ]
    without = _without_counters(state, blueprint)
    return Fit(
        missing=tuple(name for name in absent if name not in without),
        unexpected=tuple(name for name in (*state.tensors, *state.others) if name not in places),
        mismatched=tuple(
            (name, *differs)
            for name, tensor in state.tensors.items()
            if name in places and (differs := _differs(tensor, places[name]))
        ),
        added=tuple(name for name in absent if name in without),
    )


def _differs(tensor: TensorRef, place: StateEntry) -> tuple[str, str] | None:
    """Return both shapes, or both dtypes, if a tensor can't be copied to its place in the model."""
    if place.shape is None:
        return None
    # torch 0.3 had no scalars; load_state_dict converts
    is_scalar = tensor.shape == (1,) and place.shape == ()
    if tensor.shape != place.shape and not is_scalar:
        return str(list(tensor.shape)), str(list(place.shape))
    if "complex" in tensor.dtype.name and "complex" not in place.dtype:  # torch would drop the imaginary part
        return tensor.dtype.name, place.dtype
    return None


def _without_counters(state: State, blueprint: Blueprint) -> set[str]:
    """Return the counters that torch adds by itself: of norms saved before version 2 or without a version."""

    def version(path: str) -> int:
        entry = (state.versions or {}).get(path)
        stated = entry.get("version") if isinstance(entry, dict) else None
        return stated if isinstance(stated, int) else 0

    return {f"{path}.{COUNTER}".lstrip(".") for path in blueprint.norms if version(path) < 2}


@dataclass(frozen=True, slots=True)
class Case:
    """A state and the model that it should fit."""

    checkpoint: Checkpoint  # finds the state without its name
    state: State
    blueprint: Blueprint
    fit: Fit
    # Flags of the `slim` that takes the state out of the file; None if it needs no `slim`.
    taken_out: tuple[str, ...] | None
    original: State  # as it lies in the file
    aim: Aim = Aim("SPEC")

    @property
    def is_same_architecture(self) -> bool:
        """Whether the state is of the model's architecture: it has most of the names, and few others."""
        size = len(self.blueprint.places)
        return (2 * len(self.fit.missing) < size and len(self.fit.unexpected) < size) or not size

    @property
    def unequal_counts(self) -> Iterator[tuple[str, int, int]]:
        """Each (stem, layers in the file, layers in the model) where both count from 0 and end apart."""
        there, here = numbers(self.state.tensors), numbers(self.blueprint.places)
        for stem in here.keys() & there.keys():
            theirs, ours = len(there[stem]), len(here[stem])
            is_whole = there[stem] == {*range(theirs)} and here[stem] == {*range(ours)}
            if is_whole and theirs != ours:
                yield stem, theirs, ours


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of a checkpoint, both as a command and as the transform behind it."""

    kind: str
    message: str
    command: tuple[str, ...]  # without the files
    apply: Callable[[Checkpoint], Checkpoint]  # raises CkptToolError where the command would fail
    is_guess: bool = False  # by order and shapes, which do not tell layers of one shape apart
    first: tuple[Remedy, ...] = ()  # what its command needs done before


Finder = Callable[[Case], Iterator[Remedy]]


@dataclass(frozen=True, slots=True)
class Respec:
    """The model built with other arguments."""

    spec: str
    message: str


Rebuild = Callable[[Case], Respec | None]


@dataclass(frozen=True, slots=True)
class Treatment:
    """A case after the remedies that helped, in their order."""

    case: Case
    remedies: tuple[Remedy, ...] = ()
    open_question: str = ""  # what nothing decides, so that no command is advised

    @property
    def is_guess(self) -> bool:
        """Whether names were matched by order and shapes."""
        return any(remedy.is_guess for remedy in self.remedies)


# (kind, regular expression of the names, what they are and what to do)
KINDS = (
    (
        "fsdp-flat",
        r"(^|\.)_?flat_param$",
        "they are FSDP's flat parameters, one rank's part of many: save with FULL_STATE_DICT, or with DCP",
    ),
    (
        "adapter",
        r"\.base_layer\.",
        "they are a model with an adapter inside, as PEFT trains it: ckpttool convert FILE OUT --fold lora "
        "adds it, or says what it needs",
    ),
    (
        "adapter",
        OF_ADAPTER.pattern,
        ADAPTED,
    ),
    (
        "quantised",
        r"\.(qweight|qzeros|absmax|quant_map|SCB|weight_scale(_inv|_2)?|weight_packed|_packed_params\S*)$",
        "of quantised weights: ckpttool convert FILE OUT --dequantize makes them plain, or says why",
    ),
)


def unfixable(case: Case, *, listed: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) for what keeps a state from fitting and no command fixes."""
    fit, likes = case.fit, case.state.likes
    if odd := tuple(name for name in fit.missing if name in likes):
        yield "object", not_plain(likes, odd)
        fit = replace(fit, missing=tuple(name for name in fit.missing if name not in likes))
        if not fit.distance:
            return
        case = replace(case, fit=fit)
    known = (each for each in KINDS if any(map(re.compile(each[1]).search, fit.unexpected)))
    if (first := next(known, None)) is not None:
        kind, _, words = first
        yield kind, f"{len(fit.unexpected)} names are not the model's ({shortened(fit.unexpected)}): {words}"
    elif _is_weight_norm(fit):
        yield (
            "weight-norm",
            "the file keeps weights as direction and magnitude, the model does not: apply "
            "torch.nn.utils.parametrizations.weight_norm to the model, load, then remove_parametrizations",
        )
    elif (head := _head(fit)) is not None:
        layer, theirs, ours = head
        yield (
            "head",
            f"'{layer}' has {theirs} outputs in the file and {ours} in the model: build it as "
            f"SPEC(num_classes={theirs}) or similar; "
            f"or, for a new head, convert with --exclude '{layer}.*' and load with strict=False",
        )
    else:
        yield from _otherwise(case, listed)


def not_plain(likes: Mapping[str, SpecialTensor], names: tuple[str, ...]) -> str:
    """Return what tensors of a state are that are not plain ones."""
    if all(likes[name].kind == UNINITIALISED for name in names):
        saved = "the model was saved before a first batch gave its lazy layers their shapes"
        return f"{counted(len(names), 'tensor')} without values in the file ({shortened(names)}): {saved}"
    said = shortened(tuple(f"{name}: {likes[name]}" for name in names))
    return f"{counted(len(names), 'tensor')} not plain in the file, and plain in the model ({said})"


def _is_weight_norm(fit: Fit) -> bool:
    end, missing = re.compile(r"\.(parametrizations\.weight\.original0|weight_g)$"), {*fit.missing}
    return any(end.sub(".weight", name) in missing for name in filter(end.search, fit.unexpected))


def _head(fit: Fit) -> tuple[str, str, str] | None:
    """Return the one layer whose number of outputs differs, and both numbers; None if more is wrong."""
    layers = {name.rpartition(".")[0] for name, *_ in fit.mismatched}
    are_shapes = all(there.startswith("[") for _, there, _ in fit.mismatched)
    if fit.missing or fit.unexpected or len(layers) != 1 or not are_shapes:
        return None
    outputs = {tuple(shape.strip("[]").split(", ", 1)[0] for shape in both) for _, *both in fit.mismatched}
    inputs = {tuple(shape.strip("[]").partition(", ")[2] for shape in both) for _, *both in fit.mismatched}
    if len(outputs) != 1 or any(theirs != ours for theirs, ours in inputs):
        return None
    theirs, ours = outputs.pop()
    return layers.pop(), theirs, ours


def _otherwise(case: Case, listed: bool) -> Iterator[tuple[str, str]]:
    fit, places = case.fit, case.blueprint.places
    layers = case.unequal_counts
    counts = "".join(f"; the model has {ours} layers '{stem}N', the file {n}" for stem, n, ours in layers)
    if not case.is_same_architecture:
        fitting = len(places) - len(fit.missing) - len(fit.mismatched) - len(fit.added)
        message = f"another architecture: {fitting} of the model's {len(places)} names fit by name and shape"
        yield "architecture", message + counts
        return
    for kind, names, message in (
        ("missing", fit.missing, f"the file lacks {len(fit.missing)} of the model's names"),
        ("unexpected", fit.unexpected, f"the model has no place for {len(fit.unexpected)} names"),
        ("size", fit.sizes, f"{len(fit.sizes)} tensors are of another size or type"),
    ):
        if names:
            which = "" if listed else f" ({shortened(names)})"
            yield kind, message + which + (counts if kind != "size" else "")
