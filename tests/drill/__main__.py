"""Kill runs of the trainer in many ways, and see whether each ends in the bits of one that nothing disturbed.

    make drill
    python -m tests.drill --kills 50 --seed 3 --load 4
    python -m tests.drill --only "rank 0" --fresh    # torchrun itself, which starts each rank anew: slower

The table has for each kind of kill how often it was tried, how often the run held, and the median of the
seconds from the kill to the next step of the training. Held means: the last checkpoint has the bits of the
undisturbed run's, and so have the lines of the log, in which every sample of an epoch is counted once; every
checkpoint can be read; no other file and no process is left. Exit code 1 if a run did not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.drill import agents
from tests.drill.trial import KINDS, VARIANTS, Drill, Result, Trial, draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="how many trials (50)")
    parser.add_argument("--seed", type=int, default=0, help="draws ranks, steps and moments (0)")
    parser.add_argument("--load", type=int, default=2, help="processes that keep cores busy (2)")
    parser.add_argument("--only", action="append", help="only kinds whose name has this; may be repeated")
    parser.add_argument("--fresh", action="store_true", help="start every process anew, by torchrun")
    parser.add_argument("--of", choices=VARIANTS, help="of runs with --shard, or on a stream")
    given = parser.parse_args()
    kinds = [kind for kind in KINDS if any(name in kind.name for name in given.only or [""])]
    if given.of == "shard":  # which refuses the virtual ranks of those
        kinds = [kind for kind in kinds if kind.back != "fewer"]
    if not kinds:
        parser.error(f"--only: no such kind; one of: {'; '.join(kind.name for kind in KINDS)}")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the server too: the trainer looks at what its launcher was given
    chance = random.Random(given.seed)
    trials = [draw(kinds[number % len(kinds)], chance) for number in range(given.kills)]
    trials = [replace(trial, flags=VARIANTS.get(given.of, ())) for trial in trials]
    folder, began = Path(tempfile.mkdtemp(prefix="drill-")), time.monotonic()
    load = [agents.spin() for _ in range(given.load)]
    drill, results = Drill(folder, fresh=given.fresh), []
    for number, trial in enumerate(trials, 1):
        results.append(run(drill, trial))
        print(f"{number}/{given.kills} {in_words(results[-1])}", file=sys.stderr, flush=True)
    for process in load:
        process.kill()
    failed = [result for result in results if result.problems]
    print(table(results))
    print(f"{len(results) - len(failed)} of {len(results)} held, in {time.monotonic() - began:.0f} s")
    if failed:
        print(f"see {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def run(drill: Drill, trial: Trial) -> Result:
    """Run a trial; where the run was over before the kill, again with an earlier one."""
    while True:
        result = drill.run(trial)
        missed = trial.kills[result.happened :]
        if not missed or missed[0]["at"] != "any" or missed[0]["after"] < 0.01:
            return result
        trial = replace(trial, kills=tuple({**kill, "after": kill["after"] / 2} for kill in trial.kills))


def in_words(result: Result) -> str:
    ranks, seconds = result.trial.ranks, result.seconds
    steps = ", ".join(f"rank {kill['rank']} at {kill['step'] or 'the start'}" for kill in result.trial.kills)
    end = "; ".join(result.problems) or "held"
    return f"{result.trial.kind.name} ({ranks} ranks, {steps}): {end}" + (
        f", {seconds:.1f} s" if seconds else ""
    )


def table(results: list[Result]) -> str:
    """Return the table by kind of kill."""
    lines = [f"{'kind of kill':<36}  tried   held  seconds to go on"]
    for kind in KINDS:
        of_kind = [result for result in results if result.trial.kind == kind]
        if of_kind:
            held = sum(not result.problems for result in of_kind)
            took = [result.seconds for result in of_kind if result.seconds is not None]
            went_on = f"{median(took):.1f}" if took else "-"
            lines.append(f"{kind.name:<36}  {len(of_kind):>5}  {held:>5}  {went_on:>16}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
