"""BatchNorm and SyncBatchNorm: states and live layers converted, statistics pooled over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attributes

if TYPE_CHECKING:
    from .convert_modules import kinds_of as kinds_of
    from .convert_modules import pool_over_ranks as pool_over_ranks
    from .convert_modules import to_plain as to_plain
    from .convert_modules import to_sync as to_sync
    from .pooling import Pooled as Pooled
    from .pooling import pool as pool
    from .sync_batchnorm import SyncBatchNorm as SyncBatchNorm
else:
    __getattr__, __dir__, __all__ = attributes(
        __name__,
        {
            "convert_modules": ("kinds_of", "pool_over_ranks", "to_plain", "to_sync"),
            "pooling": ("Pooled", "pool"),
            "sync_batchnorm": ("SyncBatchNorm",),
        },
    )
