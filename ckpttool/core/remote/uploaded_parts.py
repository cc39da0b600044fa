"""Outputs in a bucket that several processes write: numbered parts of one upload, and records beside it.

Each process stages its own stretch on its disk, a whole number of the upload's parts, and sends those of
which it knows every byte. Where a checksum of what two processes write stands, neither knows it: whoever
finds all records makes those parts, and completes the upload. So nothing depends on locks or clocks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import posixpath
import shlex
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, BinaryIO, NamedTuple

from ...errors import Damaged, OutputExists, Unreadable, UsageFault, already_exists
from ..files.crc import Rows, crc32
from ..files.meeting import FOLDER, PLAN, Meeting, MeetingFolder, folder_of, record_in
from ..files.parts import UPLOADS, OutputPart, OutputParts
from ..files.resuming import Written, begin_of
from ..files.threads import Progress, cut, in_order
from ..system import pread
from .buckets import AT_ONCE, Bucket, Sent
from .multipart import Multipart, SentPart, UploadGone, part_size
from .places import LAST, visit
from .store import Missing
from .urls import is_url, place_of

SENT, WHOLE = "sent", "whole.json"  # in a record: ETags; of all parts, once they are known
CHECKED = 8 << 20  # bytes of what is staged that are read back at a time


def meeting_at(path: str) -> Meeting:
    """Return where the parts of an output meet that a path or URL names."""
    return MeetingBucket(path, "") if is_url(path) else MeetingFolder(path)


class MeetingBucket:
    """A folder of records beside the output, in its bucket."""

    def __init__(self, url: str, staging: str) -> None:
        """Ask nothing yet; `staging` is a folder of this machine. UsageFault unless the bucket is S3's."""
        if place_of(url).scheme != "s3":
            raise UsageFault(f"{url}: has no parts to finish: folders have, and buckets of S3 (s3://)")
        with visit() as now:
            store, key = now.store(url)
        assert isinstance(store, Bucket)
        self.bucket, self.key, self.staging = store, key.rstrip("/"), staging
        above, name = posixpath.split(self.key)
        self._folder, self._is_of_folder = posixpath.join(above, f".{begin_of(name)}{FOLDER}"), url[-1] == "/"
        self.shown = store.shown(self._folder)

    @property
    def again(self) -> str:
        return f"begin again: aws s3 rm --recursive {shlex.quote(self.shown)}/"

    def read(self, name: str) -> bytes | None:
        return self.bucket.content(posixpath.join(self._folder, name))

    def write(self, name: str, record: object, *, exclusive: bool = False) -> None:
        with contextlib.suppress(OutputExists):
            self.bucket.put_bytes(
                posixpath.join(self._folder, name), json.dumps(record).encode(), replace=not exclusive
            )

    def is_in_place(self) -> bool:
        if self._is_of_folder:
            own = posixpath.basename(self._folder)
            return any(entry.name != own for entry in self.bucket.entries(self.key))
        with contextlib.suppress(Missing):
            self.bucket.head(self.key, 0)
            return True
        return False

    def finishing(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)  # two that finish at once do the same

    def remove(self) -> None:
        names = [entry.name for entry in self.bucket.entries(self._folder)]
        for name in sorted(names, key=lambda name: name != PLAN):
            self.bucket.remove(posixpath.join(self._folder, name))


class UploadPiece(NamedTuple):
    """A numbered part of the upload of one file."""

    name: str
    number: int
    begin: int
    end: int

    def touches(self, stretch: range) -> bool:
        return stretch.start < self.end and self.begin < stretch.stop


def _pieces_of(name: str, size: int) -> Iterator[UploadPiece]:
    step = part_size(size)
    for number, begin in enumerate(range(0, max(size, 1), step), 1):
        yield UploadPiece(name, number, begin, min(begin + step, size))


