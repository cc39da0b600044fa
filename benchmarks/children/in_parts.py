"""Writes an output in parts at once, each by a process that has a link of its own.

python in_parts.py COUNT COMMAND…

The server tells links by the token; one process takes a link too, but no part.
"""

import os
import subprocess
import sys

count, command = int(sys.argv[1]), sys.argv[2:]
running = [
    subprocess.Popen(
        [*command, *(["--part", f"{number}/{count}"] if count > 1 else [])],
        env={**os.environ, "HF_TOKEN": f"link-{number}"},
    )
    for number in range(1, count + 1)
]
sys.exit(max(each.wait() for each in running))
