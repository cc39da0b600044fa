"""What tensors of one form have in common in a pickle of torch's: their opcodes but for a key and places."""

from __future__ import annotations

import re

# Named groups are what tensors of one form have in common, and the key; unnamed ones are memo indices.
GET = rb"(?:h.|j....)"
PUT = rb"r(....)"
NUMBER = rb"(?:K.|M..|J....)"
SIZES = rb"\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)r" % ((NUMBER,) * 4)
PUT_UNLESS_EMPTY = rb"(?:(?<=r)(....)|(?<=\)))"
TENSOR = re.compile(
    rb"(?P<rebuild>%b)(?P<storage>\(\((?P<word>%b)(?P<kind>%b)X)(.\0\0\0)(?P<key>[0-9]+)" % (GET, GET, GET)
    + rb"%b(?P<identity>(?P<location>%b)(?P<numel>%b)t)%bQ(?P<offset>%b)" % (PUT, GET, NUMBER, PUT, NUMBER)
    + rb"(?P<shape>%b)%b(?P<stride>%b)%b" % (SIZES, PUT_UNLESS_EMPTY, SIZES, PUT_UNLESS_EMPTY)
    + rb"(?P<end>(?P<grad>[\x88\x89])(?P<hooks>%b)\)R)%bt%bR%b" % (GET, PUT, PUT, PUT),
    re.DOTALL,
)
GROUPS = TENSOR.groupindex
FORM = [GROUPS[name] for name in ("rebuild", "storage", "identity", "offset", "shape", "stride", "end")]
KEY = GROUPS["key"]
PUTS = [group for group in range(KEY + 1, TENSOR.groups + 1) if group not in GROUPS.values()]

MOST_FORMS = 4096  # that are remembered: honest files have a few dozen


class OpcodeTemplate:
    """The opcodes of all tensors of one form: they differ in the storage's key and the places in the memo."""

    __slots__ = ("count", "head", "numbers")

    def __init__(self, match: re.Match[bytes]) -> None:
        """Take the form of a tensor that matched."""
        self.head = match["rebuild"] + match["storage"]
        holes = [match.start(group) - match.end(KEY) for group in PUTS if match[group] is not None]
        self.count = len(holes)  # values that one of them puts into the memo
        # What follows the key is a number in base 256: each place in the memo is a few of its digits, and
        # all places go up by the same.
        tail = bytearray(match[0][match.end(KEY) - match.start() :])
        for number, hole in enumerate(holes):
            tail[hole : hole + 4] = number.to_bytes(4, "little")
        # That number for the place 0, what each place adds to it, its bytes, and how many places there are.
        step = sum(1 << 8 * hole for hole in holes)
        self.numbers = int.from_bytes(tail, "little"), step, len(tail), self.count

    def written(self, key: bytes, index: int) -> bytes:
        """Return the opcodes of a tensor whose first value gets this place in the memo."""
        base, step, size, _ = self.numbers
        tail = (base + index * step).to_bytes(size, "little")
        return b"%b%b\0\0\0%b%b" % (self.head, bytes((len(key),)), key, tail)
