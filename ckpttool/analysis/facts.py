"""The facts of a summary, as labels and sentences: the same in a terminal, a notebook and a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..checkpoint.checkpoint import SHARDING
from ..words import counted, printable, show_bytes, show_names
from .other_contents import groups_in_words

if TYPE_CHECKING:
    from ..checkpoint.ranks import Ranks
    from ..transforms.wrappers import FoundPrefix
    from .other_contents import OtherRow
    from .summary import Summary

MAX_GROUPS = 12  # Lines of an optimizer's groups that are shown without `everything`
CALLS = "calls"  # the label of what torch.load would call without weights_only


def facts_of(summary: Summary, everything: bool) -> Iterator[tuple[str, str]]:
    """Yield label and text of each fact, fit to be shown; one without a label goes on from the one before.

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
    yield from (("quantised", printable(str(scheme))) for scheme in summary.quantised)
    yield from _first("unclear", [*map(printable, summary.unclear)], most)
    yield from (("prefix", _prefix(prefix)) for prefix in summary.prefixes)
    yield from _first("tied", [_tie(names, most) for names in summary.ties], most)
    yield from _training(summary, max(most, MAX_GROUPS))
    yield from _bytes(summary)
    yield from (
        ("metadata", f"{printable(key)}: {printable(value)[:200]}") for key, value in summary.metadata.items()
    )
    if summary.unread:
        yield "not read", show_names(summary.unread, most)
    # All of them: what is left out here may be what matters.
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
    """Yield where the model's state is and what it holds, or why there is none; and other states."""
    if summary.ranks is not None and summary.ranks.missing:
        yield "state", "none: tensors are not whole without the missing ranks"
        return
    if summary.state is not None:
        whole = f", a whole pickled model ({printable(summary.model)})" if summary.model else ""
        tensors = counted(summary.keys, "tensor")
        yield "state", f"{_place(summary.state)}{whole}: {tensors}, {summary.parameters:,} parameters"
        dtypes = (f"{count} {dtype}" for dtype, count in summary.here.dtypes.items())
        yield "dtypes", ", ".join(dtypes) or "none"
        if summary.packed:
            yield "stored as", ", ".join(f"{count} {kind}" for kind, count in summary.packed.items())
        if pieces := [f"{printable(name)} ({like})" for name, like in summary.likes.items() if like.is_piece]:
            yield "pieces", f"{len(pieces)} tensors of which this file has a piece: {show_names(pieces, 2)}"
        if set(summary.here.devices) - {"cpu"}:
            yield "saved on", show_names([f"{n} ({c})" for n, c in summary.here.devices.items()], most)
    elif SHARDING in summary.metadata:
        yield "state", "none: it holds one rank's pieces of tensors"
    elif summary.parts_in:
        yield "state", f"in {printable(summary.parts_in)}, beside it (--save-parts)"
    else:
        yield "state", "several, name one" if summary.other_states else "none: it holds no dict of tensors"
    yield from (("also", f"--state {printable(shlex.quote(name))}") for name in summary.other_states)


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
        rates = ", ".join(map(str, rate)) if isinstance(rate, list | tuple) else rate
        last = "" if scheduler.last_epoch is None else f", at {scheduler.last_epoch}"
        now = "" if rates is None else f", lr {rates}"
        yield "scheduler", printable(f"'{scheduler.name}': {scheduler.kind}{last}{now}")


def _bytes(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield what the bytes of the file are used for, if not for the state alone."""
    optimizers = sum(row.nbytes for row in summary.optimizers)
    others = summary.outside.nbytes - optimizers
    rest = summary.nbytes - summary.here.nbytes - summary.outside.nbytes - summary.unused
    parts = [
        ("state", summary.here.nbytes),
        ("optimizers" if len(summary.optimizers) > 1 else "optimizer", optimizers),
        ("other tensors", others),
        ("unused", summary.unused),
        ("all else", rest),
    ]
    if summary.unused > max(0, others, optimizers) or summary.outside.nbytes:
        share = max(summary.nbytes, 1)
        yield "bytes", ", ".join(f"{n} {show_bytes(c)} ({c / share:.0%})" for n, c in parts if c > 0)
    if summary.unused:
        unused = show_bytes(summary.unused)
        yield "unused", f"{unused} of storages that no tensor uses: slim leaves them out"


def value_in_words(row: OtherRow) -> str:
    """Return the value of an entry that is no tensor, or its type and size."""
    if row.same_as is not None:
        return f"the same {printable(row.type)} as {printable(row.same_as) or 'the file itself'}"
    if row.has_value:
        return printable(str(row.value))[:200] or "''"
    return printable(row.type) + (f" of {row.size}" if row.size is not None else "")
