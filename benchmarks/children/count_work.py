"""Runs a command of ckpttool twice in this process, and prints what the second run took.

python count_work.py ckpttool's arguments

The first run imports what is needed. Prints JSON: calls that read and write, bytes that they moved, and the
peak of Python's memory, all as the kernel and tracemalloc count them.
"""

import json
import sys
import tracemalloc
from contextlib import redirect_stdout
from io import StringIO

from ckpttool.core import cli


def moved() -> dict[str, int]:
    """Return what the kernel has counted of this process."""
    with open("/proc/self/io") as file:
        return {name: int(number) for name, number in (line.split(": ") for line in file)}


def run() -> None:
    with redirect_stdout(StringIO()):
        code = cli.run([*sys.argv[1:], "-q"])
    if code not in (0, 1):
        sys.exit(code)


run()
tracemalloc.start()
before = moved()
run()
after = moved()
_, peak = tracemalloc.get_traced_memory()
took = {name: after[name] - before[name] for name in before}
counts = {"calls": took["syscr"] + took["syscw"], "bytes": took["rchar"] + took["wchar"], "memory": peak}
print(json.dumps(counts))
