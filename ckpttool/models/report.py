"""Write a diagnosis: the problems, and the commands that fix them, each run on the result of the last."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.dotted_names import contents
from ..core.checkpoint.optimizer_names import to_indices
from ..core.checkpoint.optimizer_view import is_nested_optimizer, is_optimizer
from ..core.checkpoint.special_tensors import UNINITIALISED
from ..core.checkpoint.state import State
from ..core.formats.destination import format_of_name
from ..core.inert_pickle.known_names import MAX_INTEGER, TAKEN
from ..core.inert_pickle.values import Global, is_plain, walk
from ..core.lazy import shown_by
from ..core.remote.urls import is_url
from ..core.tensors.ref import Storage, TensorRef
from ..errors import CkptToolError, NothingToDo, Refused
from .fit import (
    Aim,
    Case,
    Fit,
    Rebuild,
    Treatment,
    command_line,
    mismatched_order,
    not_plain,
    shortened,
    unfixable,
)
from .remedies import is_packed, tied_apart

if TYPE_CHECKING:
    from .optimizer_report import OptimizerAim


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, or worth knowing.

    Attributes:
        kind: a stable word for scripts.
        message: what is wrong, as a sentence without a capital and a full stop.
        command: the command that fixes it, ready to paste after those of the problems before it; None if no
            command can.
        is_remark: the state loads strictly, and with the right values, all the same.
    """

    kind: str
    message: str
    command: str | None = None
    is_remark: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a checkpoint does not load into a model, and what fixes it.

    Attributes:
        path: the file as it was named.
        format: its format, as `torch-zip`.
        state: dotted path of the state that fits best, `""` for the file itself, None if there is none.
        loads: torch's `load_state_dict(strict=True)` takes this state as it is; `ckpttool.reload`, which
            strips wrappers' prefixes by itself, takes more.
        fit: the differences that keep the state from loading.
        problems: in the order in which to fix them.
        then: the command that loads the result strictly, after all the others; None if none can.
        python: the line of Python that loads the result strictly into `model`, without this package where
            torch or safetensors can; None if none can.
        optimizer_loads: the optimizer's load_state_dict takes the file's state, and gives each parameter its
            own; None if no optimizer was asked about.
        optimizer_python: the line of Python that loads the optimizer's state into `optimizer` after all
            commands, a list where it has several; None if none can.
    """

    path: str
    format: str
    state: str | None
    loads: bool
    fit: Fit = field(metadata={"json": None})
    problems: tuple[Problem, ...] = field(metadata={"json": None})
    then: str | None
    python: str | None = None
    optimizer_loads: bool | None = None
    optimizer_python: str | None = None

    _repr_html_ = shown_by("diagnosis_html")


class CommandChain:
    """Problems and their commands, each of which reads what the one before it wrote."""

    def __init__(self, checkpoint: Checkpoint, aim: Aim, optimizer: OptimizerAim | None) -> None:
        self.original, self.aim, self.optimizer = checkpoint, aim, optimizer
        path = checkpoint.path
        self.path = f"./{path}" if path.startswith("-") else path  # else it would be taken for an option
        self.file = self.path
        self.output = free_output(self.file, checkpoint)
        self.problems: list[Problem] = []
        self.optimizer_loads: bool | None = None
        self.optimizer_python: str | None = None

    @property
    def _is_written(self) -> bool:
        """Whether a command has written the output."""
        return self.file == self.output

    def _add(self, kind: str, message: str, verb: str, *flags: str) -> None:
        self.problems.append(Problem(kind, message, self._command(verb, *flags)))
        self.file = self.output

    def _command(self, verb: str, *flags: str) -> str:
        again = ["--force"] if self._is_written else []
        return command_line(["ckpttool", verb, self.file, self.output, *flags, *again])

    def _remark(self, kind: str, message: str, verb: str | None, *flags: str) -> Problem:
        return Problem(kind, message, self._command(verb, *flags) if verb else None, is_remark=True)

    def add_optimizer(self, after: Checkpoint) -> list[Problem]:
        """Add what is wrong with the optimizer's state after the commands so far; return the remarks."""
        if self.optimizer is None or self.optimizer_loads is not None:
            return []
        is_lost = not [*after.optimizers()]  # a command before wrote the model's state alone
        source = self.original if is_lost else after
        found, as_it_is = map(self.optimizer.examined, (source, self.original))
        self.optimizer_loads = bool(found.where) and not as_it_is.wrong
        flags = ["--to", "indices", *self.aim.words, *(found.flags or ())]
        file, output, again = self.file, self.output, ["--force"] if self._is_written else []
        if is_lost:
            file, again = self.path, []
            output = free_output(file, self.original, "optimizer")
        command = command_line(["ckpttool", "optimizer", file, output, *flags, *again])
        by = {"optimizer-settings": f"{command} --settings optimizer"}
        remarks = [Problem(*each, by.get(each.kind), is_remark=True) for each in found.remarks]
        if found.wrong:
            mends = command if found.flags is not None else None
            message = "; ".join(each.message for each in found.wrong)
            self.problems.append(Problem(found.wrong[0].kind, message, mends))
            if mends is None:
                return remarks
            file = output
            self.file = self.file if is_lost else output
        is_new = file == output
        form = format_of_name(file) if is_new else self.original.format
        if form in PICKLED and found.where and not refused_by_torch(source, rewritten=is_new):
            self.optimizer_python = optimizer_line(source, file)
        return remarks


