"""Damaged and hostile files are refused or described in little time and memory; nothing is run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import struct
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.analysis.summary import summarize
from ckpttool.errors import CkptToolError
from tests.support.crafting import (
    call,
    dict_of,
    list_of,
    name,
    number,
    program,
    safetensors_file,
    storage,
    tensor,
    text,
    torch_legacy,
    torch_zip,
    tuple_of,
)

STATE = {"module.a": torch.arange(3, dtype=torch.float32), "module.b": torch.ones(2, dtype=torch.int64)}


def small_zip(path: Path) -> None:
    torch.save({"model": STATE, "epoch": 1}, path)


def small_legacy(path: Path) -> None:
    torch.save({"model": STATE, "epoch": 1}, path, _use_new_zipfile_serialization=False)


def small_safetensors(path: Path) -> None:
    save_file(STATE, path, metadata={"a": "b"})


WRITERS = {"zip": small_zip, "legacy": small_legacy, "safetensors": small_safetensors}


def use(path: Path) -> CkptToolError | None:
    """Do with a file what a command does; return the error that refused it, if one did."""
    try:
        with ckpttool.open(path) as checkpoint:
            summarize(checkpoint)
            for ending in (".pt", ".safetensors"):
                ckpttool.save(checkpoint, path.with_name(f"new{ending}"), dry_run=True)
    except CkptToolError as error:
        assert len(str(error)) < 1000
        return error
    return None


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_cut_at_any_byte_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    WRITERS[kind](path)
    assert use(path) is None
    for end in reversed(range(path.stat().st_size)):
        os.truncate(path, end)
        error = use(path)
        assert error is not None, f"cut after {end} bytes"
        assert error.exit_code == 3


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_with_any_byte_changed_is_used_or_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "changed.pt"
    WRITERS[kind](path)
    randomly = random.Random(0)
    with open(path, "r+b", buffering=0) as file:
        for at, byte in enumerate(path.read_bytes()):
            for change in (0xFF, randomly.randrange(1, 256)):
                os.pwrite(file.fileno(), bytes([byte ^ change]), at)
                use(path)
            os.pwrite(file.fileno(), bytes([byte]), at)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_with_pieces_put_elsewhere_is_used_or_refused(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "moved.pt"
    randomly = random.Random(1)
    for _ in range(500):
        changed = bytearray(whole)
        for _ in range(randomly.randrange(1, 4)):
            begin, to, size = (randomly.randrange(len(whole)) for _ in range(3))
            piece = changed[begin : begin + size % 64]
            if randomly.random() < 0.5:
                changed[to:to] = piece
            else:
                changed[to : to + len(piece)] = piece
        path.write_bytes(changed)
        use(path)


# Attacks: each writes one file.

DOUBLED = b"]" + b"".join(b"q%b0](h%bh%be" % ((bytes([i]),) * 3) for i in range(60))
TENSOR = tensor(storage(1), (1,))
BYTES = {"0": bytes(4)}
TIMES = 100_000


def in_zip(body: bytes) -> Callable[[Path], object]:
    """A value beside a state of one tensor, so that there is something to convert."""
    return lambda path: torch_zip(path, dict_of({"model": dict_of({"module.a": TENSOR}), "x": body}), BYTES)


def alone(body: bytes, storages: dict[str, bytes] | None = None, **given: Any) -> Callable[[Path], object]:
    return lambda path: torch_zip(path, body, storages or {}, **given)


def repeating_tuple(times: int) -> bytes:
    return b")q\x00" + b"".join(
        b"0h%bh%b\x86q%b" % (bytes([i]), bytes([i]), bytes([i + 1])) for i in range(times)
    )


def many_marks(path: Path) -> None:
    torch_zip(path, b"(" * TIMES)


def long_key_deep(path: Path) -> None:
    key = text("k" * 300_000) + b"q\x01"
    levels = b"}" + text("w") + TENSOR + b"s" + key + (b"}" + text("w") + TENSOR + b"sh\x01") * 150
    torch_zip(path, levels + b"N" + b"s" * 151, BYTES)


def shared_shape(path: Path) -> None:
    """A shape of 900 axes that 5,000 tensors refer to."""
    shape = tuple_of(*[number(1)] * 900) + b"q\x01"
    first = (
        tensor(storage(1) + b"q\x02")
        .replace(tuple_of(number(4)), shape)
        .replace(tuple_of(number(1)), b"h\x01")
    )
    again = tensor(b"h\x02").replace(tuple_of(number(4)), b"h\x01").replace(tuple_of(number(1)), b"h\x01")
    torch_zip(path, b"](" + first + again * 5000 + b"e", BYTES)


def module(parameters: bytes, inside: bytes = b"}") -> bytes:
    """A pickled nn.Module; the opcodes of its parameters, and of the modules inside it."""
    parts = {"_parameters": parameters, "_buffers": b"}", "_modules": inside}
    return name("m", "Net") + b")\x81" + dict_of(parts) + b"b"


def doubled_modules(path: Path) -> None:
    """Each module holds the one before twice: 2^60 ways to name one parameter."""
    body = module(dict_of({"w": TENSOR}))
    for index in range(60):
        kept = b"q" + bytes([index + 10])
        twice = b"h" + bytes([index + 10])
        body += kept + b"0" + module(b"}", dict_of({"a": twice, "b": twice}))
    torch_zip(path, body, BYTES)


def nested_modules(path: Path) -> None:
    body = (
        name("m", "Net")
        + b")\x81}("
        + text("_parameters")
        + b"}"
        + text("_buffers")
        + b"}"
        + text("_modules")
        + b"}"
        + text("x")
    ) * 20_000
    torch_zip(path, body + b"N" + b"sub" * 20_000, BYTES)


def tar(
    storages: bytes, tensors: bytes = b"\x80\x02K\x00.", tree: bytes = b"\x80\x02}."
) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with tarfile.open(path, "w") as archive:
            for member, raw in (("storages", storages), ("tensors", tensors), ("pickle", tree)):
                info = tarfile.TarInfo(member)
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))

    return write


ATTACKS: dict[str, Callable[[Path], object]] = {
    "a memo index of 2^31": in_zip(b"Nr\xff\xff\xff\x7f"),
    "a list that contains itself": in_zip(b"]q\x00h\x00a"),
    "a dict that contains itself": in_zip(b"}q\x00" + text("x") + b"h\x00s"),
    "an object that contains itself": in_zip(call(name("m", "C")) + b"q\x00}" + text("x") + b"h\x00sb"),
    "lists doubled 60 times": in_zip(DOUBLED),
    "lists doubled 60 times, in the tree's place": alone(DOUBLED),
    "a tuple that repeats itself": in_zip(repeating_tuple(60)),
    "a tuple that repeats itself, as a key": in_zip(b"}" + repeating_tuple(60) + b"Ns"),
    "100,000 lists in lists": in_zip(b"]" * TIMES + b"a" * (TIMES - 1)),
    "100,000 tuples in tuples": in_zip(b")" + b"\x85" * TIMES),
    "100,000 dicts in dicts": in_zip((b"}" + text("k")) * TIMES + b"N" + b"s" * TIMES),
    "100,000 calls in calls": in_zip(name("m", "f") + b"q\x00" + b"h\x00" * TIMES + b"N" + b"\x85R" * TIMES),
    "100,000 states in states": in_zip(call(name("m", "f")) * TIMES + b"b" * (TIMES - 1)),
    "100,000 groups": many_marks,
    "100,000 keys of equal hash": in_zip(
        b"}(" + b"".join(number((2**61 - 1) * i << 8) + b"N" for i in range(1, TIMES)) + b"u"
    ),
    "a number of 100,000 digits": in_zip(number(10**100_000)),
    "a number of 100,000 digits as a key": in_zip(b"}" + number(10**100_000) + b"Ns"),
    "a number of 100,000 digits as a size": in_zip(tensor(storage(10**100_000))),
    "keys that steer the terminal": in_zip(b"}" + text("\x1b]0;x\x07\x1b[2J\ud800\u202e") + TENSOR + b"s"),
    "keys with dots and slashes": in_zip(
        dict_of({"../../etc/passwd": TENSOR, "a.b": TENSOR, "": TENSOR, "a/b": TENSOR})
    ),
    "a long key at every level": long_key_deep,
    "a class name of 100,000 letters": in_zip(call(name("m" * TIMES, "C"))),
    "a key of 140,000 prefixes": in_zip(dict_of({"module." * 140_000: TENSOR})),
    "a doubled list for a storage": in_zip(DOUBLED + b"Q"),
    "a doubled list for a size": in_zip(tensor(storage(1)).replace(tuple_of(number(4)), DOUBLED)),
    "a doubled list for a call": in_zip(DOUBLED + b")R"),
    "a doubled list for arguments": in_zip(name("m", "C") + DOUBLED + b"R"),
    "an object of doubled lists as a key": in_zip(b"}" + call(name("m", "C"), DOUBLED) + b"Ns"),
    "a shape that many tensors refer to": shared_shape,
    "a giant of stride 0": alone(dict_of({"a": tensor(storage(1), (1 << 50,), (0,))}), BYTES),
    "a storage past the end": alone(dict_of({"a": tensor(storage(1 << 40), (1,))}), BYTES),
    "a storage of negative size": alone(dict_of({"a": tensor(storage(-1), (1,))}), BYTES),
    "a storage of 2^63 elements": alone(dict_of({"a": tensor(storage(2**63), (1,))}), BYTES),
    "sizes that overflow": alone(dict_of({"a": tensor(storage(1), (2**62, 4), (0, 0))}), BYTES),
    "a pickle that compresses well": alone(text("x" * 50_000_000), compression=zipfile.ZIP_DEFLATED),
    "a thousand copies of a list": in_zip(
        b"("
        + list_of(*(b"M%bN\x86" % i.to_bytes(2, "little") for i in range(9999)))
        + b"q\x00"
        + name("collections", "OrderedDict")
        + b"q\x01"
        + b"0h\x01h\x00\x85R" * 9999
        + b"l"
    ),
    "modules doubled 60 times": doubled_modules,
    "20,000 modules in modules": nested_modules,
    "a module that contains itself": alone(
        name("m", "Net")
        + b")\x81q\x00"
        + dict_of({"_parameters": b"}", "_buffers": b"}", "_modules": dict_of({"x": b"h\x00"})})
        + b"b"
    ),
    "a module with an object of doubled lists for a name": alone(
        module(b"}" + call(name("m", "C"), DOUBLED) + TENSOR + b"s"), BYTES
    ),
    "a module with a large number for a name": alone(
        module(b"}" + number(10**10_000) + TENSOR + b"s"), BYTES
    ),
    "tar: a doubled list for a count": tar(program(DOUBLED)),
    "tar: a doubled list for a key": tar(
        program(b"K\x01")
        + program(b"(" + DOUBLED + text("cpu") + name("torch", "FloatStorage") + b"t")
        + bytes(8)
    ),
    "tar: a doubled list for a class": tar(
        program(b"K\x01") + program(b"(K\x01" + text("cpu") + DOUBLED + b"t") + bytes(8)
    ),
    "tar: a large number for a count": tar(program(number(10**10_000))),
    "tar: a doubled list for an identity": tar(
        program(b"K\x00") + program(b"]"), tree=program(DOUBLED + b"Q")
    ),
    "legacy: a storage of 2^60 bytes": lambda path: torch_legacy(
        path, dict_of({"a": tensor(storage(2**58), (1,))}), {"0": (2**58, b"abcd")}
    ),
    "legacy: a list of keys without end": lambda path: torch_legacy(path, b"}", keys=["k"] * TIMES),
    "safetensors: a hundred thousand axes": lambda path: safetensors_file(
        path, {"a": {"dtype": "U8", "shape": [2**62] * TIMES, "data_offsets": [0, 0]}}
    ),
    "safetensors: nested": lambda path: safetensors_file(path, b'{"a":' + b"[" * TIMES + b"]" * TIMES + b"}"),
    "safetensors: a header of 2^63 bytes": lambda path: safetensors_file(path, b"{}", size=2**63),
    "safetensors: a number of 100,000 digits": lambda path: safetensors_file(
        path, b'{"a":{"dtype":"U8","shape":[' + b"9" * TIMES + b'],"data_offsets":[0,0]}}'
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_ends_with_an_exit_code_and_no_traceback(attack: str, cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    ATTACKS[attack](path)
    for command in (
        ["inspect", path],
        ["inspect", path, "--json"],
        ["strip-prefix", path, tmp_path / "out.safetensors"],
        ["add-prefix", path, tmp_path / "out.pt"],
        ["strip-prefix", path, tmp_path / "dry.pt", "--dry-run", "--json"],
    ):
        ran = cli(*command)
        assert ran.code in (0, 1, 3), ran.err
        assert "Traceback" not in ran.err
        assert not any(c in ran.out + ran.err for c in "\x1b\x07\ud800\u202e")
        if "--json" in command:
            json.loads(ran.out)
    assert not [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


WATCHED = """
    import contextlib, io, json, os, re, sys, time
    from ckpttool import cli
    def use(path):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cli.run(["inspect", path, "--json"])
            cli.run(["strip-prefix", path, path + ".safetensors"])
            cli.run(["add-prefix", path, path + ".pt"])
    def peak():
        "Most resident memory so far, in KiB. (That of getrusage begins with what the parent had.)"
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
    first, *files = sys.argv[1:]
    use(first)
    found = {}
    for path in files:
        before, started = peak(), time.process_time()
        use(path)
        found[os.path.basename(path)] = [peak() - before, time.process_time() - started]
    print(json.dumps(found))
