"""The peak memory of a command in a process of its own, by the kernel's figure."""

from __future__ import annotations

import subprocess
import sys

MOST = 64_000_000

CHILD = """
import os, sys
from ckpttool import cli
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
code = cli.run(sys.argv[1:])
peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))
os.write(out, f'{code} {peak}'.encode())
"""


def peak(*arguments: object) -> int:
    """The largest resident memory of a command that succeeds, in bytes."""
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    code, kilobytes = ran.stdout.split()
    assert code == "0", ran.stderr
    return int(kilobytes) * 1024
