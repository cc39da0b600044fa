"""What the ranks of a process group do together, without leaving one waiting for another.

    from ckpttool import distributed

    folder = distributed.from_rank_zero(choose_folder)  # called on rank 0; every rank gets its value
    state = distributed.broadcast(lambda: torch.load(path))  # rank 0 reads; tensors of any dtype travel
    with distributed.fail_together():                        # fails on every rank if it fails on any
        if distributed.rank() == 0:
            write(folder)
    distributed.compare(model.state_dict(), "before saving") # names the tensor and the rank that differ

Without a process group there is one rank, and everything works there too. Each name imports torch when it is
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy import attributes

if TYPE_CHECKING:
    from . import gather_rows as gather_rows
    from . import randomness as randomness
    from .collectives import RankFailed as RankFailed
    from .collectives import RankLost as RankLost
    from .collectives import agree as agree
    from .collectives import broadcast as broadcast
    from .collectives import broadcast_into as broadcast_into
    from .collectives import compare as compare
    from .collectives import digest as digest
    from .collectives import digest_all as digest_all
    from .collectives import fail_together as fail_together
    from .collectives import from_rank_zero as from_rank_zero
    from .collectives import gather as gather
    from .collectives import rank as rank
    from .collectives import report_once as report_once
    from .collectives import total as total
    from .collectives import world_size as world_size
    from .group import Place as Place
    from .group import find_place as find_place
    from .group import process_group as process_group
    from .heartbeat import watch as watch
    from .plan import Plan as Plan
    from .randomness import Keyed as Keyed
    from .sampler import ExactBatchSampler as ExactBatchSampler
    from .sampler import distribute as distribute
    from .transport import whole as whole
    from .uneven import Uneven as Uneven
    from .uneven import global_mean_loss as global_mean_loss
    from .uneven import leaving_no_trace as leaving_no_trace
    from .uneven import run_dummy_pass as run_dummy_pass
    from .uneven import settle_buckets as settle_buckets
else:
    __getattr__, __dir__, __all__ = attributes(
        __name__,
        {
            "": "gather_rows randomness",
            "collectives": (
                "RankFailed RankLost agree broadcast broadcast_into compare digest digest_all "
                "fail_together from_rank_zero gather rank report_once total world_size"
            ),
            "transport": "whole",
            "group": "Place find_place process_group",
            "heartbeat": "watch",
            "plan": "Plan",
            "randomness": "Keyed",
            "sampler": "ExactBatchSampler distribute",
            "uneven": "leaving_no_trace run_dummy_pass settle_buckets Uneven global_mean_loss",
        },
    )
