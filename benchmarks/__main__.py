"""python -m benchmarks"""

from __future__ import annotations

import sys

from . import (
    batchnorm,
    comparing,
    convert,
    deltas,
    dequantizing,
    gathering,
    looking,
    many_tensors,
    merging,
    reloading,
    sharing,
    startup,
    strip_prefix,
)
from .program import main

BENCHMARKS = [
    strip_prefix.BENCHMARK,
    *convert.BENCHMARKS,
    *dequantizing.BENCHMARKS,
    *deltas.BENCHMARKS,
    *merging.BENCHMARKS,
    *looking.BENCHMARKS,
    *many_tensors.BENCHMARKS,
    *comparing.BENCHMARKS,
    batchnorm.BENCHMARK,
    reloading.BENCHMARK,
    *gathering.BENCHMARKS,
    *sharing.BENCHMARKS,
    startup.BENCHMARK,
]

if __name__ == "__main__":
    sys.exit(main(BENCHMARKS))
