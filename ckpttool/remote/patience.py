"""How long a store is waited for, and how often it is asked again."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

# Bytes a second below which an answer counts as stalled, though one byte comes after the other.
SLOWEST = 1000


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of one request."""

    stall: float = 30.0  # seconds without a byte, and for a connection
    attempts: int = 5  # of one request, the first included
    first_wait: float = 0.5  # seconds before the second attempt; each later wait is twice as long
    longest_wait: float = 30.0  # that a server may ask for (Retry-After)

    @classmethod
    def usual(cls) -> Patience:
        """Return the bounds, with the seconds that the user allows: CKPTTOOL_TIMEOUT."""
        try:
            stall = float(os.environ.get("CKPTTOOL_TIMEOUT", ""))
        except ValueError:
            return cls()
        # Who waits shorter for a byte does not want to wait longer between attempts either.
        bounds = {"first_wait": min(0.5, stall / 10), "longest_wait": min(30.0, stall)}
        return cls(stall, **bounds) if stall > 0 else cls()  # type: ignore[arg-type]

    @property
    def longest(self) -> float:
        """Seconds that all attempts may take together, without the bytes that arrive."""
        return self.attempts * (self.stall + self.longest_wait)

    def wait(self, attempt: int, asked: float | None = None) -> None:
        """Sleep before attempt number 1, 2, …: as long as the server asked, or longer each time."""
        # Spread, so that many processes that were refused together do not come back together.
        doubled = self.first_wait * 2 ** (attempt - 1) * (0.75 + random.random() / 2)
        time.sleep(min(doubled if asked is None else asked, self.longest_wait))
