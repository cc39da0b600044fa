"""What a store that is busy says to do next: when to come back, or to ask for less at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime

LONGEST = 86_400  # seconds to which a user may be asked to come back

CODE = re.compile(r"<Code>(\w{1,60})</Code>")  # a store's word for an error, of XML

SLOWER = {  # those that ask for fewer requests, of S3, Google, Azure and what speaks like them
    *("SlowDown", "ServiceUnavailable", "TooManyRequests", "Throttling", "ThrottlingException"),
    *("RequestLimitExceeded", "RequestThrottled", "BandwidthLimitExceeded", "ServerBusy"),
    *("OperationTimedOut", "rateLimitExceeded", "userRateLimitExceeded"),
}


def seconds_asked(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds a server wants to be left alone (RFC 9110, 10.2.3)."""
    told = headers.get("Retry-After", "")
    if re.fullmatch(r"[0-9]{1,9}", told):
        return float(told)
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
    return None


def next_step(code: str = "", seconds: float | None = None) -> str | None:
    """Return as a hint what an answer says to do next, by its code and its Retry-After; None if nothing."""
    seconds = seconds if seconds and seconds <= LONGEST else None
    if code in SLOWER and seconds:
        return f"the store asks for fewer requests ({code}), in {seconds:.0f} s: run this alone then"
    if code in SLOWER:
        return f"the store asks for fewer requests ({code}): wait a minute, and run fewer commands at a time"
    if seconds:
        return f"the server asks to be left alone for {seconds:.0f} s: run the command again after that"
    return None
