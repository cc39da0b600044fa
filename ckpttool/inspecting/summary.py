"""The contents of a checkpoint in short, and its facts as labels and sentences; no values are loaded."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any

from ..core.checkpoint.checkpoint import SHARDING, Checkpoint, Ranks, Remark
from ..core.checkpoint.dotted_names import Entry, Path, contents, dotted
from ..core.checkpoint.module_tree import Branch, outline
from ..core.checkpoint.prefixes import LIGHTNING, FoundPrefix, found_prefixes
from ..core.checkpoint.settings import Scheme
from ..core.checkpoint.special_tensors import SpecialTensor
from ..core.checkpoint.state import SCORED, State, parts_beside, scored_average
from ..core.formats.reading import File, opened
from ..core.inert_pickle.known_names import is_dangerous, names_in, names_that_run, unknown_names
from ..core.inert_pickle.values import Global, Record, in_brief, tensor_of, walk
from ..core.lazy import shown_by
from ..core.tensors.ref import TensorRef
from ..core.words import counted, printable, show_bytes, show_names
from ..rooms import find
from .other_contents import OptimizerRow, OtherRow, SchedulerRow, groups_in_words, other_rows, training_rows

MAX_GROUPS = 12  # Lines of an optimizer's groups that are shown without `everything`
CALLS = "calls"  # the label of what torch.load would call without weights_only


def facts_of(summary: Summary, everything: bool) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each fact; a fact without a label continues the one before.

    With `everything`, every name is shown instead of the first few.
    """
    most = 1_000_000 if everything else 6
    if summary.commit:
        yield "commit", summary.commit
    if summary.made_of:
        files = [f"{printable(name)} ({show_bytes(size)})" for name, size in summary.made_of.items()]
        yield "made of", show_names(files, most)
    if summary.ranks is not None:
        yield from _run(summary.ranks, most)
    yield from _state(summary, most)
    yield from (("computed", _fold(kind, count)) for kind, count in summary.folds.items())
    if summary.adapter:
        yield "adapter", _adapter(summary.adapter, most)
    yield from (("quantised", printable(str(scheme))) for scheme in summary.quantised)
    yield from _first("unclear", [*map(printable, summary.unclear)], most)
    yield from (("prefix", _prefix(prefix)) for prefix in summary.prefixes)
    yield from _first("tied", [_tie(names, most) for names in summary.ties], most)
    yield from _training(summary, max(most, MAX_GROUPS))
    yield from _bytes(summary)
    for key, value in summary.metadata.items():
        yield "metadata", f"{printable(key)}: {printable(value)[:200]}"
    if summary.unread:
        yield "not read", show_names(summary.unread, most)
    # All calls are shown: a call that is left out may be the one that matters.
    yield from ((CALLS, f"{printable(call)} (kept inert, never made)") for call in summary.calls)
    if summary.running:
        yield "could run", f"{', '.join(map(printable, summary.running))} (kept inert, never imported)"
    if harmless := summary.unknown[len(summary.running) :]:
        yield "unknown", f"{show_names(harmless, most)} (kept inert, never imported)"
    remarks = [f"{printable(remark.name)}: {printable(remark.message)}" for remark in summary.remarks]
    yield from _first("beware", remarks, most)


def _first(label: str, facts: Sequence[str], most: int) -> Iterator[tuple[str, str]]:
    yield from ((label, fact) for fact in facts[:most])
    if len(facts) > most:
        yield "", f"and {len(facts) - most} more"