class TreatmentReport(CommandChain):
    """Write a treatment as commands."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        case: Case,
        treatment: Treatment,
        loads: bool,
        optimizer: OptimizerAim | None = None,
    ) -> None:
        super().__init__(checkpoint, case.aim, optimizer)
        self.case, self.treatment, self.loads = case, treatment, loads

    def written(self, rebuild: Rebuild | None, reloaded: tuple[str, Case]) -> Diagnosis:
        """Return the diagnosis; ask `rebuild` for a model in other sizes if nothing else helps."""
        case, after = self.case, self.treatment.case
        as_it_is = self._as_it_is(*reloaded)
        remarks: list[Problem] = []
        if case.taken_out is not None and not self.loads:
            self._add(*self._taking_out(case.original), "slim", *case.taken_out)
        # A remedy may leave out what tells which parameter is which.
        if self.optimizer and not (self._is_written or self.optimizer.is_mended(after.checkpoint)):
            remarks = self.add_optimizer(self.original) if self.optimizer.is_mended(self.original) else []
        for remedy in chain.from_iterable((*each.first, each) for each in self.treatment.remedies):
            self._add(remedy.kind, remedy.message, *remedy.command)
        remarks += self.add_optimizer(after.checkpoint if self._is_written else self.original)
        then: str | None = None
        if not after.fit.distance:
            if not self.optimizer:
                self._add_optimizers()
            keeps = self._add_objects()
            if not keeps and (apart := tied_apart(after)):  # torch keeps the last and says nothing
                self.problems.append(Problem("tied", apart))
                keeps = True
            then = None if keeps else self.aim.trial(self.file, self._where)
        elif question := self.treatment.open_question:
            self.problems.append(Problem("ambiguous", question))
        elif rebuild is not None and (respec := rebuild(after)) is not None:
            then = replace(self.aim, name=respec.spec).trial(self.file, self._where)
            self.problems.append(Problem("size", respec.message, then))
        else:
            found = unfixable(after, listed=after.fit == case.fit)  # the diagnosis begins with those
            self.problems += [Problem(kind, message) for kind, message in found]
        python = python_line(*self._result, self.file, rewritten=self._is_written) if then else None
        self.problems += as_it_is if then else ()
        self.problems += [*remarks, *self._remarks(bool(then))]
        path, kind = case.checkpoint.path, case.checkpoint.format
        problems, of_optimizer = tuple(self.problems), (self.optimizer_loads, self.optimizer_python)
        where = case.original.where
        return Diagnosis(path, kind, where, self.loads, case.fit, problems, then, python, *of_optimizer)

    @property
    def _where(self) -> tuple[str, ...]:
        """The flags that name the state, as long as no command has taken it out."""
        return () if self._is_written else self.case.taken_out or ()

    @property
    def _result(self) -> tuple[Checkpoint, State]:
        """The checkpoint that the last command wrote, or the original one, and the state in it."""
        if self._is_written:
            return self.treatment.case.checkpoint, self.treatment.case.state
        return self.original, self.case.original

    def _taking_out(self, state: State) -> tuple[str, str]:
        if state.module is not None:
            return "pickled-model", f"the names are those of a pickled {state.module.type_name}"
        return "state", f"the state that fits best is '{state.where}', not the one that is taken by default"

    def _as_it_is(self, prefix: str, fitted: Case) -> list[Problem]:
        """Return a remark if `reload` strips the prefix by itself, which torch's load_state_dict does not."""
        if self.loads or not prefix or fitted.fit.distance or self.aim.flag != "--model":
            return []
        message = f"ckpttool reload strips '{prefix}' by itself and loads the file; load_state_dict does not"
        return [Problem("reload", message, self.aim.trial(self.file, self._where), is_remark=True)]

    def _add_objects(self) -> bool:
        """Add a problem if the model asks for objects, which torch.load creates and this package does not."""
        after = self.treatment.case
        places = after.blueprint.places
        others = ((name, value) for name, value in after.state.others.items() if name in places)
        objects = tuple(name for name, value in others if not is_plain(value))
        if objects:
            likes = after.state.likes
            message = f"it holds objects ({shortened(objects)}), which are never created from a file here"
            if all(name in likes and likes[name].kind == UNINITIALISED for name in objects):
                message = not_plain(likes, objects)
            trusting = "torch.load(weights_only=False) creates them, if you trust the file"
            self.loads = False
            self.problems.append(Problem("object", f"{message}; {trusting}"))
        return bool(objects)

    def _add_optimizers(self) -> None:
        """Add a problem if an optimizer, which counts parameters, would give momentum to other parameters."""
        after = self.treatment.case
        places = after.blueprint.places
        names = after.blueprint.parameters
        if not names or not all(name in places for name in names):
            return  # their order or their shapes are unknown: of a reference, or outside of the model's state
        parameters = {name: places[name].shape or () for name in names}
        for value in walk(self.case.checkpoint.tree):
            if is_nested_optimizer(value):  # torch loads a flat one by names
                check = mismatched_order(after.state.tensors, value, parameters)
                if not check.fits:
                    self._add_order(str(check), parameters)
                    return

    def _add_order(self, message: str, parameters: Mapping[str, tuple[int, ...]]) -> None:
        checkpoint, flags = self.treatment.case.checkpoint, ["--to", "indices", *self.aim.words]
        try:
            try:
                to_indices(checkpoint, parameters=parameters)
            except Refused:  # without names both orders may fit: the message says that the state's is meant
                to_indices(checkpoint, parameters=parameters, order="state")
                flags += ["--order", "state"]
        except NothingToDo:
            return  # the optimizer keeps nothing per parameter
        except CkptToolError as error:
            message += f"; no command can fix it: {error.message}"
            self.problems.append(Problem("optimizer-order", message))
        else:
            self._add("optimizer-order", message, "optimizer", *flags)

    def _remarks(self, is_loadable: bool) -> Iterator[Problem]:
        case = self.case
        if case.original.module is not None and self.loads:
            name = case.original.module.type_name
            message = f"the file is a whole pickled model, and torch.load needs the code of {name}"
            yield self._remark("pickled-model", message, None if self.problems else "slim")
        elif is_loadable and (refused := self._refused()):
            message = (
                f"torch.load refuses the file, as it holds {shortened(refused)}: slim writes the state "
                "alone, disarm everything with plain values in their place"
            )
            yield self._remark("objects", message, "slim", *self._where)
        elif case.state.where and not self.problems:
            message = f"the state is under '{case.state.where}', and load_state_dict wants only that"
            yield self._remark("nested", message, "slim")
        added = self.treatment.case.fit.added
        if added and self.treatment.case.is_same_architecture:  # else the file may have them by other names
            lacks = f"the file lacks {len(added)} counters of BatchNorm ({shortened(added)})"
            yield self._remark("counters", f"{lacks}, which torch adds", None)
        yield from self._precision()

    def _refused(self) -> tuple[str, ...]:
        """Return what torch.load refuses the result for, if it is a file that torch.load reads."""
        form = format_of_name(self.output) if self._is_written else self.original.format
        return refused_by_torch(self._result[0], rewritten=self._is_written) if form in PICKLED else ()

    def _precision(self) -> Iterator[Problem]:
        after = self.treatment.case
        packed = is_packed(after.checkpoint, after.state)
        casts = Counter(
            (tensor.dtype.name, place.dtype)
            for name, tensor in after.state.tensors.items()
            if (place := after.blueprint.places.get(name)) is not None and place.dtype != tensor.dtype.name
        )
        for (theirs, ours), count in casts.items():
            if "complex" in theirs and "complex" not in ours:
                continue  # it does not fit, which is a problem
            message = f"{count} tensors are {theirs} in the file and {ours} in the model: loading casts them"
            # convert casts only floats, and a cast of codes would be no number of the model's
            known = SHORT_TYPES.get(ours) if "float" in theirs and not packed else None
            yield self._remark("precision", message, *(["convert", "--dtype", known] if known else [None]))


