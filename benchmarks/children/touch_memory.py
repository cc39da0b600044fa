"""Touches memory and frees it by exiting.

python -I -S touch_memory.py BYTES
"""

import mmap
import sys

PIECE = 2 << 20

nbytes = int(sys.argv[1])
memory = mmap.mmap(-1, nbytes)
if hasattr(mmap, "MADV_HUGEPAGE"):
    memory.madvise(mmap.MADV_HUGEPAGE)  # several times faster where available
ones = b"\1" * PIECE
for at in range(0, nbytes - PIECE + 1, PIECE):
    memory[at : at + PIECE] = ones
