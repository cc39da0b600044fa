"""`python -m tests.fault.remote`: let every answer that a command gets from a server go wrong, and look.

It prints a table of what was tried and what held; --write puts it into docs/security.md. Exit 1 if anything
did not hold.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.fault.remote.judge import WAYS, try_all
from tests.fault.remote.scenarios import SCENARIOS
from tests.fault.trials import Tried, run_campaign, totals


def table(tried: Sequence[Tried]) -> list[str]:
    """Return the lines of the table in Markdown, and the totals."""
    lines = ["| command | from, to | requests | faults | done | refused | resumed | passed |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|"]
    for each in tried:
        done, passed = each.held["0"], each.held.total()
        held = "all" if not each.wrong else f"**{passed:,}**"
        counts = f"{each.calls} | {each.tried:,} | {done:,} | {passed - done:,} | {each.noted:,} | {held}"
        lines.append(f"| {each.scenario.command} | {each.scenario.formats} | {counts} |")
    count, passed = totals(tried)
    possible, unreached = sum(each.possible for each in tried), sum(each.unreached for each in tried)
    return [
        *lines,
        f"{passed:,} of {count:,} passed, of {possible:,} possible faults in {len(WAYS)} ways; "
        f"{unreached:,} met no answer, because threads asked in another order. No command took longer than "
        f"{max(each.longest for each in tried):.1f} s, with 0.4 s of patience (CKPTTOOL_TIMEOUT).",
    ]


if __name__ == "__main__":
    marks = "<!-- fault remote -->\n", "<!-- /fault remote -->"
    sys.exit(run_campaign("tests.fault.remote", __doc__, SCENARIOS, try_all, table, marks))
