"""Objects in buckets, s3://, gs:// and az://, over obstore: its errors, uploads, and the store itself."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from ...errors import Damaged, FileError, Unreadable, already_exists
from ..files.commit import naming
from ..files.threads import cut
from . import store as stores
from .bucket_settings import HINTS, UPLOADING, BucketSettings, connected, settings_of
from .store import TRAFFIC, Facts, ListedEntry, Missing, Patience, Progress, Unanswered, Unranged

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

# ---- Errors of obstore in one line: its own texts hold pages of Rust, and URLs that may be signed

STATUS = re.compile(r"status code: (\d{3})")
REASONS = (  # a pattern in the text, and its meaning; the first that is found counts
    ("dns error", "there is no such host, or no network"),
    ("Connection refused", "connection refused"),
    ("TimedOut", "no answer in time"),
    ("InvalidCertificate", "the server's certificate is not trusted"),
    ("TunnelUnsuccessful", "the proxy refuses the connection"),
    ("following redirect", "the server redirects in circles"),
    ("BadScheme", "the server redirects to another scheme"),
    ("IncompleteMessage|ConnectionReset|UnexpectedEof", "the connection was cut off"),
    ("tcp connect error", "no connection"),
    ("Wanted range|Requested ", "the server answers with another range than the one that was asked for"),
    ("without LOCATION", "the bucket is in another region"),
    ("MissingSecretAccessKey|MissingAccessKeyId", "the credentials are incomplete"),
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
    code = found[1] if (found := stores.CODE.search(text)) else ""
    if (failure := refused(shown, scheme, is_signed, status, code)) is not None:
        return failure
    if isinstance(error, FileNotFoundError):
        return Missing(shown, "there is no such object")
    if "parse path" in text or "invalid path" in text or isinstance(error, ValueError):
        what = "keys with empty parts, `.`, `..` or control characters can't be addressed"
        return Unreadable(shown, what)
    if "NotPartial" in text or "non-partial" in text:
        return Unranged(shown, "is sent only as a whole: its server ignores ranges")
    reason = next((meaning for signs, meaning in REASONS if re.search(signs, text)), "") or _shortened(text)
    hint = OTHER_HINTS.get(reason) or (HINTS[scheme] if "credentials" in reason else None)
    return Unreadable(shown, reason, hint=hint)


def refused(shown: str, scheme: str, is_signed: bool, status: int, code: str) -> FileError | None:
    """Return the error for a server's answer, by its status and the store's word; None where it has none."""
    answer = f"{status} {code}".strip()
    if code in ("NoSuchBucket", "ContainerNotFound"):
        what = "bucket" if scheme != "az" else "container"
        return Unreadable(shown, f"there is no such {what}")
    if status == 404:
        return Missing(shown, "there is no such object")
    if status in (401, 403) or code in ("ExpiredToken", "InvalidToken"):
        found_some = (
            "the credentials that were found don't allow it" if is_signed else "no credentials were found"
        )
        return Unreadable(shown, f"access is refused ({answer})", hint=f"{found_some}: {HINTS[scheme]}")
    if status in (301, 307, 400) and code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        reason = "the bucket is in another region"
        return Unreadable(shown, reason, hint=OTHER_HINTS[reason])
    if status:
        usual = "the server is busy: try again later" if status in (429, 500, 503) else None
        hint = stores.next_step(code) or usual
        return Unreadable(shown, f"the server answers {answer}", hint=hint)
    return None


def _shortened(text: str) -> str:
    """Return the last words of an error's first line, without its URLs."""
    line = text.splitlines()[0].rsplit(" - ", 1)[-1] if text else "unknown error"
    return re.sub(r"\w+://\S+", "…", re.sub(r"^Generic \w+ error: ", "", line))[:200]


# ---- Uploads: one file to one object, in parts; several are under way, and none stays behind


