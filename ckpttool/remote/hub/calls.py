"""Uploads by huggingface_hub: silent, in bounded time, their requests counted, their errors made ours."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait as waited
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import CkptToolError, Unreadable
from ..busy import seconds_asked
from ..patience import Patience
from ..store import TRAFFIC
from ..waiting import started
from ..web.transport import PASSING
from .api import About, offline, refused

if TYPE_CHECKING:
    from huggingface_hub import HfApi

AGENT = "ckpttool"  # by which our requests are known among all that go through the library's session
SECRETS = re.compile(r"\?\S*|\bhf_\w+|Bearer \S+")
LONGEST = 10  # times the patience for a byte that an answer may take

T = TypeVar("T")


def client() -> HfApi:
    """Return the library's client, for the endpoint and the token of the user's settings."""
    from huggingface_hub import HfApi, constants

    return HfApi(endpoint=constants.ENDPOINT, library_name=AGENT)


def call(about: About, do: Callable[[], T], patience: Patience) -> T:
    """Return what a call of the library returns; try again where the hub may do better then.

    Not after a failed connection: the library tries again itself (6 times within 24 s and the stalls), or may
    have had its way. Raises Missing, Unreadable.
    """
    for attempt in count(1):
        try:
            with quiet():
                _watch()
                return _bounded(about, do, LONGEST * patience.stall)
        except (CkptToolError, ImportError):
            raise
        except Exception as error:
            # Of the library, of its HTTP client, or from an answer that makes no sense; an upload wraps it.
            cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
            if isinstance(cause, OSError) and cause.filename:  # of this machine
                raise cause from None
            failure, may_pass, wait = _judged(about, cause)
        if not may_pass or attempt >= patience.attempts:
            raise failure from None
        patience.wait(attempt, wait)
    raise AssertionError  # count() has no end


def _bounded(about: About, do: Callable[[], T], seconds: float) -> T:
    """Return what a call returns, unless the hub takes more seconds for one answer."""
    awaited: dict[int, float] = {}  # requests that were sent, and whose answer has not ended: since when

    def watched() -> T:
        _of_thread.awaited = awaited
        return do()

    outcome = started(watched)
    while not waited([outcome], seconds / LONGEST).done:
        if any(time.monotonic() > since + seconds for since in [*awaited.values()]):
            raise Unreadable(about.url, f"the hub's answer does not end within {seconds:g} s")
    return outcome.result()


def _judged(about: About, error: BaseException) -> tuple[CkptToolError, bool, float | None]:
    """Return an error as ours, whether another try may help, and the seconds that the hub asks to wait."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return offline(about), False, None
    if isinstance(error, HfHubHTTPError):
        status, headers = error.response.status_code, error.response.headers
        return refused(about, status, headers), status in PASSING, seconds_asked(headers)
    if isinstance(error, HFValidationError):
        return Unreadable(about.url, f"'{about.name}' is no name of a repository"), False, None
    why = SECRETS.sub("…", str(error).strip().partition("\n")[0]) or type(error).__name__
    if type(error).__module__.startswith("httpx"):
        hint = "check the network, and HF_ENDPOINT"
        return Unreadable(about.url, f"the hub can't be reached: {why}", hint=hint), False, None
    return Unreadable(about.url, f"the hub's answer is not understood: {why}"), False, None


_lock = threading.Lock()
_under_way = 0
_of_thread = threading.local()
_before: tuple[int, bool, bool] = (0, False, False)  # the library's settings while no call is under way


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the library from printing, and from telling the hub, and asking it, what else runs here."""
    global _under_way, _before
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils import logging as loud

    with _lock:
        if not _under_way:
            # A user who set the variable has decided, and the library would warn.
            has_bars = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
            _before = loud.get_verbosity(), has_bars, constants.HF_HUB_DISABLE_TELEMETRY
            loud.set_verbosity(loud.CRITICAL)
            constants.HF_HUB_DISABLE_TELEMETRY = True
            if has_bars:
                disable_progress_bars()
        _under_way += 1
    try:
        yield
    finally:
        with _lock:
            _under_way -= 1
            if not _under_way:
                level, has_bars, constants.HF_HUB_DISABLE_TELEMETRY = _before
                loud.set_verbosity(level)
                if has_bars:
                    enable_progress_bars()


def _watch() -> None:
    """Have the library's session, which a user's own code may share, report our requests."""
    from huggingface_hub.utils import get_session

    with _lock:
        session = get_session()
        hooks = session.event_hooks
        if _begun not in hooks["request"]:
            session.event_hooks = {
                "request": [*hooks["request"], _begun],
                "response": [*hooks["response"], _answered],
            }


def _is_ours(request: Any) -> bool:
    return _under_way > 0 and request.headers.get("user-agent", "").startswith(f"{AGENT}/")


def _begun(request: Any) -> None:
    """Count and bound a request of ours: the session waits for ever. Uploads to storage name no agent."""
    if _is_ours(request) or (_under_way and request.method == "PUT"):
        TRAFFIC.count()
        given, stall = request.extensions.get("timeout", {}), Patience.usual().stall
        request.extensions["timeout"] = {
            kind: given.get(kind) or stall for kind in ("connect", "read", "write", "pool")
        }
        request.extensions["trace"] = partial(_followed, id(request))


def _followed(request: int, event: str, info: object) -> None:
    """Note when an answer is waited for, and when it has ended: httpx bounds only each byte of it."""
    awaited: dict[int, float] = getattr(_of_thread, "awaited", {})
    if event.endswith("receive_response_headers.started"):
        awaited[request] = time.monotonic()
    elif event.endswith("response_closed.started"):
        awaited.pop(request, None)


def _answered(response: Any) -> None:
    """Raise for an answer of which the library would sleep as long as the server likes."""
    if response.status_code in PASSING and _is_ours(response.request):
        from huggingface_hub.utils import hf_raise_for_status

        hf_raise_for_status(response)
