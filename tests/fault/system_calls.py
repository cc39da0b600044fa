"""The system calls at which a program meets files: their numbers, and which arguments name the files."""

from __future__ import annotations

import platform
from dataclasses import dataclass

IS_ARM = platform.machine() == "aarch64"

SECCOMP = 277 if IS_ARM else 317
MMAP = 222 if IS_ARM else 9

# What a call does: it changes files or flushes them, moves bytes in or out, or only looks
CHANGE, MOVE, LOOK = "change", "move", "look"


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A system call."""

    name: str
    # On x86-64 and on aarch64; None where there is no such call
    numbers: tuple[int | None, int | None]
    # One of CHANGE, MOVE and LOOK
    kind: str
    # The arguments that name files, the one that is changed first: `f0` a descriptor in the first argument,
    # `p1` a path in the second, `d2` a path in the third, relative to the descriptor in the second
    files: tuple[str, ...]

    @property
    def number(self) -> int | None:
        """The number on this machine."""
        return self.numbers[IS_ARM]


def _calls(kind: str, table: str) -> list[SystemCall]:
    rows = [line.split() for line in table.strip().splitlines()]
    return [
        SystemCall(name, (_number(x86), _number(arm)), kind, tuple(files)) for name, x86, arm, *files in rows
    ]


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


# By name: the calls that take a file, but for those that close or seek
CALLS = {
    call.name: call
    for call in [
        *_calls(
            MOVE,
            """
            read 0 63 f0
            write 1 64 f0
            pread64 17 67 f0
            pwrite64 18 68 f0
            readv 19 65 f0
            writev 20 66 f0
            preadv 295 69 f0
            pwritev 296 70 f0
            preadv2 327 286 f0
            pwritev2 328 287 f0
            sendfile 40 71 f0 f1
            copy_file_range 326 285 f2 f0
            splice 275 76 f2 f0
            """,
        ),
        *_calls(
            CHANGE,
            """
            open 2 - p0
            creat 85 - p0
            openat 257 56 d1
            openat2 437 437 d1
            mmap 9 222 f4
            ioctl 16 29 f0
            flock 73 32 f0
            truncate 76 45 p0
            ftruncate 77 46 f0
            fallocate 285 47 f0
            fsync 74 82 f0
            fdatasync 75 83 f0
            sync_file_range 277 84 f0
            syncfs 306 267 f0
            rename 82 - p1 p0
            renameat 264 38 d3 d1
            renameat2 316 276 d3 d1
            link 86 - p1 p0
            linkat 265 37 d3 d1
            symlink 88 - p1
            symlinkat 266 36 d2
            unlink 87 - p0
            unlinkat 263 35 d1
            rmdir 84 - p0
            mkdir 83 - p0
            mkdirat 258 34 d1
            chmod 90 - p0
            fchmod 91 52 f0
            fchmodat 268 53 d1
            fchmodat2 452 452 d1
            chown 92 - p0
            fchown 93 55 f0
            lchown 94 - p0
            fchownat 260 54 d1
            utimensat 280 88 d1
            setxattr 188 5 p0
            lsetxattr 189 6 p0
            fsetxattr 190 7 f0
            removexattr 197 14 p0
            lremovexattr 198 15 p0
            fremovexattr 199 16 f0
            """,
        ),
        *_calls(
            LOOK,
            """
            stat 4 - p0
            lstat 6 - p0
            fstat 5 80 f0
            newfstatat 262 79 d1
            statx 332 291 d1
            access 21 - p0
            faccessat 269 48 d1
            faccessat2 439 439 d1
            readlink 89 - p0
            readlinkat 267 78 d1
            getdents 78 - f0
            getdents64 217 61 f0
            fadvise64 221 223 f0
            getxattr 191 8 p0
            lgetxattr 192 9 p0
            fgetxattr 193 10 f0
            listxattr 194 11 p0
            llistxattr 195 12 p0
            flistxattr 196 13 f0
            """,
        ),
    ]
}

BY_NUMBER = {call.number: call for call in CALLS.values() if call.number is not None}
