"""Runs one command, times it, and prints `exit-status seconds cpu-seconds peak` to stdout.

    python -I -S launch.py COMMAND…

A separate process between the harness and the command, as small as Python allows: the kernel counts a
process's peak memory from before its exec, when it still has its parent's pages.
"""

import os
import sys
import time

command = sys.argv[1:]
to_nowhere = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
begin = time.perf_counter()
child = os.posix_spawnp(command[0], command, os.environ, file_actions=to_nowhere)
_, status, usage = os.wait4(child, 0)
seconds = time.perf_counter() - begin
print(os.waitstatus_to_exitcode(status), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