SHORT_TYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def free_output(file: str, checkpoint: Checkpoint, what: str = "mended") -> str:
    """Return a free name next to the file, in a format that holds what the file holds."""
    path = file.rstrip("/")
    path = os.path.basename(path) if is_url(path) else path
    stem = path if os.path.isdir(path) else os.path.splitext(path)[0]
    end = ".safetensors" if checkpoint.format.startswith("safetensors") and not checkpoint.full else ".pt"
    output, count = f"{stem}.{what}{end}", 1
    while os.path.lexists(output):
        count += 1
        output = f"{stem}.{what}-{count}{end}"
    return output


# ---- What torch loads

PICKLED = ("torch-zip", "torch-legacy", "torch-tar")  # the formats that torch.load reads
NEW_PROTOCOL = 4  # from it on, Python's pickler uses opcodes that `weights_only` lacks


def refused_by_torch(checkpoint: Checkpoint, *, rewritten: bool = False) -> tuple[str, ...]:
    """Return what `torch.load(weights_only=True)`, torch's default, refuses a `.pt` file for."""
    names = dict.fromkeys(_refused(checkpoint.tree, checkpoint.protocol))
    if checkpoint.protocol >= NEW_PROTOCOL and not rewritten:
        names[f"pickle protocol {checkpoint.protocol}"] = None
    return tuple(names)