def _state(summary: Summary, most: int) -> Iterator[tuple[str, str]]:
    """Yield the place and contents of the model's state, or why there is no state; then other states."""
    if summary.ranks is not None and summary.ranks.missing:
        yield "state", "none: tensors are not whole without the missing ranks"
        return
    if summary.state is not None:
        whole = f", a whole pickled model ({printable(summary.model)})" if summary.model else ""
        tensors = counted(summary.keys, "tensor")
        yield "state", f"{_place(summary.state)}{whole}: {tensors}, {summary.parameters:,} parameters"
        yield (
            "dtypes",
            ", ".join(f"{count} {dtype}" for dtype, count in summary.here.dtypes.items()) or "none",
        )
        if summary.packed:
            yield "stored as", ", ".join(f"{count} {kind}" for kind, count in summary.packed.items())
        if pieces := [f"{printable(name)} ({like})" for name, like in summary.likes.items() if like.is_piece]:
            yield "pieces", f"{len(pieces)} tensors of which this file has a piece: {show_names(pieces, 2)}"
        if set(summary.here.devices) - {"cpu"}:
            yield "saved on", show_names([f"{n} ({c})" for n, c in summary.here.devices.items()], most)
    elif SHARDING in summary.metadata:
        yield "state", "none: it holds one rank's pieces of tensors"
    elif summary.parts_in:
        yield "state", f"in {printable(summary.parts_in)}, beside it (--shard parts)"
    else:
        yield "state", "several, name one" if summary.other_states else "none: it holds no dict of tensors"
    for name in summary.other_states:
        yield "also", f"--state {printable(shlex.quote(name))}{f' ({SCORED})' * (name == summary.scored)}"


def _fold(kind: str, count: int) -> str:
    """Return, in words, what wrappers of a kind compute, and what computes it once."""
    what = {"lora": "an adapter is inside", "mask": "masks of pruning", "norm": "weight or spectral norm"}[
        kind
    ]
    return f"{what}: {counted(count, 'tensor')}; convert --fold {kind} makes plain ones"


def _adapter(adapter: Any, most: int) -> str:
    numbers = [
        f"{name} {value:g}" for name in ("rank", "alpha") if (value := getattr(adapter, name)) is not None
    ]
    targets = f"for {show_names([*map(printable, adapter.targets)], most)}" if adapter.targets else ""
    base = f"of {printable(adapter.base)}" if adapter.base else ""
    return ", ".join(filter(None, (adapter.dialect, *numbers, targets, base)))


def _run(ranks: Ranks, most: int) -> Iterator[tuple[str, str]]:
    """Yield who wrote the files, what each rank's hold, and which are missing."""
    count = "" if ranks.world_size is None else counted(ranks.world_size, "rank")
    step = "" if ranks.step is None else f"step {ranks.step}"
    yield "run", ", ".join(filter(None, (ranks.framework, count, printable(ranks.axes), step)))
    if ranks.held:
        held = [f"{rank}: {show_bytes(nbytes)}" for rank, nbytes in ranks.held.items()]
        yield "ranks hold", show_names(held, max(most, 8))
    if ranks.replicated:
        yield "replicated", f"on several ranks: {show_names(ranks.replicated, most)}"
    if ranks.missing:
        numbers = show_names([*map(str, ranks.missing)], most)
        lacking = f": {show_names(ranks.lacking, most)}" if ranks.lacking else ""
        yield "missing", f"the files of {'rank' if len(ranks.missing) == 1 else 'ranks'} {numbers}{lacking}"


def _place(name: str) -> str:
    return f"'{printable(name)}'" if name else "the file itself"


def _tie(names: Sequence[str], most: int) -> str:
    """Join the names of one tensor, at most `most` of them."""
    shown = " = ".join(map(printable, names[:most]))
    return shown + (f" and {len(names) - most} more names" if len(names) > most else "")


def _prefix(prefix: FoundPrefix) -> str:
    perhaps = "" if prefix.certain else f"; perhaps: {prefix.reason}"
    return printable(f"'{prefix.prefix}' on {prefix.keys} of {prefix.of} keys ({prefix.wrapper}{perhaps})")


