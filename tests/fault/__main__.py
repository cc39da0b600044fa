"""`python -m tests.fault`: let every system call of the commands that write fail, and examine the files.

It prints a table of what was tried and what held; --write puts it into docs/security.md. Exit 1 if anything
did not hold.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from collections.abc import Sequence

from tests.fault.holes import HOLES
from tests.fault.scenarios import SCENARIOS
from tests.fault.trying import HOW, Tried, totals, try_all, wrongs
from tests.support.campaigns import PAGE, options
from tests.support.generated_page import regenerate

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


def main() -> int:
    parser = options("tests.fault", __doc__, "scenarios")
    parser.add_argument("--most", type=int, default=1 << 30, help="the most faults of each scenario")
    parser.add_argument("--hole", choices=HOLES, default="", help="break something, to see that it is found")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork has no threads but its own
    chosen = [each for each in SCENARIOS if given.only in each.name]
    started, tried = time.monotonic(), []
    how = {"seed": given.seed, "seconds": given.seconds, "most": given.most, "hole": given.hole}
    for each in try_all(chosen, jobs=max(1, given.jobs), **how):
        tried.append(each)
        print(f"{each.scenario.name}: {each.held.total()} of {each.tried} held", file=sys.stderr)
        for wrong in each.wrong:
            print(f"  {wrong}", file=sys.stderr)
    made = table(tried, given.seed, time.monotonic() - started)
    print(made)
    if given.write:
        regenerate(PAGE, BEGIN, END, made)
    count, held = totals(tried)
    return 0 if count == held and not wrongs(tried) and count else 1


if __name__ == "__main__":
    sys.exit(main())
