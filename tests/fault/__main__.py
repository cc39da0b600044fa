"""`python -m tests.fault`: let every system call of the commands that write fail, and examine the files.

It prints a table of what was tried and what held; --write puts it into docs/security.md. Exit 1 if anything
did not hold.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence

from tests.fault.holes import HOLES
from tests.fault.scenarios import SCENARIOS
from tests.fault.trials import Tried, run_campaign, totals
from tests.fault.trying import HOW, try_all


def table(tried: Sequence[Tried]) -> list[str]:
    """Return the lines of the table in Markdown, and the totals."""
    lines = ["| command | formats | faults | passed |", "|---|---|---:|---:|"]
    for command in dict.fromkeys(each.scenario.command for each in tried):
        rows = [each for each in tried if each.scenario.command == command]
        count, held = totals(rows)
        formats = "; ".join(each.scenario.formats for each in rows)
        lines.append(f"| {command} | {formats} | {count:,} | {'all' if count == held else f'**{held:,}**'} |")
    count, held = totals(tried)
    counts = [(each.noted, each.possible, each.unreached) for each in tried]
    new, possible, unreached = map(sum, zip(*counts, strict=True))
    ways = ", ".join(f"{sum(each.held[how] + each.failed[how] for each in tried):,} {how}" for how in HOW)
    system = f"Python {platform.python_version()}, Linux {platform.release()}"
    return [
        *lines,
        f"{held:,} of {count:,} passed ({ways}), of {possible:,} possible faults; {unreached:,} met no call, "
        "because threads took turns in another order or one byte has no half. "
        f"Afterwards the output was the new one {new:,} times, else the old one. "
        f"{system}; calls held by seccomp.",
    ]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork has no threads but its own
    marks = "<!-- fault -->\n", "<!-- /fault -->"
    sys.exit(run_campaign("tests.fault", __doc__, SCENARIOS, try_all, table, marks, HOLES))
