"""What a notebook shows of checkpoints, states, summaries, comparisons: HTML that folds and has no script.

It is made of elements, so the standard library escapes all text and attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.module_tree import Branch, outline, shape_in_words
from ..core.checkpoint.state import State
from ..core.words import counted, printable, show_bytes, show_names
from ..diffing.compare_values import Comparison
from ..diffing.rows import ROWS, figures, items_of, rows_of
from ..errors import CkptToolError
from ..inspecting.summary import Summary, facts_of, value_in_words

MAX_BRANCHES = 300  # lines of modules
MAX_NAME = 200  # characters
MAX_TENSORS = 60  # of one module
MAX_ENTRIES = 20  # entries outside the state
MAX_OTHERS = 100  # values other than tensors

Child = str | Element


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """Return a checkpoint as HTML: its format and size, the model's state, and the names of all else."""
    head = _head(checkpoint)
    try:
        state = checkpoint.found_state()
        outside = checkpoint.outside(state) if state else ()
    except CkptToolError as error:  # what can be shown is shown
        return html(head, element("p", error.message))
    if state is None:
        states = checkpoint.other_states(None)
        several = f"several states: {show_names(states, MAX_ENTRIES)}"
        return html(head, element("p", several if states else "no dict of tensors by name"))
    others = [element("p", f"besides: {show_names(outside, MAX_ENTRIES)}")] if outside else []
    return html(head, _state(state), *others)


def _head(file: Checkpoint | Summary) -> Element:
    return element("p", element("b", file.path), f": {file.format}, {show_bytes(file.nbytes)}")


def state_html(state: State) -> str:
    """Return a state as HTML: a line about it, and below its modules, folded."""
    return html(_state(state))


def _state(state: State) -> Element:
    modules = outline(state.tensors)
    where = f"state '{state.where}'" if state.where else "state"
    more = f", {counted(len(state.likes), 'tensor')} of other kinds" if state.likes else ""
    said = f"{where}: {counted(len(state.tensors), 'tensor')}, {modules.parameters:,} parameters{more}"
    return folded(said, *_modules(modules), is_open=True)


def _modules(modules: Branch) -> Iterator[Element]:
    """Yield the contents of a module, each inner module folded; at most MAX_BRANCHES of them."""
    left = [MAX_BRANCHES]
    yield from _inside(modules, left)
    if left[0] <= 0:
        yield element("p", f"… only {MAX_BRANCHES} modules are shown")


def _line(branch: Branch, left: list[int]) -> Element:
    """Return a module, folded, or a tensor that stands next to modules."""
    name = branch.name if len(branch.name) <= MAX_NAME else f"{branch.name[:MAX_NAME]}…"
    if [inner for inner, _ in branch.tensors] == [""]:
        tensor = branch.tensors[0][1]
        form = f"{tensor.dtype.name} {shape_in_words(tensor.shape)}, {show_bytes(tensor.nbytes)}"
        return element("div", f"{name}: {form}", style="margin-left:2em")
    copies = f" ({branch.copies} identical)" if branch.copies > 1 else ""
    said = f"{name}{copies}: {branch.parameters:,} parameters, {show_bytes(branch.nbytes)}"
    return folded(said, *_inside(branch, left))


def _inside(branch: Branch, left: list[int]) -> Iterator[Element]:
    for inner in branch.branches:
        left[0] -= 1
        if left[0] <= 0:
            return
        yield _line(inner, left)
    if branch.tensors:
        rows = [
            (name[:MAX_NAME], tensor.dtype.name, shape_in_words(tensor.shape), show_bytes(tensor.nbytes))
            for name, tensor in branch.tensors[:MAX_TENSORS]
        ]
        more = len(branch.tensors) - MAX_TENSORS
        yield table((), rows + ([(f"{more:,} more", "", "", "")] if more > 0 else []))


def summary_html(summary: Summary) -> str:
    """Return a summary as HTML: the facts that `inspect` prints; folded, the modules and other contents."""
    parts = [_head(summary), table((), list(facts_of(summary, False)))]
    if summary.keys:
        said = f"modules: {counted(summary.keys, 'tensor')}, {summary.parameters:,} parameters"
        parts.append(folded(said, *_modules(summary.modules)))
    if summary.other:
        rows = [(row.name, value_in_words(row)) for row in islice(summary.other, MAX_OTHERS)]
        more = len(summary.other) - len(rows)
        parts.append(folded("other contents", table((), rows + ([("…", f"{more:,} more")] if more else []))))
    return html(*parts)


