"""Changes of files that respect their structure as far as they do not break it on purpose.

A change takes bytes and a generator of random numbers and returns other bytes. Containers are taken apart,
one part is changed by what fits its kind, and the whole is put together again with true lengths.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import pickletools
import re
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.seeds import ODD, Files, Odd
from tests.support.crafting import text
from tests.support.other_files import varint

Change = Callable[[bytes, Random], bytes]

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 1000, 0x7FFF, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
LARGE = (2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
# Bytes to which a repeated part grows at most
LARGEST = 1 << 20


def number(random: Random) -> int:
    """Return a number at which programs err, or a small one."""
    return random.choice((*NUMBERS, *LARGE, random.randrange(64)))


def _stretch(raw: bytes, random: Random, most: int = 64) -> tuple[int, int]:
    at = random.randrange(len(raw) + 1)
    return at, min(len(raw), at + random.randrange(1, most))


# Bytes.


def flip(raw: bytes, random: Random) -> bytes:
    at = random.randrange(len(raw) or 1)
    return raw[:at] + bytes([raw[at] ^ (1 << random.randrange(8))]) + raw[at + 1 :] if raw else raw


def cut(raw: bytes, random: Random) -> bytes:
    return raw[: random.randrange(len(raw) + 1)]


def take_out(raw: bytes, random: Random) -> bytes:
    begin, end = _stretch(raw, random)
    return raw[:begin] + raw[end:]


def copy_in(raw: bytes, random: Random) -> bytes:
    begin, end = _stretch(raw, random, 200)
    at = random.randrange(len(raw) + 1)
    return raw[:at] + raw[begin:end] + raw[at:]


def copy_over(raw: bytes, random: Random) -> bytes:
    begin, end = _stretch(raw, random, 200)
    at = random.randrange(len(raw) + 1)
    return raw[:at] + raw[begin:end] + raw[at + end - begin :]


def put_number(raw: bytes, random: Random) -> bytes:
    size = random.choice((1, 2, 4, 8))
    packed = (number(random) & (1 << 8 * size) - 1).to_bytes(size, "little")
    at = random.randrange(len(raw) + 1)
    return raw[:at] + packed + raw[at + size :]


def repeat(raw: bytes, random: Random) -> bytes:
    begin, end = _stretch(raw, random)
    return raw[:begin] + raw[begin:end] * _times(end - begin, random) + raw[end:]


def _times(size: int, random: Random) -> int:
    """Return how often something is repeated: mostly a few times, now and then up to LARGEST bytes."""
    most = max(2, LARGEST // max(size, 1))
    return random.randrange(1, 5) if random.random() < 0.7 else int(most ** random.random())


BYTES: tuple[Change, ...] = (flip, cut, take_out, copy_in, copy_over, put_number, repeat)


def any_bytes(raw: bytes, random: Random) -> bytes:
    """Change bytes as if they had no structure."""
    return random.choice(BYTES)(raw, random)


# Pickles.

WORDS = (
    *("", "a", "__class__", "__reduce__", "..", "a.b", "module.", "0", "é", "\ud800", "data/0", "state_dict"),
    "a" * 40 + "!",
)
NAMES = (
    *("cos\nsystem\n", "cbuiltins\neval\n", "ctorch\nFloatStorage\n", "ctorch\nBoolStorage\n"),
    *("ccollections\nOrderedDict\n", "ctorch._utils\n_rebuild_tensor_v2\n", "ctorch\nSize\n"),
    *("ctorch._utils\n_rebuild_parameter\n", "c_codecs\nencode\n", "ctorch\ndevice\n", "cnumpy\ndtype\n"),
)
OPCODES = [bytes([code]) for code in b"()]}012N\x85\x86\x87abelstuRQ\x81\x88\x89\x8f\x90\x91\x94\x93."]


def opcodes_of(raw: bytes) -> list[bytes]:
    """Cut a pickle, several, or a part of one into opcodes with their arguments; the rest is one piece."""
    pieces, at = [], 0
    while at < len(raw):
        starts = []
        try:
            for opcode, _, place in pickletools.genops(raw[at:]):
                starts.append(at + place)
                stopped = opcode.name == "STOP"
        except Exception:
            stopped = False
        if not starts:
            break
        ends = [*starts[1:], starts[-1] + 1]
        pieces += [raw[begin:end] for begin, end in zip(starts, ends, strict=True)]
        at = ends[-1]
        if not stopped:
            break
    return [*pieces, raw[at:]] if at < len(raw) else pieces


def _integer(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def _opcode(random: Random) -> bytes:
    """Return an opcode with an argument at which programs err."""
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: _integer(number(random)),
        lambda: text(random.choice(WORDS)),
        lambda: random.choice(NAMES).encode(),
        lambda: random.choice((b"h", b"q")) + bytes([random.randrange(256)]),
        lambda: random.choice((b"j", b"r")) + struct.pack("<I", number(random) & 0xFFFFFFFF),
        lambda: random.choice(OPCODES),
    )
    return makers[random.randrange(6)]()


def multiply_pickle(ops: list[bytes], random: Random) -> bytes:
    """Make several numbers large, none of them so large that it is refused: what counts is their product."""
    places = [place for place, op in enumerate(ops) if op[:1] in b"KMJ\x8a"]
    if not places:
        return b"".join(ops)
    first, power = random.randrange(len(places)), random.randrange(6, 24)
    together = places[first : first + random.choice((2, 3, 4, 8))]
    for place in random.sample(together, random.randrange(1, len(together) + 1)):
        ops[place] = _integer(random.choice((1 << power, 1 << power, 0, 1)))
    return b"".join(ops)


def change_pickle(raw: bytes, random: Random) -> bytes:
    """Change one opcode of a pickle, or move, repeat or insert some."""
    ops = opcodes_of(raw)
    if ops and random.random() < 0.25:
        return multiply_pickle(ops, random)
    if not ops or random.random() < 0.1:
        return any_bytes(raw, random)
    at, what = random.randrange(len(ops)), random.randrange(8)
    end = min(len(ops), at + random.choice((1, 1, 1, 2, 5, 20)))
    if what == 0:
        del ops[at:end]
    elif what == 1:
        ops[at:at] = ops[at:end]
    elif what == 2:
        to = random.randrange(len(ops))
        ops[at], ops[to] = ops[to], ops[at]
    elif what == 3:
        piece = ops[at:end]
        ops[at:end] = piece * _times(sum(map(len, piece)), random)
    elif what == 4:
        ops[at] = _opcode(random)
    elif what == 5:
        ops.insert(at, _opcode(random))
    elif what == 6:
        similar = [place for place, op in enumerate(ops) if op[:1] in b"KMJ\x8a"] or [at]
        ops[random.choice(similar)] = _integer(number(random))
    else:
        similar = [place for place, op in enumerate(ops) if op[:1] in b"XU\x8c"] or [at]
        other = ops[random.choice(similar)] if random.random() < 0.5 else text(random.choice(WORDS))
        ops[random.choice(similar)] = other
    return b"".join(ops)


# JSON.


def change_json(raw: bytes, random: Random) -> bytes:
    """Change one value or key of a JSON text, or the text as bytes."""
    if random.random() < 0.2:
        return any_bytes(raw, random)
    try:
        return _changed_json(json.loads(raw), raw, random)
    except (ValueError, RecursionError):  # it is none, or too deep to be read or written
        return any_bytes(raw, random)


def _changed_json(tree: Any, raw: bytes, random: Random) -> bytes:
    places = [*_places(tree)]
    if not places:
        return any_bytes(raw, random)
    if random.random() < 0.15:
        return multiply_json(tree, places, random)
    holder, key = random.choice(places)
    value, what = holder[key], random.randrange(7)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[random.choice((*WORDS, str(key) + " "))] = value
    elif what == 2:
        other, there = random.choice(places)
        if there in other if isinstance(other, dict) else there < len(other):
            holder[key] = copy.deepcopy(other[there])
    elif what == 3 and isinstance(holder, list):
        holder[key:key] = [value] * _times(len(json.dumps(value)), random)
    elif what == 3:
        for index in range(min(_times(len(json.dumps(value)) + 20, random), 20_000)):
            holder[f"{key}{index}"] = value
    elif what == 4 and isinstance(value, str) and value[:1] == "{":
        holder[key] = change_json(value.encode("utf-8", "surrogatepass"), random).decode("utf-8", "replace")
    elif what == 5:
        depth = int(1000 ** random.random())
        deep = "[" * depth + json.dumps(value) + "]" * depth
        holder[key] = "@"
        return json.dumps(tree).replace('"@"', deep, 1).encode("utf-8", "surrogatepass")
    else:
        choices = (number(random), float(number(random)), None, True, "", [], {}, random.choice(WORDS), 0.5)
        holder[key] = random.choice((*choices, "F32", "I64", "BOOL", "F8_E4M3", [number(random)]))
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def multiply_json(tree: Any, places: list[tuple[Any, Any]], random: Random) -> bytes:
    """Make several values large together: numbers, texts and lists by themselves, dicts by other keys."""
    for holder, key in random.sample(places, min(len(places), random.choice((2, 3, 4)))):
        value, times = holder[key], 1 << random.randrange(1, 12)
        if isinstance(value, int) and not isinstance(value, bool):
            holder[key] = 1 << random.randrange(4, 40)
        elif isinstance(value, str | list):
            holder[key] = value * times
        elif isinstance(value, dict) and len(value) < 100:
            longer = random.choice((1, 1, 20))
            few = [*value.items()][:4]
            value |= {f"{name}{number}" * longer: item for number in range(times) for name, item in few}
        if len(json.dumps(tree)) > LARGEST:
            break
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def multiply_rows(raw: bytes, random: Random) -> bytes:
    """Put large numbers into the values of a file, where they may be labels, indices or counts."""
    at = random.randrange(max(1, len(raw) - 8))
    large = (1 << random.randrange(16, 50)).to_bytes(8, "little")
    return raw[:at] + large + raw[at + 8 :]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a tree."""
    found, todo = [], [tree]
    while todo:
        holder = todo.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                todo.append(holder[key])
    return found


