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
    lines = [
        f"| command | formats | calls | tried | {' | '.join(HOW)} | old | new | passed |",
        f"|---|---|{'---:|' * (len(HOW) + 5)}",
    ]
    for each in tried:
        ways = [each.held[how] + each.failed[how] for how in HOW]
        cells = [each.calls, each.tried, *ways, each.tried - each.new, each.new]
        held = "all" if not each.failed else f"**{each.held.total()}**"
        counts = " | ".join(f"{cell:,}" for cell in cells)
        lines.append(f"| {each.scenario.command} | {each.scenario.formats} | {counts} | {held} |")
    count, held = totals(tried)
    possible = sum(each.possible for each in tried)
    unreached = sum(each.unreached for each in tried)
    system = f"Python {platform.python_version()}, Linux {platform.release()}"
    lines += [
        "",
        f"{held:,} of {count:,} held, of {possible:,} faults that there are; {unreached:,} met no call: "
        "threads took turns in another order, or one byte has no half. "
        f"{datetime.date.today()}, seed {seed}, {seconds:.0f} s, {system}; calls held by seccomp.",
        "",
    ]
    return "\n".join(lines)


def put_into_docs(made: str) -> None:
    """Write the table into docs/security.md, between its marks."""
    regenerate(PAGE, BEGIN, END, made)
