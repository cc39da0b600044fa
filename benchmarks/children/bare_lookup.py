"""Looks up each byte of a file in one table of 16 bits, with as many threads as there are cores.

python bare_lookup.py SOURCE OUTPUT

What turns codes into numbers with numpy, one lookup an element, can't be faster than this.
"""

import itertools
import os
import sys
import threading

import numpy as np

PIECE, TILE = 2 << 20, 1 << 16  # bytes that are written, and codes that are looked up, together
WRITTEN = 1 << 17

source = os.open(sys.argv[1], os.O_RDONLY)
output = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
size = os.fstat(source).st_size
starts = itertools.count(0, PIECE)
table = np.arange(256, dtype=np.uint16)
writing = threading.Lock()


def work():
    codes, numbers = np.empty(PIECE, np.uint8), np.empty(PIECE, np.uint16)
    while (start := next(starts)) < size:
        count = min(PIECE, size - start)
        os.preadv(source, [codes[:count]], start)
        for at in range(0, count, TILE):
            tile = slice(at, min(at + TILE, count))
            table.take(codes[tile], out=numbers[tile], mode="clip")
        values = memoryview(numbers[:count]).cast("B")
        with writing:
            for at in range(0, len(values), WRITTEN):
                os.pwrite(output, values[at : at + WRITTEN], 2 * start + at)


threads = [threading.Thread(target=work) for _ in range(len(os.sched_getaffinity(0)) - 1)]
for thread in threads:
    thread.start()
work()
for thread in threads:
    thread.join()
