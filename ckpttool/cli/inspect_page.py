"""The page that `inspect` prints: what is in a file, for a person to read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ..analysis.module_tree import tensors_in_words
from ..analysis.other_contents import groups_in_words
from ..checkpoint.checkpoint import SHARDING
from ..transforms.wrappers import LIGHTNING
from . import console
from .console import columns, counted, cut, printable, show_bytes, show_names

if TYPE_CHECKING:
    from ..analysis.module_tree import Branch
    from ..analysis.other_contents import OtherRow
    from ..analysis.summary import Summary
    from ..checkpoint.ranks import Ranks
    from ..transforms.wrappers import FoundPrefix

MAX_OTHERS = 12  # Values below one name that are shown without `-v`
FIRST = ("hyper_parameters", "datamodule_hyper_parameters")  # Entries of a Lightning file that stand first
FOLDED = ("loops", "callbacks")  # Entries of a Lightning file that hold its own bookkeeping
CALLS = "calls"  # the label of what torch.load would call without weights_only
INDENT = 14  # Columns before a fact: two spaces, and the widest label


def page(
    summary: Summary, depth: int | None, width: int | None, lines: int, *, everything: bool
) -> Iterator[str]:
    """Yield the lines of the page."""
    yield f"{printable(summary.path)}: {summary.format}, {show_bytes(summary.nbytes)}"
    for label, fact in _facts(summary, everything):
        lines_of_fact = _folded(f"  {label:{INDENT - 2}}{fact}".rstrip(), width)
        yield from (
            (console.coloured(line, "red") for line in lines_of_fact) if label == CALLS else lines_of_fact
        )
    if summary.keys:
        yield ""
        yield from _tree(summary, depth or summary.modules.depth_within(lines), width, everything)
    if other := list(_others(summary, everything=everything)):
        yield ""
        yield "other contents"
        widest = max(columns(name) for name, _ in other)
        if width:  # long names and long values share the width; whichever is short leaves it to the other
            values = max(columns(value) for _, value in other)
            widest = min(widest, max(width - values - 4, width // 2))
        for name, value in other:
            shown = console.left(console.cut_middle(name, widest), widest)
            yield cut(f"  {shown}  {value}".rstrip(), width)


def _facts(summary: Summary, everything: bool) -> Iterator[tuple[str, str]]:
    """Yield label and text of each fact; a fact without a label goes on from the one before."""
    most = 1_000_000 if everything else 6
    if summary.commit:
        yield "commit", summary.commit
    if summary.ranks is not None:
        yield from _run(summary.ranks, most)
    yield from _state(summary, most)
    yield from (("quantised", printable(str(scheme))) for scheme in summary.quantised)
    yield from _first("unclear", [*map(printable, summary.unclear)], most)
    yield from (("prefix", _prefix(prefix)) for prefix in summary.prefixes)
    yield from _first("tied", [_tie(names, most) for names in summary.ties], most)
    yield from _training(summary)
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


def _training(summary: Summary) -> Iterator[tuple[str, str]]:
    for row in summary.optimizers:
        state = f"state of {row.with_state} of {counted(row.parameters, 'parameter')}"
        kept = f": {show_names(row.per_parameter)}" if row.per_parameter else ""
        size = f", {show_bytes(row.nbytes)}" if row.nbytes else ""
        yield "optimizer", f"{_place(row.name)}: {row.kind or 'of an unknown kind'}, {state}{size}{kept}"
        lines = [*groups_in_words(row)]
        yield from (("", printable(line)) for line in lines[:MAX_OTHERS])
        if len(lines) > MAX_OTHERS:
            yield "", f"{len(lines) - MAX_OTHERS} more groups: --json shows them"
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


def _tree(summary: Summary, depth: int, width: int | None, everything: bool) -> Iterator[str]:
    usual = next(iter(summary.here.dtypes), "")
    lines = list(summary.modules.lines(depth))
    shown = lines if everything else lines[:200]
    names = [_module(level, branch, printable(summary.state or "")) for level, branch in shown]
    deepest = max(level for level, _ in lines)
    insides = [_inside(branch, usual, closed=level == deepest) for level, branch in shown]
    counts = [f"{branch.parameters:,}" for _, branch in shown]
    sizes = [show_bytes(branch.nbytes) for _, branch in shown]
    first, third = max(map(columns, names)), max(map(len, sizes))
    second = max(len("parameters"), *map(len, counts))
    if width:
        space = width - second - third - 6  # for names and contents
        wanted = max(columns(brief) for _, brief in insides)
        first = min(first, max(24, min(width // 2, space - wanted)))
    yield cut(f"{'module':{first}}  {'parameters':>{second}}  {'bytes':>{third}}", width)
    for name, count, size, (inside, brief) in zip(names, counts, sizes, insides, strict=True):
        if width and columns(inside) > space - first:
            inside = brief if ";" in brief else console.cut_middle(brief, max(space - first, 16))
        figures = f"{console.right(count, second)}  {console.right(size, third)}"
        yield cut(
            f"{console.left(console.cut_middle(name, first), first)}  {figures}  {inside}".rstrip(), width
        )
    if len(lines) > len(shown):
        yield f"and {len(lines) - len(shown):,} more: -v shows them all"


def _module(level: int, branch: Branch, where: str) -> str:
    name = printable(branch.name)
    if not level:
        name = f"{where}.{name}" if where and name else where or name or "the file itself"
    copies = f" ({branch.copies} identical)" if branch.copies > 1 else ""
    return "  " * level + name + copies


def _inside(branch: Branch, usual: str, *, closed: bool) -> tuple[str, str]:
    """Return what is in a module, for its line, in full and in fewer words."""
    if branch.branches:
        text = counted(branch.count, "tensor") if closed else ""
        return text, text
    whole, brief = (tensors_in_words(branch, usual, MAX_OTHERS, brief=each) for each in (False, True))
    return printable(whole), printable(brief)


def _folded(line: str, width: int | None) -> list[str]:
    """Fold a fact into lines of `width` columns, each indented as the fact is."""
    if width is None or columns(line) <= width:
        return [line]
    parts = console.wrapped(line[INDENT:], max(width - INDENT, 20))
    return [(" " * INDENT if i else line[:INDENT]) + part for i, part in enumerate(parts)]


def _others(summary: Summary, *, everything: bool) -> Iterator[tuple[str, str]]:
    """Yield name and value of everything that no other part of the page shows."""
    groups = [
        (name, list(rows)) for name, rows in groupby(summary.other, lambda row: row.name.partition(".")[0])
    ]
    lightning = any(name == LIGHTNING for name, _ in groups)
    if lightning:
        groups.sort(key=lambda group: group[0] not in FIRST)
    training = [row.name for row in summary.optimizers] + [row.name for row in summary.schedulers]
    shown = [name for name in training if name]
    inside, around = tuple(f"{name}." for name in shown), {name.rpartition(".")[0] for name in shown}
    if summary.model:
        around.add(summary.state or "")
    for name, rows in groups:
        if lightning and name in FOLDED and not everything:
            yield printable(name), _bookkeeping(name, rows)
            continue
        if not everything:
            rows = [row for row in rows if row.name not in around and not row.name.startswith(inside)]
        most = len(rows) if everything else MAX_OTHERS
        yield from ((printable(row.name), _value(row)) for row in rows[:most])
        if len(rows) > most:
            yield f"{printable(name)}.…", f"{len(rows) - most:,} more: -v shows them all"
    most = len(summary.other_tensors) if everything else MAX_OTHERS
    for held in summary.other_tensors[:most]:
        yield printable(held.name), f"{counted(held.tensors, 'tensor')}, {show_bytes(held.nbytes)}"
    if len(summary.other_tensors) > most:
        yield "…", f"{len(summary.other_tensors) - most:,} more with tensors: -v shows them all"


def _bookkeeping(name: str, rows: Sequence[OtherRow]) -> str:
    """Return the names of loops or callbacks, with keys such as `EarlyStopping{'mode': 'min'}`."""
    keys = (re.split(r"[.{]", row.name[len(name) + 1 :])[0] for row in rows)
    shown = printable(", ".join(filter(None, dict.fromkeys(keys))))
    return f"{counted(len(rows), 'value')} of {shown}" if shown else _value(rows[0])


def _value(row: OtherRow) -> str:
    if row.has_value:
        return printable(str(row.value))[:200] or "''"
    return printable(row.type) + (f" of {row.size}" if row.size is not None else "")
