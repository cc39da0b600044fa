"""The demo (`make demo`): train on two ranks, strip the prefix, score the result in one process.

It writes to runs/demo* and overwrites the previous demo. It ends in a report that a person can check, and
fails unless the stripped file gives exactly as many correct test images as the training counted, and at
least 95 %.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("runs", "demo")
STRIPPED = Path("runs", "demo.safetensors")
LEAST_ACCURACY = 0.95
LINE = "─" * 80


def main() -> int:
    """Run the demo and return its exit code: 0 if all is well."""
    launcher = ["--standalone", "--nproc-per-node", "2", "train/main.py", "--out", str(FOLDER), "--force"]
    _run("torchrun", [sys.executable, "-m", "torch.distributed.run"], launcher)
    said = _run(
        "ckpttool",
        [sys.executable, "-m", "ckpttool"],
        ["strip-prefix", str(FOLDER / "best.pt"), str(STRIPPED), "--force"],
        capture=True,
    )
    print(said)
    flags = [str(STRIPPED), "--model", "simple-cnn", "--data", "digits", "--json"]
    scored = _run("python", [sys.executable], ["train/evaluate.py", *flags], capture=True)
    lines = (ROOT / FOLDER / "log.jsonl").read_text().splitlines()
    text, passed = report(best_epoch([json.loads(line) for line in lines]), said, json.loads(scored))
    print(text)
    return 0 if passed else 1


def best_epoch(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the log entry of best.pt: the first epoch with the best accuracy."""
    return max((entry for entry in log if "accuracy" in entry), key=lambda entry: entry["accuracy"])


def report(trained: dict[str, Any], said: str, scored: dict[str, Any]) -> tuple[str, bool]:
    """Return the report, at most 80 columns wide, and whether all is well.

    It compares the log's entry of the epoch that best.pt is from with the evaluation of the stripped file.
    """
    same = (trained["correct"], trained["samples"]) == (scored["correct"], scored["samples"])
    enough = trained["accuracy"] >= LEAST_ACCURACY
    lines = [
        "",
        LINE,
        f"DDP on 2 ranks, epoch {trained['epoch']:<3} {_score(trained)}",
        said,
        f"one process, that file   {_score(scored)}",
        LINE,
    ]
    if not same:
        lines.append("FAILED: the stripped file gives a different count than training")
    if not enough:
        lines.append(f"FAILED: less than {LEAST_ACCURACY:.0%} of the test images are correct")
    if same and enough:
        lines.append("passed: the same number of correct test images, before and after")
    return "\n".join(lines), same and enough


def _score(entry: dict[str, Any]) -> str:
    return f"{entry['correct']} of {entry['samples']} test images correct ({entry['accuracy']:.2%})"


def _run(name: str, program: list[str], arguments: list[str], *, capture: bool = False) -> str:
    """Print a command as one would type it, run it, and return its output if `capture`; end if it fails."""
    print(f"\n$ {shlex.join([name, *arguments])}\n", flush=True)
    # torchrun would set this too, and print a long note about it.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [*program, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"FAILED: {name} ended with exit code {done.returncode}")
    return (done.stdout or "").strip()


if __name__ == "__main__":
    sys.exit(main())