def comparison_html(comparison: Comparison) -> str:
    """Return a comparison as HTML: the verdict, and the rows that `diff` prints."""
    compared = f"{counted(comparison.tensors, 'tensor')} compared"
    verdict = element("p", element("b", f"{comparison.in_words()}: {compared}"))
    items = items_of(comparison)
    rows = rows_of(items)
    if not rows:
        return html(verdict)
    largest = sorted(rows, key=lambda row: -row.relative)[:ROWS]
    head = ("", "name", *figures(items), "")
    more = len(rows) - len(largest)
    end = [element("p", f"and {more:,} more that differ less")] if more else []
    cells = [(row.mark, row.name, *(row.cells or ("", "", "", "")), row.text) for row in largest]
    return html(verdict, folded("what differs", table(head, cells), is_open=True), *end)


# Results of rooms that this one does not need: it shows them, and makes none


def verified_html(verified: Any) -> str:
    """Return what `verify` found as HTML: the verdict, and the problems."""
    read = f"{show_bytes(verified.checked_bytes)} read"
    numbers = sum(verified.non_finite.values())
    read += f", {counted(numbers, 'value')} not finite" * bool(numbers)
    verdict = "ok" if verified.ok else counted(len(verified.problems), "problem")
    rows = [(each.kind, each.name, each.message) for each in verified.problems]
    return html(element("p", element("b", verdict), f": {read}"), *_rows(rows), *_said(verified.hint))


def reloaded_html(loaded: Any) -> str:
    """Return what was loaded into a model as HTML, and by name what was not."""
    covered = loaded.covered
    count = f"{counted(len(loaded.loaded), 'tensor')} loaded"
    count += f", {covered.parameters:,} of {covered.of_parameters:,}"
    stripped = f", without '{loaded.prefix}'" if loaded.prefix else ""
    sides = ("kept", loaded.kept), ("ignored", loaded.ignored), ("without values", loaded.without_values)
    rows = [(what, show_names(names, MAX_ENTRIES)) for what, names in sides if names]
    return html(element("p", element("b", loaded.path), f": {count} parameters{stripped}"), *_rows(rows))


def diagnosis_html(diagnosis: Any) -> str:
    """Return why a checkpoint does not load as HTML: the problems, and the command for each."""
    verdict = "loads" if diagnosis.loads else f"does not load: {diagnosis.fit}"
    rows = [(each.kind, each.message, each.command or "") for each in diagnosis.problems]
    then = diagnosis.then or (None if diagnosis.loads else "no command can fix that")
    return html(element("p", element("b", diagnosis.path), f": {verdict}"), *_rows(rows), *_said(then))


def _rows(rows: Sequence[Sequence[str]]) -> list[Element]:
    shown = [*rows[:MAX_OTHERS], *([("…", f"{len(rows) - MAX_OTHERS:,} more")] if rows[MAX_OTHERS:] else [])]
    return [table((), shown)] if rows else []


def _said(text: str | None) -> list[Element]:
    return [element("p", text)] if text else []


# ---- HTML


def element(tag: str, *children: Child, **attributes: str) -> Element:
    """Return an element; text in it is made `printable`. `class_` is the attribute `class`."""
    made = Element(tag, {name.rstrip("_"): printable(value) for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + printable(child)
        else:
            made.text = (made.text or "") + printable(child)
    return made


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Element:
    """Return a table, its columns aligned to the left."""
    made = element("table")
    if head:
        made.append(element("tr", *(element("th", title, style="text-align:left") for title in head)))
    for row in rows:
        line = SubElement(made, "tr")
        line.extend(element("td", cell, style="text-align:left;vertical-align:top") for cell in row)
    return made


def folded(summary: str, *children: Child, is_open: bool = False) -> Element:
    """Return something that is folded under a line of text."""
    state = {"open": "open"} if is_open else {}
    return element("details", element("summary", summary), *children, style="margin-left:1em", **state)


def html(*elements: Element) -> str:
    """Return elements as HTML, in one `div`."""
    return tostring(element("div", *elements), encoding="unicode", method="html")