def _refused(tree: object, protocol: int) -> Iterator[str]:
    for value in walk(tree):
        if isinstance(value, Global) and value not in TAKEN:
            yield str(value)
        elif isinstance(value, frozenset):
            yield "frozenset"
        elif isinstance(value, bytes | bytearray) and protocol > 2:
            yield f"{type(value).__name__} of pickle protocol {protocol}"
        elif isinstance(value, int) and value.bit_length() >= MAX_INTEGER:
            yield "an integer of more than 255 bytes"


def python_line(checkpoint: Checkpoint, state: State, file: str, *, rewritten: bool) -> str:
    """Return the line that loads a state strictly into `model`, whatever program runs it."""
    form = format_of_name(file) if rewritten else checkpoint.format
    if form == "safetensors" and not checkpoint.full:
        return f"safetensors.torch.load_model(model, {file!r})"
    is_torch = form in PICKLED and state.module is None
    if is_torch and not refused_by_torch(checkpoint, rewritten=rewritten):
        device = ", map_location='cpu'" if _is_elsewhere(checkpoint.tree) else ""
        keys = "".join(f"[{key!r}]" for key in state.path)
        return f"model.load_state_dict(torch.load({file!r}{device}){keys})"
    where = f", state={state.where!r}" if state.path else ""
    return f"ckpttool.reload({file!r}, model{where})"


def optimizer_line(checkpoint: Checkpoint, file: str) -> str:
    """Return the line that loads the states of optimizers, without this package, into `optimizer`."""
    device = ", map_location='cpu'" if _is_elsewhere(checkpoint.tree) else ""
    paths = [path for path, value in checkpoint.named(contents) if is_optimizer(value)]
    calls = []
    for number, path in enumerate(paths):
        keys, value = "", checkpoint.tree
        for step in path:
            key: Any = int(step) if isinstance(value, list | tuple) else step
            keys, value = f"{keys}[{key!r}]", value[key] if isinstance(value, dict | list | tuple) else None
        which = f"optimizer[{number}]" if paths[1:] else "optimizer"
        calls.append(f"{which}.load_state_dict(torch.load({file!r}{device}){keys})")
    return "; ".join(calls)


def _is_elsewhere(tree: object) -> bool:
    """Return whether a storage is tagged with another device than the CPU, which may be missing."""
    storages = (value.storage if isinstance(value, TensorRef) else value for value in walk(tree))
    return any(isinstance(storage, Storage) and storage.location != "cpu" for storage in storages)
