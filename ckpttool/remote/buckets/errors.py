"""What obstore's errors mean, in one line: its own hold pages of Rust, and URLs that may be signed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ...errors import FileError, Unreadable
from ..busy import CODE, next_step
from ..store import Missing, Unranged
from .settings import HINTS

# An answer that is no success: its status.
STATUS = re.compile(r"status code: (\d{3})")
REASONS = (  # what stands in the text -> what it means
    ("dns error", "there is no such host, or no network"),
    ("Connection refused", "connection refused"),
    ("TimedOut", "no answer in time"),
    ("InvalidCertificate", "the server's certificate is not trusted"),
    ("TunnelUnsuccessful", "the proxy refuses the connection"),
    ("following redirect", "the server redirects in circles"),
    ("BadScheme", "the server redirects to another scheme"),
    ("IncompleteMessage", "the connection was cut off"),
    ("ConnectionReset", "the connection was cut off"),
    ("UnexpectedEof", "the connection was cut off"),
    ("tcp connect error", "no connection"),
    ("Wanted range", "the server answers with another range than the one that was asked for"),
    ("Requested ", "the server answers with another range than the one that was asked for"),
    ("without LOCATION", "the bucket is in another region"),
    ("MissingSecretAccessKey", "the credentials are incomplete"),
    ("MissingAccessKeyId", "the credentials are incomplete"),
    ("TokenRequest", "the credentials could not be used"),
)
OTHER_HINTS = {
    "the bucket is in another region": "set AWS_REGION to the bucket's region",
    "the server's certificate is not trusted": "set SSL_CERT_FILE to the authority's certificate",
    "there is no such host, or no network": "is the endpoint or the account spelled right?",
}


@contextlib.contextmanager
def named(shown: str, scheme: str, *, is_signed: bool) -> Iterator[None]:
    """Turn obstore's errors in the block into Missing, Unranged or Unreadable, which name the object."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, FileNotFoundError, ValueError) as error:
        failure = _translated(error, shown, scheme, is_signed)
    else:
        return
    raise failure  # outside: as its context too the error would show what this leaves out


def status_of(error: BaseException) -> int:
    """Return the HTTP status that an error of obstore's comes from; 0 if none."""
    found = STATUS.search(str(error))
    return int(found[1]) if found else 0


def _translated(error: Exception, shown: str, scheme: str, is_signed: bool) -> FileError:
    text, status = str(error), status_of(error)
    code = found[1] if (found := CODE.search(text)) else ""
    answer = f"{status} {code}".strip()
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return Unreadable(
            shown, "there is no such bucket" if scheme != "az" else "there is no such container"
        )
    if status == 404 or isinstance(error, FileNotFoundError):
        return Missing(shown, "there is no such object")
    if status in (401, 403) or code in ("ExpiredToken", "InvalidToken"):
        return Unreadable(shown, f"access is refused ({answer})", hint=_credentials(scheme, is_signed))
    if status in (301, 307, 400) and code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        reason = "the bucket is in another region"
        return Unreadable(shown, reason, hint=OTHER_HINTS[reason])
    if status:
        usual = "the server is busy: try again later" if status in (429, 500, 503) else None
        hint = next_step(code) or usual
        return Unreadable(shown, f"the server answers {answer}", hint=hint)
    if "parse path" in text or "invalid path" in text or isinstance(error, ValueError):
        what = "keys with empty parts, `.`, `..` or control characters can't be addressed"
        return Unreadable(shown, what)
    if "NotPartial" in text or "non-partial" in text:
        return Unranged(shown, "is sent only as a whole: its server ignores ranges")
    reason = next((meaning for sign, meaning in REASONS if sign in text), "") or _shortened(text)
    hint = OTHER_HINTS.get(reason) or (HINTS[scheme] if "credentials" in reason else None)
    return Unreadable(shown, reason, hint=hint)


def _credentials(scheme: str, is_signed: bool) -> str:
    if is_signed:
        return f"the credentials that were found don't allow it: {HINTS[scheme]}"
    return f"no credentials were found: {HINTS[scheme]}"


def _shortened(text: str) -> str:
    """Return the last words of an error's first line, without its URLs."""
    line = text.splitlines()[0].rsplit(" - ", 1)[-1] if text else "unknown error"
    return re.sub(r"\w+://\S+", "…", re.sub(r"^Generic \w+ error: ", "", line))[:200]
