"""Copies a file with nothing but reads and writes of 1 MiB, by as many threads as there are cores, at most 4.

python bare_copy.py SOURCE OUTPUT...

Several outputs get a part each, and are written by turns. What copies in blocks can't be faster than this.
"""

import itertools
import mmap
import os
import sys
import threading

BLOCK = 1 << 20

source = os.open(sys.argv[1], os.O_RDONLY)
os.makedirs(os.path.dirname(sys.argv[2]), exist_ok=True)
outputs = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666) for path in sys.argv[2:]]
size = os.fstat(source).st_size
part = -(-size // len(outputs))
count = -(-part // BLOCK) * len(outputs)
numbers = itertools.count()


def fail(why):
    """End the process; sys.exit would end a thread."""
    os.write(2, why)
    os._exit(1)


def work():
    buffer = memoryview(mmap.mmap(-1, BLOCK))
    while (number := next(numbers)) < count:
        block, output = divmod(number, len(outputs))
        at = block * BLOCK
        view = buffer[: max(min(BLOCK, part - at, size - output * part - at), 0)]
        if os.preadv(source, [view], output * part + at) != len(view):
            fail(b"the source ended early")
        if os.pwrite(outputs[output], view, at) != len(view):
            fail(b"the output is full")


threads = [threading.Thread(target=work) for _ in range(min(len(os.sched_getaffinity(0)), 4) - 1)]
for thread in threads:
    thread.start()
work()
for thread in threads:
    thread.join()