# Containers.

ZIP_FIELDS = {  # signature: (offset, size) of the fields
    b"PK\x03\x04": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\x01\x02": ((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (38, 4), (42, 4)),
    b"PK\x05\x06": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\x06\x06": ((4, 8), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\x06\x07": ((4, 4), (8, 8), (16, 4)),
}


TAR_FIELDS = (0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)  # offset, size


def change_zip_field(raw: bytes, random: Random) -> bytes:
    """Put another number into a field of one of a zip's headers."""
    signature, fields = random.choice([*ZIP_FIELDS.items()])
    places = [at for at in range(len(raw)) if raw.startswith(signature, at)] if signature in raw else []
    if not places:
        return any_bytes(raw, random)
    offset, size = random.choice(fields)
    at = random.choice(places) + offset
    old = int.from_bytes(raw[at : at + size], "little")
    new = random.choice((number(random), old + random.choice((-1, 1, 64)), random.choice(places)))
    return raw[:at] + (new & (1 << 8 * size) - 1).to_bytes(size, "little") + raw[at + size :]


def change_zip(raw: bytes, random: Random) -> bytes:
    """Change, drop, double, rename or move a record, and write the zip again; or change a header."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            records = [[each.filename, archive.read(each), zipfile.ZIP_STORED] for each in archive.infolist()]
    except Exception:
        return any_bytes(raw, random)
    what = random.randrange(13)
    if what == 0 or not records:
        return change_zip_field(raw, random)
    if what == 1:
        return any_bytes(raw, random)
    record = random.choice(records)
    if what == 2:
        records.remove(record)
    elif what == 3:
        records.insert(random.randrange(len(records)), [*record])
    elif what == 4:
        old = record[0]
        record[0] = random.choice((f"{old}x", old.upper(), f"../{old}", f"{old}/", "x"))
    elif what == 5:
        record[2] = zipfile.ZIP_DEFLATED
    elif what == 6:
        random.shuffle(records)
    elif what == 7:
        root = record[0].split("/")[0]
        count = _times(120, random)
        records += [[f"{root}/data/x{index}", b"abcd", zipfile.ZIP_STORED] for index in range(count)]
    else:
        if record[0].endswith((".npy", ".json")):
            changed = change_npy if record[0].endswith(".npy") else change_json
            record[1] = changed(record[1], random)
            return _as_zip(records)
        pickles = [each for each in records if each[0].endswith(".pkl")]
        record = random.choice(pickles) if pickles and random.random() < 0.7 else record
        record[1] = change_pickle(record[1], random) if record in pickles else any_bytes(record[1], random)
    return _as_zip(records)


def _as_zip(records: list[list[Any]]) -> bytes:
    """Write a zip as torch does: records aligned to 64 bytes by an extra field."""
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as archive:
        warnings.simplefilter("ignore")  # names that are there twice
        for name, data, method in records:
            info = zipfile.ZipInfo(name[:60000])
            info.compress_type = method
            header = out.tell() + 30 + len(info.filename.encode("utf-8", "replace"))
            info.extra = b"FB" + struct.pack("<H", -(header + 4) % 64) + b"Z" * (-(header + 4) % 64)
            try:
                archive.writestr(info, data)
            except (ValueError, UnicodeError, struct.error):
                continue
    return out.getvalue()


def change_safetensors(raw: bytes, random: Random) -> bytes:
    """Change the header with its length kept true, its length, or bytes."""
    if len(raw) < 8:
        return any_bytes(raw, random)
    size = struct.unpack("<Q", raw[:8])[0]
    header, data = raw[8 : 8 + size], raw[8 + size :]
    what = random.randrange(8)
    if what == 0:
        return struct.pack("<Q", number(random) & 2**64 - 1) + raw[8:]
    if what == 1:
        change = random.choice((any_bytes, multiply_rows))
        return raw[: 8 + size] + change(data, random)
    if what == 2:
        return any_bytes(raw, random)
    header = change_json(header, random)
    header += b" " * random.choice((0, 0, -len(header) % 8, 1))
    return struct.pack("<Q", len(header)) + header + data


def change_tar(raw: bytes, random: Random) -> bytes:
    """Change a member, or a field of a header with its checksum kept true."""
    what = random.randrange(5)
    if what == 0 or not raw:
        return any_bytes(raw, random)
    if what == 1:
        at = 512 * random.randrange(max(1, len(raw) // 512))
        header = bytearray(raw[at : at + 512])
        begin, size = random.choice(TAR_FIELDS)
        value = random.choice((b"0" * size, b"7" * size, b"\x80" + b"\xff" * size, b"L" * size, b"\0" * size))
        header[begin : begin + size] = value[:size]
        if len(header) == 512:
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
        return raw[:at] + bytes(header) + raw[at + 512 :]
    try:
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            members = [[each.name, (archive.extractfile(each) or io.BytesIO()).read()] for each in archive]
    except Exception:
        return any_bytes(raw, random)
    if not members:
        return any_bytes(raw, random)
    member = random.choice(members)
    if what == 2:
        random.choice((members.remove, members.append))(member)
    else:
        member[1] = change_pickle(member[1], random)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def change_npy(raw: bytes, random: Random) -> bytes:
    """Change a word or a number of the header with its length kept true, or bytes."""
    size = struct.unpack("<H", raw[8:10])[0] if len(raw) > 10 else 0
    header, data = raw[10 : 10 + size], raw[10 + size :]
    words = list(re.finditer(rb"\w+|<f4|[(),]", header))
    if not words or random.random() < 0.3:
        return any_bytes(raw, random)
    word = random.choice(words)
    new = random.choice((b"%d" % number(random), b"True", b"|O", b"<f8", b">f4", b"<U1", b"", b"(", b"descr"))
    header = header[: word.start()] + new + header[word.end() :]
    return raw[:8] + struct.pack("<H", len(header) & 0xFFFF) + header + data


def change_gguf(raw: bytes, random: Random) -> bytes:
    """Put a number at which programs err where a type, a count or an offset may be, or change bytes."""
    if random.random() < 0.4:
        return any_bytes(raw, random)
    end = max(9, len(raw) * 2 // 3)
    at, size = random.randrange(8, end), random.choice((4, 8))
    small = random.choice((number(random), random.randrange(42), 32 * random.randrange(20)))
    return raw[:at] + (small & (1 << 8 * size) - 1).to_bytes(size, "little") + raw[at + size :]


def change_message(raw: bytes, random: Random, level: int = 0) -> bytes:
    """Change a field of a message of Protocol Buffers, at any depth, with all lengths kept true."""
    fields = _fields(raw)
    if not fields or random.random() < 0.1:
        return any_bytes(raw, random)
    index, what = random.randrange(len(fields)), random.randrange(8)
    key, value = fields[index]
    if what == 0:
        del fields[index]
    elif what == 1:
        fields.insert(random.randrange(len(fields)), (key, value))
    elif what == 2:
        fields[index] = (random.choice((key ^ 8, key + 16, 1 << 3, 9 << 3 | 2)), value)
    elif isinstance(value, int):
        fields[index] = (key, number(random) & (1 << 64) - 1)
    else:
        fields[index] = (
            key,
            change_message(value, random, level + 1) if level < 4 else any_bytes(value, random),
        )
    return b"".join(_field(*each) for each in fields)


def _fields(raw: bytes) -> list[tuple[int, int | bytes]]:
    """Return the fields of a message with their keys; none for what is no message."""
    fields: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        value, at = _varint(raw, at)
        if key & 7 == 0:
            fields.append((key, value))
        elif key & 7 == 2 and at + value <= len(raw) and key >> 3:
            fields.append((key, raw[at : at + value]))
            at += value
        else:
            return []
    return fields


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(at, min(len(raw), at + 10)):
        value |= (raw[index] & 0x7F) << 7 * (index - at)
        if raw[index] < 0x80:
            return value, index + 1
    return value, len(raw)


def _field(key: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(key & ~7) + varint(value)
    return varint(key & ~7 | 2) + varint(len(value)) + value


KINDS: tuple[tuple[int, bytes, Change], ...] = (
    (0, b"\x93NUMPY", change_npy),
    (0, b"GGUF", change_gguf),
    (0, b"\x08\x0a\x12", change_message),
    (0, b"PK", change_zip),
    (0, b"\x80", change_pickle),
    (0, b"{", change_json),
    (257, b"ustar", change_tar),
    (8, b"{", change_safetensors),
)


def change(raw: bytes, random: Random) -> bytes:
    """Change a file by what its first bytes say that it is."""
    fitting = next((change for at, magic, change in KINDS if raw.startswith(magic, at)), any_bytes)
    return any_bytes(raw, random) if random.random() < 0.15 else fitting(raw, random)


def change_one(files: Files, random: Random) -> Files:
    """Change one file of a checkpoint; of a folder mostly its index, now and then the folder itself."""
    names = sorted(name for name in files if not isinstance(files[name], Odd))
    if not names:
        return files
    if random.random() < 0.04:  # a pipe waits, a device never ends, and a link leads elsewhere
        return {**files, random.choice(names): random.choice(ODD)}
    telling = [name for name in names if name.endswith((".json", ".metadata"))]
    name = random.choice(telling if telling and random.random() < 0.5 else names)
    if name and random.random() < 0.1:
        rest = {other: raw for other, raw in files.items() if other != name}
        return random.choice((rest, {**rest, f"x{name}": files[name]}, {**files, name: files[names[0]]}))
    if random.random() < 0.5:  # the files of all ranks the same, or they contradict each other
        seed, kind = random.random(), re.sub(r"\d+", "", name)
        same = [other for other in names if re.sub(r"\d+", "", other) == kind]
        return {**files, **{other: change(files[other], Random(seed)) for other in same}}
    return {**files, name: change(files[name], random)}
