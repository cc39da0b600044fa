"""The table of faults: per command and format how many were tried, in which ways, and how many held."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence

from tests.fault.trying import HOW, Tried, totals
from tests.support.generated_page import regenerate
from tests.support.running import ROOT

PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- fault -->\n", "<!-- /fault -->"


def table(tried: Sequence[Tried], seed: int, seconds: float) -> str:
    """Return the table in Markdown, with the date, the seed and the totals below it."""
    lines = ["| command | formats | faults | passed |", "|---|---|---:|---:|"]
    for command in dict.fromkeys(each.scenario.command for each in tried):
        rows = [each for each in tried if each.scenario.command == command]
        count, held = totals(rows)
        formats = "; ".join(each.scenario.formats for each in rows)
        lines.append(f"| {command} | {formats} | {count:,} | {'all' if count == held else f'**{held:,}**'} |")
    count, held = totals(tried)
    new = sum(each.new for each in tried)
    possible = sum(each.possible for each in tried)
    unreached = sum(each.unreached for each in tried)
    ways = ", ".join(f"{sum(each.held[how] + each.failed[how] for each in tried):,} {how}" for how in HOW)
    system = f"Python {platform.python_version()}, Linux {platform.release()}"
    lines += [
        "",
        f"{held:,} of {count:,} passed ({ways}), of {possible:,} possible faults; {unreached:,} met no call, "
        "because threads took turns in another order or one byte has no half. "
        f"Afterwards the output was the new one {new:,} times, else the old one. "
        f"{datetime.date.today()}, seed {seed}, {seconds:.0f} s, {system}; calls held by seccomp.",
        "",
    ]
    return "\n".join(lines)


def put_into_docs(made: str) -> None:
    """Write the table into docs/security.md, between its marks."""
    regenerate(PAGE, BEGIN, END, made)