class StagedStretches(Written):
    """What a process writes of a staged file: whatever reaches into its own stretches."""

    def __init__(
        self, attempt: OutputParts, file: BinaryIO, before: Rows, own: Sequence[range], *, has_rest: bool
    ) -> None:
        noted = range(0) if has_rest or not own else range(own[0].start, own[-1].stop)
        super().__init__(attempt, file, before, noted, has_rest=has_rest)
        self.has_small, self._own, self._starts = True, own, [each.start for each in own]
        self.late: list[range] = []  # what tells of a CRC-32 that another process will know

    def wants(self, place: int, position: int, nbytes: int) -> bool:
        is_known = not self.has_rest or self.has(place, position, nbytes)
        return is_known and self._reaches(position, nbytes)

    def sees(self, position: int, nbytes: int) -> bool:
        if self.has_rest or not nbytes:
            return True
        return any(own.start <= position and position + nbytes <= own.stop for own in self._own)

    def takes(self, position: int, nbytes: int, *, is_guess: bool) -> bool:
        if is_guess and not self.has_rest:
            self.late.append(range(position, position + nbytes))
            return False
        return self.has_rest or self._reaches(position, nbytes)

    def _reaches(self, position: int, nbytes: int) -> bool:
        number = bisect_right(self._starts, position + max(nbytes, 1) - 1) - 1
        return number >= 0 and position < self._own[number].stop