"""


def watched(folder: Path, most_bytes: float) -> dict[str, tuple[int, float]]:
    """By attack: the growth of the process in KiB, and CPU seconds."""
    small_zip(folder / "honest")
    files = [folder / "honest"]
    for index, attack in enumerate(ATTACKS):
        path = folder / str(index)
        ATTACKS[attack](path)
        if path.stat().st_size <= most_bytes:
            files.append(path)
    command = [sys.executable, "-c", textwrap.dedent(WATCHED), *files]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return {list(ATTACKS)[int(index)]: tuple(used) for index, used in json.loads(ran.stdout).items()}


def test_attacks_of_any_size_take_little_memory_and_time(tmp_path: Path) -> None:
    taken = watched(tmp_path, float("inf"))
    assert taken.keys() == ATTACKS.keys()
    assert {attack: used for attack, used in taken.items() if used[0] > 200 << 10 or used[1] > 15} == {}


def test_a_file_of_a_kilobyte_takes_less_than_100_mb_of_memory(tmp_path: Path) -> None:
    taken = watched(tmp_path, 2048)
    assert len(taken) > 10
    assert {attack: used for attack, used in taken.items() if used[0] > 100 << 10} == {}


# Nothing is run.


def harmful(canary: str) -> Iterator[tuple[str, bytes]]:
    """Pickles that would make a file if they were loaded, one for each opcode that runs something."""
    shell, touch = text(f"touch {canary}"), text(f"open({canary!r}, 'w')")
    system, evaluate = name("os", "system"), name("builtins", "eval")
    yield "REDUCE", call(system, shell)
    yield "REDUCE of Python 2's name", call(name("__builtin__", "eval"), touch)
    yield "REDUCE under torch's own names", call(name("torch.serialization", "os.system"), shell)
    yield "INST", b"(" + shell + b"ios\nsystem\n"
    yield "OBJ", b"(" + system + shell + b"o"
    yield "NEWOBJ", system + tuple_of(shell) + b"\x81"
    yield "NEWOBJ_EX", system + tuple_of(shell) + b"}\x92"
    yield "STACK_GLOBAL", text("builtins") + text("eval") + b"\x93" + tuple_of(touch) + b"R"
    yield "BUILD", call(name("m", "C")) + dict_of({"__setstate__": evaluate}) + b"b" + touch + b"b"
    yield (
        "a hook of a tensor",
        tensor(storage(1), (1,)).replace(call(name("collections", "OrderedDict")), call(evaluate, touch)),
    )
    yield "a parameter's maker", call(name("torch._utils", "_rebuild_parameter"), call(evaluate, touch))
    yield (
        "a storage's key",
        tuple_of(text("storage"), call(evaluate, touch), text("0"), text("cpu"), number(1)) + b"Q",
    )
    yield "a key of a dict", b"}" + call(evaluate, touch) + b"Ns"
    yield "an element of a set", b"\x8f(" + call(evaluate, touch) + b"\x90"


@pytest.mark.parametrize("what", [what for what, _ in harmful("x")])
@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_no_command_runs_what_a_pickle_names(
    kind: str, what: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body = dict_of({"model": dict_of({"module.a": TENSOR}), "x": dict(harmful("CANARY"))[what]})
    if kind == "zip":
        torch_zip(tmp_path / "in.pt", body, BYTES)
    else:
        torch_legacy(tmp_path / "in.pt", body, {"0": (1, bytes(4))})
    inspected = cli("inspect", "in.pt", "--json")
    stripped = cli("strip-prefix", "in.pt", "out.safetensors", "--json")
    cli("strip-prefix", "in.pt", "out.pt")
    cli("reload", "in.pt", "--model", "torch.nn:Identity")
    assert not (tmp_path / "CANARY").exists()
    if inspected.code == 0:  # a malformed storage or hook is refused instead
        assert inspected.json["unknown"]
        assert "x" in stripped.json["left_out"]


@pytest.mark.parametrize("what", ["REDUCE", "INST", "STACK_GLOBAL", "a key of a dict"])
def test_torch_load_runs_these_pickles(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that the test above can fail."""
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(Exception):
        torch.load(torch_zip(tmp_path / "in.pt", dict(harmful("CANARY"))[what], BYTES), weights_only=False)
    assert (tmp_path / "CANARY").exists()