def _training(summary: Summary, most: int) -> Iterator[tuple[str, str]]:
    for row in summary.optimizers:
        state = f"state of {row.with_state} of {counted(row.parameters, 'parameter')}"
        kept = f": {show_names(row.per_parameter)}" if row.per_parameter else ""
        size = f", {show_bytes(row.nbytes)}" if row.nbytes else ""
        yield "optimizer", f"{_place(row.name)}: {row.kind or 'of an unknown kind'}, {state}{size}{kept}"
        lines = [*groups_in_words(row)]
        yield from (("", printable(line)) for line in lines[:most])
        if len(lines) > most:
            yield "", f"{len(lines) - most} more groups: --json shows them"
    for scheduler in summary.schedulers:
        rate = scheduler.last_lr
        rates = rate if isinstance(rate, list | tuple) else [rate]
        last = "" if scheduler.last_epoch is None else f", at {scheduler.last_epoch}"
        now = "" if rate is None else f", lr {', '.join(map(str, rates))}"
        yield "scheduler", printable(f"'{scheduler.name}': {scheduler.kind}{last}{now}")


def _bytes(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield how the bytes of the file are used, unless only the state uses them."""
    optimizers = sum(row.nbytes for row in summary.optimizers)
    others = summary.outside.nbytes - optimizers
    rest = summary.nbytes - summary.here.nbytes - summary.outside.nbytes - summary.unused
    name = "optimizers" if len(summary.optimizers) > 1 else "optimizer"
    parts = {"state": summary.here.nbytes, name: optimizers, "other tensors": others}
    parts |= {"unused": summary.unused, "all else": rest}
    if summary.unused > max(0, others, optimizers) or summary.outside.nbytes:
        share = max(summary.nbytes, 1)
        yield "bytes", ", ".join(f"{n} {show_bytes(c)} ({c / share:.0%})" for n, c in parts.items() if c > 0)
    if summary.unused:
        yield "unused", f"{show_bytes(summary.unused)} of storages that no tensor uses: slim leaves them out"


def value_in_words(row: OtherRow) -> str:
    """Return the value of an entry that is no tensor, or its type and size."""
    if row.same_as is not None:
        return f"the same {printable(row.type)} as {printable(row.same_as) or 'the file itself'}"
    if row.has_value:
        return printable(str(row.value))[:200] or "''"
    return printable(row.type) + (f" of {row.size}" if row.size is not None else "")


# ---- The summary


MAX_CALLS, LONG = 100, 200  # calls of known dangers that are shown, and characters of an argument


@dataclass(frozen=True, slots=True)
class Kinds:
    """A group of tensors: how many of each element type and device, and their bytes, ties counted once."""

    dtypes: Mapping[str, int]
    devices: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class OtherTensors:
    """The tensors below one name outside the state and the optimizers.

    Attributes:
        name: dotted path of the container, or of a tensor that lies in none.
        tensors: how many.
        nbytes: their bytes, ties counted once.
    """

    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A file at a glance.

    Attributes:
        path: the file as it was named.
        format: its format, as `torch-zip`.
        nbytes: its size; of a delta with what it is built on.
        made_of: of a delta the sizes of its files by name, its own first and its base's last.
        state: dotted path of the model's state, `""` for the file itself, None when there is none.
        model: the class of the pickled model that holds the state; None when a dict does.
        other_states: further dicts of tensors that a user may have meant.
        scored: the one of them by which the run was scored that wrote the file, if it was.
        keys: the number of tensors in the state.
        likes: those that are not plain ones (sharded, sparse, quantised, …), by name.
        parameters: the number of elements in the state's tensors, without BatchNorm's statistics.
        prefixes: wrappers' prefixes on the state's keys.
        modules: the state's modules as a tree.
        ties: names in the state that are one tensor.
        here, outside: the tensors of the state, and all the others.
        unused: bytes of storages that no tensor uses.
        optimizers, schedulers: those found, in short.
        other_tensors: the tensors of `outside` that are in no optimizer, by the name they lie below.
        other: everything that is not a tensor.
        unknown: names in the file's pickle that are not understood here, those that could run something
            first; never imported.
        running: those of them that could run something when they are unpickled without `weights_only`.
        calls: calls of known dangers in the tree, as `posix.system('ls')`; one that the pickle drops is not
            there.
        remarks: where torch refuses the file, or no writer of torch's makes such a thing.
        metadata: the texts of a safetensors header, or of another format.
        ranks: what is known of the ranks that each wrote a part; None when one process wrote the file.
        packed: tensors by the packed type they are stored in.
        unread: what the file holds that is neither a tensor nor shown here, in words.
        quantised: how the state's tensors are packed, if they are.
        unclear: why some of those can't be made plain.
        parts_in: the folder beside the file that has its tensors, where the trainer's ranks wrote them.
        commit: of the repository on the hub that was read.
        folds: how many tensors a wrapper computes from others, by the kind that `--fold` takes.
        adapter: whose names a LoRA adapter has, its rank, alpha, targets and base; None for what is none.
    """

    path: str
    format: str
    nbytes: int = field(metadata={"json": "bytes"})
    state: str | None
    model: str | None
    other_states: tuple[str, ...]
    scored: str | None = field(metadata={"json": None})
    keys: int
    likes: Mapping[str, SpecialTensor] = field(metadata={"json": None})
    parameters: int
    prefixes: tuple[FoundPrefix, ...]
    modules: Branch = field(metadata={"json": None})
    ties: tuple[tuple[str, ...], ...]
    here: Kinds = field(metadata={"json": None})
    outside: Kinds = field(metadata={"json": None})
    unused: int = field(metadata={"json": "unused_bytes"})
    optimizers: tuple[OptimizerRow, ...]
    schedulers: tuple[SchedulerRow, ...]
    other_tensors: tuple[OtherTensors, ...]
    other: tuple[OtherRow, ...] = field(metadata={"json": None})
    unknown: tuple[str, ...]
    running: tuple[str, ...] = field(metadata={"json": "could_run"})
    calls: tuple[str, ...]
    remarks: tuple[Remark, ...]
    metadata: dict[str, str]
    ranks: Ranks | None = field(default=None, metadata={"if_any": True})
    packed: Mapping[str, int] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    quantised: tuple[Scheme, ...] = ()
    unclear: tuple[str, ...] = ()
    parts_in: str | None = field(default=None, metadata={"json": None})
    commit: str | None = field(default=None, metadata={"if_any": True})
    made_of: Mapping[str, int] = field(default_factory=dict, metadata={"if_any": True})
    folds: Mapping[str, int] = field(default_factory=dict, metadata={"if_any": True})
    adapter: Any = field(default=None, metadata={"json": None})

    def __repr__(self) -> str:
        what = f"{self.format}, {show_bytes(self.nbytes)}, {counted(self.keys, 'tensor')}"
        return f"<Summary {self.path}: {what}, {self.parameters:,} parameters>"

    _repr_html_ = shown_by("summary_html")


def inspect(file: File, *, state: str | None = None) -> Summary:
    """Return what is in a file: its format, the model's state, optimizers and everything else; load nothing.

    Args:
        file: a path, or an open checkpoint.
        state: dotted path of the model's state; found when None.

    Returns:
        The contents in short: `.format`, `.state`, `.keys`, `.parameters`, `.modules`, `.optimizers`, ….

    Raises:
        NoState: there is no state at `state`.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.

    Example:
        >>> summary = ckpttool.inspect("last.pt")
        >>> summary.state, summary.keys, [row.kind for row in summary.optimizers]
        ('model', 7, ['Adam'])
    """
    with opened(file) as checkpoint:
        return summarize(checkpoint, state)


def summarize(checkpoint: Checkpoint, state: str | None = None) -> Summary:
    """Return a checkpoint in short."""
    chosen = checkpoint.found_state() if state is None else checkpoint.state(state)
    tensors, likes = (chosen.tensors, chosen.likes) if chosen else ({}, {})
    modules = outline(_in_order(chosen) if chosen and likes else tensors)
    here = _Looks([*tensors.values(), *(part for like in likes.values() for part in like.parts.values())])
    outside = list(_outside(checkpoint, chosen))
    everything = _Looks([*here.tensors, *(tensor for _, tensor in outside)]) if outside else here
    others = [(path, tensor) for path, tensor in outside if id(tensor.storage) not in here.storages]
    optimizers, schedulers = training_rows(checkpoint.tree)
    names = checkpoint.names | names_in(checkpoint.tree)
    lightning = isinstance(checkpoint.tree, dict) and LIGHTNING in checkpoint.tree
    prefixes = found_prefixes(tensors, chosen.versions, lightning=lightning) if chosen else ()
    numbers: Any = find("numbers.recognise")
    packed = numbers.recognise(checkpoint, chosen) if numbers and chosen else None
    folding: Any = find("folding.fold")
    adapters: Any = find("lora.dialects")
    parts = reversed(checkpoint.shards) if checkpoint.format == "delta" else ()
    return Summary(
        path=checkpoint.path,
        format=checkpoint.format,
        nbytes=checkpoint.nbytes,
        state=chosen.where if chosen else None,
        model=chosen.module.type_name if chosen and chosen.module else None,
        other_states=tuple(checkpoint.other_states(chosen.path if chosen else None)),
        scored=scored_average(checkpoint.tree),
        keys=len(tensors) + len(likes),
        likes=dict(likes),
        parameters=modules.parameters,
        prefixes=tuple(prefixes),
        modules=modules,
        ties=tuple(_ties(tensors)) if here.shared else (),
        here=_with_likes(tensors, likes, here.kinds()),
        outside=_Looks(tensor for _, tensor in others).kinds(),
        unused=everything.unused(),
        optimizers=optimizers,
        schedulers=schedulers,
        other_tensors=tuple(_other_tensors(others, chosen, [row.name for row in optimizers])),
        other=tuple(other_rows(checkpoint, chosen)),
        unknown=tuple(unknown_names(names)),
        running=tuple(names_that_run(names)),
        calls=tuple(_calls(checkpoint.tree)) if any(map(is_dangerous, names)) else (),
        remarks=checkpoint.remarks,
        metadata=dict(checkpoint.metadata),
        ranks=checkpoint.ranks,
        packed=checkpoint.packed,
        unread=checkpoint.unread,
        quantised=packed.schemes if packed else (),
        unclear=tuple(fault.message for fault in packed.faults) if packed else (),
        parts_in=(parts_beside(checkpoint.tree) or {}).get("folder"),
        commit=checkpoint.source.commit or None,
        folds=folding.folds_in(chosen) if folding and chosen else {},
        adapter=adapters.summary_of(checkpoint) if adapters else None,
        made_of={source.path: source.size for source in parts if source.size},
    )


def _calls(tree: object) -> Iterator[str]:
    """Yield the calls of dangerous functions, each text once, with arguments cut to a few words."""
    records = (value for value in walk(tree) if isinstance(value, Record))
    texts = (_call(value) for value in records if is_dangerous(_name_called(value)))
    yield from islice(dict.fromkeys(texts), MAX_CALLS)


def _name_called(value: Record) -> Global:
    """Return the name that is called, of nested calls the innermost, as in getattr(os, 'system')('ls')."""
    called, left = value.callable, MAX_CALLS
    while left and isinstance(called, Record):
        called, left = called.callable, left - 1
    return called if isinstance(called, Global) else Global("", "")


def _call(value: Record, levels: int = 3) -> str:
    called = value.callable
    name = _call(called, levels - 1) if isinstance(called, Record) and levels else in_brief(called)
    arguments = value.args if isinstance(value.args, tuple) else (value.args,)
    shown = (repr(x[:LONG]) if isinstance(x, str | bytes) else in_brief(x)[:LONG] for x in arguments[:4])
    return f"{name}({', '.join(shown)})"


def _ties(tensors: Mapping[str, TensorRef]) -> Iterator[tuple[str, ...]]:
    """Return the names that are one tensor; other views of one storage are not ties."""
    uses = Counter(id(tensor.storage) for tensor in tensors.values())
    views = defaultdict[object, list[str]](list)
    for name, tensor in tensors.items():
        if uses[id(tensor.storage)] > 1:
            views[tensor.view].append(name)
    return (tuple(names) for names in views.values() if len(names) > 1 and tensors[names[0]].numel)


def _in_order(state: State) -> dict[str, TensorRef]:
    """Return all tensors of a state in its order; those that are not plain ones, by dtype and shape alone."""
    names = (str(key) for key in state.container)
    tensors = state.tensors | {name: like.as_tensor() for name, like in state.likes.items()}
    return {name: tensors[name] for name in names if name in tensors}


def _with_likes(tensors: Mapping[str, TensorRef], likes: Mapping[str, SpecialTensor], parts: Kinds) -> Kinds:
    """Count tensors that are not plain ones by what they are, not by their parts."""
    if not likes:
        return parts
    dtypes = Counter(tensor.dtype.name for tensor in tensors.values())
    dtypes.update(f"{like.dtype.name} {like.kind}" if like.dtype else like.kind for like in likes.values())
    return replace(parts, dtypes=dict(dtypes.most_common()))


def _outside(checkpoint: Checkpoint, state: State | None) -> Iterator[tuple[Path, TensorRef]]:
    """Yield the tensors that are not directly in the state, with their paths."""

    def inside(value: object) -> Iterable[Entry] | None:
        if state is None or state.module is not None or value is not state.anchor:
            return contents(value)
        return [(name, item) for name, item in state.others.items() if name not in state.likes]

    named = ((path, tensor_of(value)) for path, value in checkpoint.named(inside))
    return ((path, tensor) for path, tensor in named if tensor is not None)


def _other_tensors(
    tensors: Iterable[tuple[Path, TensorRef]], state: State | None, optimizers: list[str]
) -> Iterator[OtherTensors]:
    """Yield the tensors outside the state, together for each path that leaves the state's."""
    way, inside = state.path if state else (), tuple(f"{name}." for name in optimizers if name)
    groups: dict[str, list[TensorRef]] = {}
    for path, tensor in tensors:
        if "" not in optimizers and not dotted(path).startswith(inside):
            levels = len([*takewhile(lambda steps: steps[0] == steps[1], zip(path, way, strict=False))])
            groups.setdefault(dotted(path[: levels + 1]), []).append(tensor)
    for name, group in groups.items():
        yield OtherTensors(name, len(group), _Looks(group).kinds().nbytes)


class _Looks:
    """The bytes that some tensors use, counted by form: most have their own storage, and forms are few."""

    def __init__(self, tensors: Iterable[TensorRef]) -> None:
        tensors = list(tensors)
        self.tensors = tensors
        self.storages = {id(storage): storage for storage in map(attrgetter("storage"), tensors)}
        self.shared: list[list[TensorRef]] = []  # the other tensors, by the storage that they share
        if len(self.storages) < len(tensors):
            groups = defaultdict[int, list[TensorRef]](list)
            for tensor in tensors:
                groups[id(tensor.storage)].append(tensor)
            tensors = [group[0] for group in groups.values() if len(group) == 1]
            self.shared = [group for group in groups.values() if len(group) > 1]
        forms = list(map(attrgetter("dtype.name", "shape", "stride"), tensors))
        of_form = dict(zip(forms, tensors, strict=True))
        # one tensor of each form with the number of tensors that have it, of those with their own storage
        self.alone = [(of_form[form], count) for form, count in Counter(forms).items()]

    def kinds(self) -> Kinds:
        dtypes: Counter[str] = Counter()
        for tensor, count in self.alone:
            dtypes[tensor.dtype.name] += count
        devices = Counter(map(attrgetter("location"), self.storages.values()))
        nbytes = sum(tensor.nbytes * count for tensor, count in self.alone)
        for group in self.shared:
            dtypes.update(tensor.dtype.name for tensor in group)
            devices[group[0].storage.location] += len(group) - 1
            nbytes += sum({t.view: t.nbytes for t in group}.values())
        return Kinds(dict(dtypes.most_common()), dict(devices.most_common()), nbytes)

    def unused(self) -> int:
        """Return the bytes of storages that no tensor uses, without gaps between a view's elements."""
        spans = ((tensor.span, count) for tensor, count in self.alone)
        used = sum((stop - begin) * count for (begin, stop), count in spans)
        for group in self.shared:
            end = 0
            for begin, stop in sorted(tensor.span for tensor in group):
                used += max(stop - max(begin, end), 0)
                end = max(end, stop)
        held: int = sum(map(attrgetter("data.nbytes"), self.storages.values()))
        return held - used
