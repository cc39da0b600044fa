"""ckpttool inspect"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from . import options
from .console import printable, show_bytes, show_names

if TYPE_CHECKING:
    from ..summary import OtherRow, Summary, TensorRow


@click.command("inspect")
@options.file_argument
@options.state_option
@options.reading
def command(file: str, state: str | None, **given: Any) -> None:
    """Show what is in FILE, without loading it or running anything it names.

    \b
    Example:
      ckpttool inspect last.pt
    """
    from .. import formats
    from ..summary import summarize

    console = options.console(given)
    with formats.open(file) as checkpoint:
        summary = summarize(checkpoint, state)
    # Of a hundred thousand tensors either form takes a while; only one is shown.
    text = "" if console.json else "\n".join(_page(summary))
    console.result(text, _fields(summary) if console.json else {})


def _fields(summary: Summary) -> dict[str, object]:
    return {
        "path": summary.path,
        "format": summary.format,
        "bytes": summary.nbytes,
        "state": summary.state,
        "other_states": summary.other_states,
        "keys": summary.keys,
        "parameters": summary.parameters,
        "prefixes": [asdict(prefix) for prefix in summary.prefixes],
        "tensors": [asdict(row) for row in summary.tensors],
        "other": [_other_fields(row) for row in summary.other],
        "unknown": summary.unknown,
        "metadata": summary.metadata,
    }


def _other_fields(row: OtherRow) -> dict[str, object]:
    fields: dict[str, object] = {"name": row.name, "type": row.type}
    if row.has_value:
        fields["value"] = row.value
    if row.size is not None:
        fields["size"] = row.size
    return fields


def _page(summary: Summary) -> Iterator[str]:
    yield f"{printable(summary.path)}: {summary.format}, {show_bytes(summary.nbytes)}"
    yield from (f"  {line}" for line in _facts(summary))
    if summary.tensors:
        yield ""
        yield from _table(summary.tensors)
    if summary.other:
        yield ""
        yield "other contents"
        width = min(max(len(printable(row.name)) for row in summary.other), 48)
        yield from (f"  {printable(row.name):{width}}  {_value(row)}" for row in summary.other)


def _facts(summary: Summary) -> Iterator[str]:
    if summary.state is None:
        yield "state       none: no dict of tensors in it"
    else:
        where = f"'{printable(summary.state)}'" if summary.state else "the file itself"
        dtypes = Counter(row.dtype for row in summary.tensors)
        kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        yield f"state       {where}: {summary.keys} tensors, {summary.parameters:,} parameters"
        yield f"dtypes      {kinds or 'none'}"
    for name in summary.other_states:
        yield f"also        --state {printable(name) or repr('')}"
    for found in summary.prefixes:
        yield f"prefix      '{found.prefix}' on {found.keys} of {found.of} keys ({found.wrapper})"
    for name, value in summary.metadata.items():
        yield f"metadata    {printable(name)}: {printable(value)[:200]}"
    if summary.unknown:
        yield f"unknown     {show_names(summary.unknown, 6)} (kept inert, never imported)"


def _table(rows: tuple[TensorRow, ...]) -> Iterator[str]:
    cells = [(printable(r.name), r.dtype, _shape(r.shape), show_bytes(r.nbytes)) for r in rows]
    widths = [max(len(cell[i]) for cell in cells) for i in range(4)]
    for (name, dtype, shape, size), row in zip(cells, rows, strict=True):
        shared = f"  shares {printable(row.shared_with)}" if row.shared_with else ""
        line = f"{name:{widths[0]}}  {dtype:{widths[1]}}  {shape:>{widths[2]}}  {size:>{widths[3]}}{shared}"
        yield line.rstrip()


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _value(row: OtherRow) -> str:
    if row.has_value:
        text = row.value if isinstance(row.value, str) else str(row.value)
        return printable(text)[:200] if text else "''"
    return printable(row.type) + (f" of {row.size}" if row.size is not None else "")