PART = 8 << 20  # bytes; small, since an upload is aborted when one has arrived
PIECE = 1 << 20  # bytes of a part that are handed over together
AT_ONCE = 6  # parts on their way; the library holds one or two more
MOST_PARTS = 10_000  # of one object, on S3
WHOLE = 16 << 20  # bytes that go out in one request
BACK = 8 << 20  # bytes that are read back at a time
ENDING = 2.0  # seconds that an interrupted upload may take to be aborted
LAST = 3  # times what one part may take: the last parts, and the answer to all


@dataclass(slots=True)
class Sent:
    """An upload: its bytes, the MD5 of each part, and whether one request was enough."""

    size: int = 0
    digests: list[bytes] = field(default_factory=list)
    is_whole: bool = False

    @property
    def etag(self) -> str:
        """The ETag that S3 gives to such an object, unless it is encrypted with a key of KMS."""
        if self.is_whole:
            return self.digests[0].hex()
        together = hashlib.md5(b"".join(self.digests), usedforsecurity=False)
        return f"{together.hexdigest()}-{len(self.digests)}"


class UploadStopped(BaseException):
    """The upload was given up; raised where the library asks for the next bytes."""


def _next(handed_over: SimpleQueue[int | None], seconds: float) -> int | None:
    """Return how many bytes the library takes next. Raises Unanswered where it still waits for a server."""
    try:
        return handed_over.get(timeout=seconds)
    except Empty:
        raise Unanswered(f"{seconds:.3g} s") from None


def _pieces(file: BinaryIO, part: int, sent: Sent) -> Iterator[bytes]:
    """Yield a file in pieces, none over the end of a part, and note each part in `sent`."""
    digest, left = hashlib.md5(usedforsecurity=False), part
    while True:
        with naming(file.name, "read"):
            piece = file.read(min(PIECE, left))
        if piece:
            digest.update(piece)
            sent.size, left = sent.size + len(piece), left - len(piece)
            yield piece
        if not left or (not piece and left < part):
            sent.digests.append(digest.digest())
            digest, left = hashlib.md5(usedforsecurity=False), part
        if not piece:
            return


# ---- The store


MOST_CONTENT = 1 << 28  # bytes of a small object
PAGE = 1000  # keys that a store lists in one answer
MOST_KEYS = 100_000  # of a folder, that are listed
LEFTOVERS = {  # where parts of an upload go that nobody has ended
    "s3": "aws s3api list-multipart-uploads --bucket {}, then abort-multipart-upload",
    "gs": "a rule AbortIncompleteMultipartUpload of the bucket {} removes them",
    "az": "the container {} drops them after a week",
}
T = TypeVar("T")

BEHIND_ALL = "\U0010ffff"  # sorts behind every name in a folder


