"""BatchNorm and SyncBatchNorm: states and live layers converted, statistics pooled over ranks.

    from ckpttool import batchnorm

    batchnorm.to_sync(model)                                        # in place, and trains on a CPU too
    batchnorm.to_plain(model)                                       # back, exactly
    statistics = batchnorm.RunningStatistics(model)                 # exact over ranks, with plain layers
    batchnorm.pool([mean0, mean1], [var0, var1], counts=[64, 32])   # two ranks' statistics as one

`convert_states` and `pool_files` do the same to checkpoints without torch. Importing this package imports
nothing else; only `pool` works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy import attributes

if TYPE_CHECKING:
    from .pool_files import Pooled as Pooled
    from .pool_files import pool as pool
    from .running_statistics import RunningStatistics as RunningStatistics
    from .running_statistics import pool_over_ranks as pool_over_ranks
    from .sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from .sync_batchnorm import kinds_of as kinds_of
    from .sync_batchnorm import to_plain as to_plain
    from .sync_batchnorm import to_sync as to_sync
else:
    __getattr__, __dir__, __all__ = attributes(
        __name__,
        {
            "sync_batchnorm": "kinds_of to_plain to_sync SyncBatchNorm",
            "pool_files": "Pooled pool",
            "running_statistics": "RunningStatistics pool_over_ranks",
        },
    )