class UploadedParts(OutputParts):
    """The place where the parts of one output meet, in a bucket."""

    def __init__(
        self,
        url: str,
        local: str,
        part: OutputPart,
        plan: Mapping[str, Any],
        sizes: Mapping[str, int],
        words: Sequence[str] = (),
        *,
        force: bool = False,
        progress: Progress | None = None,
        expect: Progress | None = None,
    ) -> None:
        """Find the place, or make it, as `OutputParts` does.

        Args:
            url: the output.
            local: where it would be written on this machine, in a folder of its own.
            part: as there, like `plan`, `sizes` and `words`.
            force: the output may replace another.
            progress: gets the bytes of each part that was sent.
            expect: is told before how many there are.
        """
        self._bucket = MeetingBucket(url, folder_of(local))
        self._multipart, self._force = Multipart(self._bucket.bucket), force
        self._progress, self._expect = progress or (lambda _: None), expect or (lambda _: None)
        self._etags: dict[str, dict[int, str]] = defaultdict(dict)
        self._missing: list[UploadPiece] = []
        self._whole, self._has_finished = set[str](), False
        super().__init__(url, part, plan, sizes, words, self._bucket)
        uploads = self._agreed.get(UPLOADS)
        if not isinstance(uploads, dict) or uploads.keys() != sizes.keys():
            raise Unreadable(self._bucket.shown, "is not the plan of an upload", hint=self._bucket.again)
        self._uploads: dict[str, str] = uploads

    def _key(self, name: str) -> str:
        return posixpath.join(self._bucket.key, name) if name else self._bucket.key

    def _begin_plan(self, plan: dict[str, Any]) -> None:
        """Begin the uploads, and note the plan with their ids, unless another part has just noted one."""
        if not self._force and self._bucket.is_in_place():
            raise already_exists(self._path)
        begin = [partial(self._multipart.begin, self._key(name)) for name in self._sizes]
        uploads = dict(zip(self._sizes, in_order(begin, AT_ONCE), strict=True))
        super()._begin_plan({**plan, UPLOADS: uploads})
        if (record_in(self._bucket, PLAN) or {}).get(UPLOADS) != uploads:
            for name, upload in uploads.items():
                self._multipart.abort(self._key(name), upload)

    def _stage(self) -> None:
        self._make_staged()  # anew in each process: what others have written is in the bucket

    def require_place(self, *, force: bool) -> None:
        """Raise OutputExists if something is there, and no part can have put it there."""
        if not force and self.waiting() and self._bucket.is_in_place():
            raise already_exists(self._path)

    def count(self, nbytes: int) -> None:
        """Do nothing: there is a record only of what has arrived."""

    @cached_property
    def _pieces(self) -> dict[str, list[UploadPiece]]:
        """The pieces of each file."""
        return {name: [*_pieces_of(name, size)] for name, size in self._sizes.items()}

    @cached_property
    def _own(self) -> dict[str, list[UploadPiece]]:
        """What this process sends: of all pieces in a row, those that begin in its window."""
        window, at = self.part.window(max(sum(self._sizes.values()), 1)), 0
        own: dict[str, list[UploadPiece]] = {name: [] for name in self._sizes}
        for name, pieces in self._pieces.items():
            own[name] = [piece for piece in pieces if at + piece.begin in window]
            at += self._sizes[name]
        return own

    def written(self, file: BinaryIO) -> Written:
        """Return what this process writes of an open staged file."""
        name = "" if "" in self._sizes else os.path.basename(file.name)
        if self._all is not None:
            own = [range(each.begin, each.end) for each in self._missing if each.name == name]
            return StagedStretches(self, file, self._rows_of_all(name), own, has_rest=True)
        mine = self._own[name]
        own = [range(mine[0].begin, mine[-1].end)] if mine else []
        self._files[name] = StagedStretches(self, file, {}, own, has_rest=False)
        return self._files[name]

    def note(self, **facts: object) -> None:
        """Send what this process knows wholly, and record it."""
        files = {name: rows for name, written in self._files.items() if (rows := written.rows)}
        for name, rows in files.items():
            self._require_as_written(os.path.join(self.place, name) if name else self.place, rows)
        late = {name: written.late for name, written in self._files.items()}  # type: ignore[attr-defined]
        own = itertools.chain.from_iterable(self._own.values())
        known = [piece for piece in own if not any(map(piece.touches, late[piece.name]))]
        sent = self._send(known, self.place)
        self._write_record({"plan": self._plan, "files": files, "seen": self._watched(), SENT: sent, **facts})

    def _require_as_written(self, path: str, rows: Rows) -> None:
        """Read a staged file back. Raises Damaged where its bytes are not those that were computed."""
        with open(path, "rb") as file:
            for begin, nbytes, crc in (row for of_copy in rows.values() for row in of_copy):
                found = 0
                for at, size in cut(nbytes, CHECKED):
                    found = crc32(pread(file.fileno(), size, begin + at), found)
                if found != crc:
                    raise Damaged(path, "does not read back as written", hint="try another disk: TMPDIR=…")

    def _send(self, pieces: Sequence[UploadPiece], place: str) -> dict[str, dict[int, str]]:
        """Send pieces of the files at a place; return their ETags by name and number."""
        sent: dict[str, dict[int, str]] = defaultdict(dict)
        self._expect(sum(piece.end - piece.begin for piece in pieces))
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context(open(os.path.join(place, name) if name else place, "rb")).fileno()
                for name in {piece.name for piece in pieces}
            }

            def send(piece: UploadPiece) -> tuple[UploadPiece, str]:
                data = pread(files[piece.name], piece.end - piece.begin, piece.begin)
                key, upload = self._key(piece.name), self._uploads[piece.name]
                return piece, self._multipart.send(key, upload, piece.number, data)

            for piece, etag in in_order((partial(send, piece) for piece in pieces), AT_ONCE):
                sent[piece.name][piece.number] = etag
                self._progress(piece.end - piece.begin)
        return sent

    @contextlib.contextmanager
    def unless_finished(self) -> Iterator[None]:
        """Go on where another process has completed the upload; if it was aborted, have all begin again."""
        try:
            yield
        except UploadGone as gone:
            shown = {self._bucket.bucket.shown(self._key(name)): name for name in self._uploads}
            if self.is_finished or self._is_whole(shown[gone.path]):
                return
            self._abandon()
            what = "its unfinished upload is gone, aborted by hand or by a rule of the bucket"
            raise Unreadable(self._path, what, hint="write all of its parts again") from None

    @contextlib.contextmanager
    def finishing(self) -> Iterator[bool]:
        """Look which parts of the uploads are missing; yield False where another process has finished."""
        with super().finishing() as is_mine:
            if is_mine:
                is_mine = False
                with self.unless_finished():
                    self._look()
                    is_mine = True
            yield is_mine

    def _look(self) -> None:
        """Find which pieces have arrived as they were recorded; the others are made and sent again."""
        for name, upload in self._uploads.items():
            try:
                there = self._multipart.sent(self._key(name), upload)
            except UploadGone:
                if not self._is_whole(name):
                    raise
                self._whole.add(name)  # a process that finished was killed behind it
                continue
            known: dict[str, str] = {}
            for record in self._all or ():
                with contextlib.suppress(
                    AttributeError, KeyError, TypeError, ValueError
                ):  # it makes no sense
                    known |= record[SENT].get(name, {})
            for piece in self._pieces[name]:
                etag = known.get(str(piece.number), "")
                if there.get(piece.number) == SentPart(etag, piece.end - piece.begin):
                    self._etags[name][piece.number] = etag
                else:
                    self._missing.append(piece)

    def put_in_place(self, local: str) -> bool:
        """Complete the uploads, then put what else is in the local folder; return whether it was this one."""
        with self.unless_finished():
            self._finish(local)
            self._has_finished = True
        return self._has_finished

    def _finish(self, local: str) -> None:
        for name, etags in self._send(self._missing, local).items():
            self._etags[name] |= etags
        self._meeting.write(WHOLE, {"plan": self._plan, SENT: self._etags})
        for name in self._uploads.keys() - self._whole:
            self._complete(name)
        others = {*os.listdir(local)} - self._sizes.keys() if os.path.isdir(local) else ()
        for name in sorted(others, key=lambda name: (name.endswith(LAST), name)):
            self._put(self._key(name), os.path.join(local, name))
        if not self.is_finished:
            self._bucket.remove()

    def _complete(self, name: str) -> None:
        key, etags = self._key(name), self._etags[name]
        try:
            self._multipart.complete(key, self._uploads[name], etags, replace=self._force)
        except (OutputExists, UploadGone):  # another process has completed it just now, or is there itself
            if not self._is_whole(name):
                raise
        if (facts := self._bucket.bucket.head(key, 0)[1]).size != self._sizes[name]:
            what = f"{facts.size} bytes arrived, and not {self._sizes[name]}"
            raise Damaged(self._bucket.bucket.shown(key), what, hint="write all of its parts again: --force")

    def _is_whole(self, name: str) -> bool:
        """Return whether an object is what the process that finishes has made of its parts."""
        record = record_in(self._meeting, WHOLE) or {}
        etags = record.get(SENT, {}).get(name, {}) if record.get("plan") == self._plan else {}
        self._etags[name] |= {int(number): etag for number, etag in etags.items()}
        with contextlib.suppress(Missing, ValueError):
            parts = [bytes.fromhex(etag.strip('"')) for _, etag in sorted(self._etags[name].items())]
            there = self._bucket.bucket.head(self._key(name), 0)[1]
            return there.size == self._sizes[name] and there.identity == Sent(digests=parts).etag
        return False

    def _put(self, key: str, path: str) -> None:
        """Upload a small file, unless a process that finished was killed behind it."""
        with open(path, "rb") as file:
            content = file.read()
        if self._bucket.bucket.content(key) != content:
            self._bucket.bucket.put({key: path}, replace=self._force)

    def give_up(self, error: BaseException) -> None:
        """Keep all that has arrived, as the same command goes on with it, unless it is damaged."""
        if isinstance(error, Damaged):
            self._abandon()

    def forget(self) -> None:
        """Do nothing: what stands under its name on this machine is not yet in the bucket."""

    def _abandon(self) -> None:
        """Abort the uploads, and remove the records."""
        if not self.is_finished:
            for name, upload in self._uploads.items():
                self._multipart.abort(self._key(name), upload)
            self._bucket.remove()
