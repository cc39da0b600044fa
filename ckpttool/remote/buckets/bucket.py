"""Objects in buckets: s3://, gs:// and az://, over obstore."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import Damaged, Unreadable, already_exists
from ...files.failures import naming
from ...files.threads import cut
from ..patience import SLOWEST, Patience
from ..store import TRAFFIC, Facts, ListedEntry, Missing, Progress, changed
from ..waiting import Unanswered, interruptible
from .errors import named, status_of
from .settings import UPLOADING, BucketSettings, connected, settings_of
from .uploads import BACK, upload

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

PAGE = 1000  # keys that a store lists in one answer
MOST_KEYS = 100_000  # of a folder, that are listed
LEFTOVERS = {  # where parts of an upload go that nobody has ended
    "s3": "aws s3api list-multipart-uploads --bucket {}, then abort-multipart-upload",
    "gs": "a rule AbortIncompleteMultipartUpload of the bucket {} removes them",
    "az": "the container {} drops them after a week",
}
T = TypeVar("T")

BEHIND_ALL = "\U0010ffff"  # sorts behind every name in a folder


def bucket(scheme: str, name: str) -> Bucket:
    """Return a bucket of S3 (`s3`) or Google (`gs`), or a container of Azure (`az`). Asks nothing yet."""
    return Bucket(scheme, name, Patience.usual())


class Bucket:
    """A `Store` over one bucket or container, with the settings and credentials that the environment holds.

    The library repeats requests that fail, within the bounds of Patience, and tells nobody: TRAFFIC counts
    each call once. Its own errors never leave this class.
    """

    commit = ""

    def __init__(self, scheme: str, name: str, patience: Patience) -> None:
        self._scheme, self._name, self._patience = scheme, name, patience

    def shown(self, key: str) -> str:
        return f"{self._scheme}://{self._name}/{key}"

    def head(self, key: str, nbytes: int) -> tuple[bytes, Facts]:
        """Return the first `nbytes` bytes of an object, and its facts: one request; two if it is empty."""
        self._check(key)
        with self._named(key):
            if nbytes:
                try:
                    return self._get(key, {"range": (0, nbytes)}, nbytes)
                except self._library_error as error:
                    if status_of(error) != 416:  # no byte is in any range of an empty object
                        raise
            return b"", self._facts(key)

    def read(self, key: str, facts: Facts, offset: int, nbytes: int) -> bytes:
        """Return bytes of an object: one request. Raises Damaged if it is not that of `facts` any more."""
        from obstore.exceptions import PreconditionError

        self._check(key)
        if not nbytes:
            return b""
        options: GetOptions = {"range": (offset, offset + nbytes)}
        if facts.identity:
            options["if_match"] = f'"{facts.identity}"'
        with self._named(key):
            try:
                data, now = self._get(key, options, nbytes)
            except PreconditionError:
                raise changed(self.shown(key)) from None
            except self._library_error as error:
                if status_of(error) == 416:  # it was longer
                    raise changed(self.shown(key)) from None
                raise
        if now.size != facts.size or facts.identity not in ("", now.identity):
            raise changed(self.shown(key))
        if len(data) != nbytes:
            raise Damaged(self.shown(key), f"{len(data)} bytes came where {nbytes} were asked for")
        return data

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

        before_end = (lambda: None) if replace else (lambda: self._refuse_existing(key))
        with self._named(key):
            try:
                longest = UPLOADING * self._patience.stall
                sent = upload(self._writer, key, path, replace, progress, before_end, longest)
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

    def _rest(self, key: str) -> str:
        """Return in words what may be left of an upload that nobody has ended, and who removes it."""
        return f"parts of {self.shown(key)} may be left, unseen: {LEFTOVERS[self._scheme].format(self._name)}"

    def _is_same(self, key: str, facts: Facts, path: str) -> bool:
        with naming(path, "read"), open(path, "rb") as file:
            for start, nbytes in cut(facts.size, BACK):
                if self.read(key, facts, start, nbytes) != file.read(nbytes):
                    return False
        return True

    def _refuse_existing(self, key: str) -> None:
        with contextlib.suppress(Missing), self._named(key):
            self._facts(key)
            raise already_exists(self.shown(key))

    @cached_property
    def _settings(self) -> BucketSettings:
        return settings_of(self._scheme)

    @cached_property
    def _reader(self) -> ObjectStore:
        return connected(self._scheme, self._name, self._settings, self._patience, writes=False)

    @cached_property
    def _writer(self) -> ObjectStore:
        return connected(self._scheme, self._name, self._settings, self._patience, writes=True)

    @property
    def _library_error(self) -> type[Exception]:
        from obstore.exceptions import BaseError

        return BaseError

    def _named(self, key: str) -> contextlib.AbstractContextManager[None]:
        return named(self.shown(key), self._scheme, is_signed=self._settings.is_signed)

    def _check(self, key: str) -> None:
        """Refuse a key of which the library would make another; what it can't spell it refuses itself."""
        if not key or key.startswith("/") or key.endswith("/"):
            raise Unreadable(self.shown(key), "is the name of a folder, or a key that can't be addressed")

    def _answer(self, key: str, ask: Callable[[], T], nbytes: int = 0) -> T:
        """Return what the library does; `nbytes` are those of the answer that may be many."""
        try:
            return interruptible(ask, self._patience.longest + nbytes / SLOWEST)
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
        """Yield the objects below a folder, but of a sub-folder that fills a page only some."""
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