# Zips.


def test_records_that_two_readers_would_understand_differently_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    small_zip(path)
    whole = path.read_bytes()
    central = whole.index(b"PK\x01\x02")
    for what, change in {
        "case": whole.replace(b"in/data/1", b"in/DATA/0"),
        "local name": whole[:central].replace(b"in/data/0", b"in/data/9") + whole[central:],
        "central name": whole[:central] + whole[central:].replace(b"in/data/0", b"in/data/9"),
    }.items():
        path.write_bytes(change)
        error = use(path)
        assert error is not None and error.kind == "damaged", what


def test_bytes_behind_the_zip_directory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    small_zip(path)
    whole = path.read_bytes()
    for tail in (b"x", whole, bytes(100)):
        path.write_bytes(whole + tail)
        error = use(path)
        assert error is not None or tail is whole


def test_impossible_numbers_in_a_zip64_directory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    small_zip(path)
    whole = path.read_bytes()
    end = whole.rindex(b"PK\x05\x06")
    for value in (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1):
        for field in range(4):
            numbers = [1, 1, 50, 50]
            numbers[field] = value
            wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, *numbers)
            locator = struct.pack("<IIQI", 0x07064B50, 0, value if field == 3 else end, 1)
            path.write_bytes(whole[:end] + wide + locator + whole[end:])
            assert use(path) is not None