class Bucket:
    """A `Store` over one bucket or container, with the settings and credentials that the environment holds.

    The library repeats requests that fail, within the bounds of Patience, and tells nobody: TRAFFIC counts
    each call once. Its own errors never leave this class.
    """

    commit = ""

    def __init__(self, scheme: str, name: str, patience: Patience | None = None) -> None:
        """Ask nothing yet. `scheme` is `s3`, `gs` (Google) or `az`, whose bucket is a container."""
        self._scheme, self.name, self.patience = scheme, name, patience or Patience.usual()

    def shown(self, key: str) -> str:
        return f"{self._scheme}://{self.name}/{key}"

    def head(self, key: str, nbytes: int) -> tuple[bytes, Facts]:
        """Return the first `nbytes` bytes of an object, and its facts: one request; two if it is empty."""
        from obstore.exceptions import BaseError

        self._check(key)
        with self._named(key):
            if nbytes:
                try:
                    return self._get(key, {"range": (0, nbytes)}, nbytes)
                except BaseError as error:
                    if status_of(error) != 416:  # no byte is in any range of an empty object
                        raise
            return b"", self._facts(key)

    def read(self, key: str, facts: Facts, offset: int, nbytes: int) -> bytes:
        """Return bytes of an object: one request. Raises Damaged if it is not that of `facts` any more."""
        from obstore.exceptions import BaseError, PreconditionError

        self._check(key)
        if not nbytes:
            return b""
        options: GetOptions = {"range": (offset, offset + nbytes)}
        if facts.identity:
            options["if_match"] = f'"{facts.identity}"'
        with self._named(key):
            try:
                data, now = self._get(key, options, nbytes)
            except BaseError as error:
                if isinstance(error, PreconditionError) or status_of(error) == 416:  # it was longer
                    raise stores.changed(self.shown(key)) from None
                raise
        if now.size != facts.size or facts.identity not in ("", now.identity):
            raise stores.changed(self.shown(key))
        if len(data) != nbytes:
            raise Damaged(self.shown(key), f"{len(data)} bytes came where {nbytes} were asked for")
        return data

    def content(self, key: str) -> bytes | None:
        """Return all of a small object; None where there is none."""
        with contextlib.suppress(Missing):
            return self.head(key, MOST_CONTENT)[0]
        return None

    def put_bytes(self, key: str, data: bytes, *, replace: bool) -> None:
        """Upload a small object. Raises OutputExists where one is there and `replace` is not set."""
        from obstore.exceptions import AlreadyExistsError

        with self._named(key):
            try:
                self._upload_bytes(key, data, replace)
            except AlreadyExistsError:
                raise already_exists(self.shown(key)) from None

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""
        import obstore

        TRAFFIC.count()
        with contextlib.suppress(Missing), self._named(key):
            self._answer(key, lambda: obstore.delete(self._writer, key))

    def entries(self, folder: str) -> list[ListedEntry]:
        """Return what is in a folder. Raises Unreadable if more than MOST_KEYS keys had to be listed."""
        files: dict[str, Facts] = {}
        folders: set[str] = set()
        for object in self._below(folder):
            if object["path"] == folder:  # has a key that ends in a slash, and stands for the folder
                continue
            name, is_below, _ = object["path"].removeprefix(_prefix(folder)).partition("/")
            if is_below:
                folders.add(name)
            else:
                files[name] = _facts(object)
        # So has an empty object of a sub-folder's name: the library takes the slash away.
        return [
            *(ListedEntry(name, facts) for name, facts in files.items() if facts.size or name not in folders),
            *(ListedEntry(name, None) for name in folders),
        ]

    def put(self, files: Mapping[str, str], *, replace: bool, progress: Progress | None = None) -> None:
        """Upload files, each visible whole or not at all, in this order.

        Where nothing may be replaced, all keys are looked at before the first byte goes out. A file of one
        part is then created by a conditional request. One of several parts can't be, since the library
        completes those without a condition: its key is looked at again when the last part is handed over,
        and another writer who creates it while that part travels is overwritten.

        After an error or a signal the parts that arrived are removed. This waits until the library asks for
        the next part, or the last ones have arrived, ENDING seconds at most: it can't be told before. If that
        takes longer, or the process is killed, parts stay until the bucket's own rules remove them; the
        attribute `left` of the error, or of what the signal raised, says which.
        Raises OutputExists, Damaged if what arrived is not what was sent.
        """
        for key in files:
            self._check(key)
            if not replace:
                self._refuse_existing(key)
        for key, path in files.items():
            self._put(key, path, replace, progress or (lambda _: None))

    def _put(self, key: str, path: str, replace: bool, progress: Progress) -> None:
        from obstore.exceptions import AlreadyExistsError

        with self._named(key):
            try:
                sent = self._upload(key, path, replace, progress)
            except AlreadyExistsError:
                raise already_exists(self.shown(key)) from None
            except Unanswered as late:
                what = f"the server's answer to the upload does not end within {late}"
                hint = f"see whether it is there: ckpttool inspect {shlex.quote(self.shown(key))}"
                hint += f"; {self._rest(key)}" if hasattr(late, "unfinished") else ""
                raise Unreadable(self.shown(key), what, hint=hint) from None
            except BaseException as error:
                if getattr(error, "unfinished", False):
                    error.left = self._rest(key)  # type: ignore[attr-defined]
                elif getattr(error, "is_there", False):  # the signal came after the last part
                    error.left = f"{self.shown(key)} was complete, and is there"  # type: ignore[attr-defined]
                elif not isinstance(error, Exception):
                    error.left = "nothing of the upload stays"  # type: ignore[attr-defined]
                raise
            there = self._facts(key)
        # An ETag that is no MD5, as with a key of one's own, says nothing: then every byte is compared.
        if there.size != sent.size or not (there.identity == sent.etag or self._is_same(key, there, path)):
            hint = "upload it again: --force"
            raise Damaged(self.shown(key), f"what arrived is not what was sent of {path}", hint=hint)

    def _upload(self, key: str, path: str, replace: bool, progress: Progress) -> Sent:
        """Upload a file; return what was sent. `progress` is called in this thread.

        Raises Unanswered, and whatever the library does: AlreadyExistsError for a file of one request where
        nothing may be replaced. An error has the attribute `unfinished` if parts may be left.
        """
        with contextlib.ExitStack() as stack:
            with naming(path, "read"):
                file = stack.enter_context(open(path, "rb"))
            if os.fstat(file.fileno()).st_size > WHOLE:
                return self._upload_parts(key, file, replace, progress)
            with naming(path, "read"):
                data = file.read()
        self._upload_bytes(key, data, replace)
        progress(len(data))
        return Sent(len(data), [hashlib.md5(data, usedforsecurity=False).digest()], is_whole=True)

    def _upload_bytes(self, key: str, data: bytes, replace: bool) -> None:
        import obstore

        mode: Literal["overwrite", "create"] = "overwrite" if replace else "create"
        TRAFFIC.count()
        put = partial(obstore.put, self._writer, key, data, mode=mode, use_multipart=False)
        stores.ended(stores.started(put), LAST * self._longest)

    def _upload_parts(self, key: str, file: BinaryIO, replace: bool, progress: Progress) -> Sent:
        import obstore

        sent, stop = Sent(), threading.Event()
        handed_over: SimpleQueue[int | None] = SimpleQueue()
        size = max(PART, -(-os.fstat(file.fileno()).st_size // MOST_PARTS))

        def pieces() -> Iterator[bytes]:
            # An error here, whatever its type, makes the library abort the upload and then raise it.
            for piece in _pieces(file, size, sent):
                if stop.is_set():
                    raise UploadStopped
                yield piece
                handed_over.put(len(piece))
            if not replace:  # asked elsewhere: in this thread the library does not call itself
                stores.started(partial(self._refuse_existing, key)).result()
            if stop.is_set():
                raise UploadStopped
            handed_over.put(None)

        def put() -> None:
            how: Any = {"use_multipart": True, "chunk_size": size, "max_concurrency": AT_ONCE}
            try:
                obstore.put(self._writer, key, pieces(), **how)
            finally:
                handed_over.put(None)

        outcome = stores.started(put)
        try:
            while (nbytes := _next(handed_over, LAST * self._longest)) is not None:
                progress(nbytes)
            stores.ended(outcome, LAST * self._longest)
        except BaseException as error:
            stop.set()
            # Until the library has asked for the next part, and aborted the upload.
            unfinished = bool(wait([outcome], ENDING).not_done)
            error.unfinished = unfinished  # type: ignore[attr-defined]
            error.is_there = not unfinished and outcome.exception() is None  # type: ignore[attr-defined]
            raise
        TRAFFIC.count(len(sent.digests) + 2)
        return sent

    @property
    def _longest(self) -> float:
        """Seconds that one part may take."""
        return UPLOADING * self.patience.stall

    def _rest(self, key: str) -> str:
        """Say what may be left of an unfinished upload, and who removes it."""
        return f"parts of {self.shown(key)} may be left, unseen: {LEFTOVERS[self._scheme].format(self.name)}"

    def _is_same(self, key: str, facts: Facts, path: str) -> bool:
        with naming(path, "read"), open(path, "rb") as file:
            parts = cut(facts.size, BACK)
            return all(self.read(key, facts, start, nbytes) == file.read(nbytes) for start, nbytes in parts)

    def _refuse_existing(self, key: str) -> None:
        with contextlib.suppress(Missing), self._named(key):
            self._facts(key)
            raise already_exists(self.shown(key))

    @cached_property
    def settings(self) -> BucketSettings:
        return settings_of(self._scheme)

    @cached_property
    def _reader(self) -> ObjectStore:
        return connected(self._scheme, self.name, self.settings, self.patience, writes=False)

    @cached_property
    def _writer(self) -> ObjectStore:
        return connected(self._scheme, self.name, self.settings, self.patience, writes=True)

    def _named(self, key: str) -> contextlib.AbstractContextManager[None]:
        return named(self.shown(key), self._scheme, is_signed=self.settings.is_signed)

    def _check(self, key: str) -> None:
        """Refuse a key that the library would silently change."""
        if not key or key.startswith("/") or key.endswith("/"):
            raise Unreadable(self.shown(key), "is the name of a folder, or a key that can't be addressed")

    def _answer(self, key: str, ask: Callable[[], T], nbytes: int = 0) -> T:
        """Return the library's answer, in which many bytes, `nbytes`, are awaited."""
        try:
            return stores.ended(stores.started(ask), self.patience.longest + nbytes / stores.SLOWEST)
        except Unanswered as late:
            raise Unreadable(self.shown(key), f"the server's answer does not end within {late}") from None

    def _get(self, key: str, options: GetOptions, nbytes: int) -> tuple[bytes, Facts]:
        import obstore

        def ask() -> tuple[bytes, Any]:
            got = obstore.get(self._reader, key, options=options)
            return bytes(got.bytes()), got.meta

        TRAFFIC.count()
        data, meta = self._answer(key, ask, nbytes)
        TRAFFIC.count(0, len(data))
        return data, _facts(meta)

    def _facts(self, key: str) -> Facts:
        import obstore

        TRAFFIC.count()
        return _facts(self._answer(key, lambda: obstore.head(self._reader, key)))

    def _below(self, folder: str) -> Iterator[ObjectMeta]:
        """Yield the objects below a folder; of a sub-folder that fills a page, only some."""
        # The library's own listing by folders takes all pages before it returns; this one can be given up.
        seen = 0
        after: str | None = None
        while True:
            for page in self._pages(folder, after):
                seen += len(page)
                if seen > MOST_KEYS:
                    what = f"more than {MOST_KEYS} keys are in it"
                    hint = "name a file, or a folder further down"
                    raise Unreadable(self.shown(_prefix(folder)), what, hint=hint)
                yield from page
                if after := self._behind(page, _prefix(folder)):
                    break
            else:
                return

    def _pages(self, folder: str, after: str | None) -> Iterator[list[ObjectMeta]]:
        import obstore

        TRAFFIC.count()
        with self._named(folder):
            listing = obstore.list(self._reader, folder or None, offset=after, chunk_size=PAGE)
        for number in itertools.count():
            with self._named(folder):
                page = self._answer(_prefix(folder), lambda: next(listing, None))
            if page is None:
                return
            TRAFFIC.count(min(number, 1))
            yield list(page)

    def _behind(self, page: list[ObjectMeta], prefix: str) -> str | None:
        """Return the last possible key of the sub-folder that all of a page is in; None if there is none."""
        keys = [object["path"] for object in page]
        # Azure begins at the first key whatever is asked, and S3 Express lists in no order.
        if len(page) < PAGE or self._scheme == "az" or keys != sorted(keys):
            return None
        name = keys[0].removeprefix(prefix).partition("/")[0]
        is_within = all(key.startswith(f"{prefix}{name}/") for key in keys)
        return f"{prefix}{name}/{BEHIND_ALL}" if is_within else None


def _prefix(folder: str) -> str:
    return f"{folder}/" if folder else ""


def _facts(object: ObjectMeta) -> Facts:
    tag = object["e_tag"] or object["version"] or ""
    # Azure's listing leaves out the quotes that its other answers have. A weak ETag is none.
    return Facts(object["size"], "" if tag.startswith("W/") else tag.strip('"'))
