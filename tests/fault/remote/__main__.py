"""`python -m tests.fault.remote`: let every answer that a command gets from a server go wrong, and look.

It prints a table of what was tried and what held; --write puts it into docs/security.md. Exit 1 if anything
did not hold.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence

from tests.fault.remote.scenarios import SCENARIOS
from tests.fault.remote.trying import WAYS, Tried, try_all
from tests.support.campaigns import PAGE, options
from tests.support.generated_page import regenerate

BEGIN, END = "<!-- fault remote -->\n", "<!-- /fault remote -->"


def table(tried: Sequence[Tried], seed: int, seconds: float) -> str:
    """Return the table in Markdown, with the totals below it."""
    lines = ["| command | from, to | requests | faults | done | refused | resumed | passed |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|"]
    for each in tried:
        done, passed = each.ended[0], each.ended.total()
        refused = passed - done
        held = "all" if not each.wrong else f"**{passed:,}**"
        counts = f"{each.requests} | {each.tried:,} | {done:,} | {refused:,} | {each.resumed:,} | {held}"
        lines.append(f"| {each.scenario.command} | {each.scenario.formats} | {counts} |")
    count, passed = sum(each.tried for each in tried), sum(each.ended.total() for each in tried)
    possible, unreached = sum(each.possible for each in tried), sum(each.unreached for each in tried)
    longest = max(each.longest for each in tried)
    lines += [
        "",
        f"{passed:,} of {count:,} passed, of {possible:,} possible faults in {len(WAYS)} ways; "
        f"{unreached:,} met no answer, because threads asked in another order. No command took longer than "
        f"{longest:.1f} s, with 0.4 s of patience (CKPTTOOL_TIMEOUT). "
        f"{datetime.date.today()}, seed {seed}, {seconds:.0f} s.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = options("tests.fault.remote", __doc__, "scenarios")
    parser.add_argument("--most", type=int, default=1 << 30, help="the most faults of each scenario")
    given = parser.parse_args()
    chosen = [each for each in SCENARIOS if given.only in each.name]
    started, tried = time.monotonic(), []
    how = {"seed": given.seed, "seconds": given.seconds, "most": given.most}
    for each in try_all(chosen, jobs=max(1, given.jobs), **how):
        tried.append(each)
        held = f"{each.ended.total()} of {each.tried} held, {each.longest:.1f} s at most"
        print(f"{each.scenario.name}: {held}", *each.wrong, sep="\n  ", file=sys.stderr, flush=True)
    made = table(tried, given.seed, time.monotonic() - started)
    print(made)
    if given.write:
        regenerate(PAGE, BEGIN, END, made)
    return 0 if tried and all(each.tried and not each.wrong for each in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
