"""What Windows has in the place of POSIX: the same bytes are written, and what it refuses is refused by name.

On Windows itself this file runs alone: `pytest --noconftest tests/test_system.py`, without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import system, windows
from ckpttool.core.remote.urls import is_url
from tests.support.crafting import dict_of, number, safetensors_file, storage, tensor, torch_zip
from tests.support.running import ROOT
from tests.support.without_posix import msvcrt_of

RULES = b"""[counts]\r\ni = ["layers"]\r\n[[rule]]\r\nfrom = "layer.{i}.weight"\r\nto = "blocks.{i}.w"\r\n
[[rule]]\r\nfrom = "\xd0\xba\xd0\xbb\xd1\x8e\xd1\x87\xe2\x86\x92\xc3\x97"\r\nto = "key"\r\n"""
COUNT = 400_000  # numbers of a storage that several threads copy


def write_inputs(folder: Path) -> None:
    """Write checkpoints of a wrapped model with an optimizer, which differ in a few values."""
    for name, step in (("a", 1.0), ("b", 2.0)):
        values = [float(at % 251) for at in range(COUNT)]
        values[::1000] = [step] * len(values[::1000])
        sizes = {"0": COUNT, "1": 4, "2": COUNT}
        raw = {"0": values, "1": [step] * 4, "2": values[::-1]}
        tensors = {
            "model": dict_of(
                {
                    "module.layer.0.weight": tensor(storage(COUNT, key="0"), (COUNT // 100, 100), (100, 1)),
                    "module.layer.1.weight": tensor(storage(4, key="1"), (2, 2), (2, 1)),
                    "module.ключ→×": tensor(storage(4, key="1"), (2, 2), (2, 1)),
                }
            ),
            "optimizer": dict_of({"exp_avg": tensor(storage(COUNT, key="2"), (COUNT,), (1,))}),
            "epoch": number(3),
        }
        storages = {key: struct.pack(f"<{sizes[key]}f", *each) for key, each in raw.items()}
        torch_zip(folder / f"{name}.pt", dict_of(tensors), storages)
    (folder / "rules.toml").write_bytes(RULES)
    (folder / "run").mkdir()


# Exit codes, and commands in one process and one folder: outputs of some are inputs of others.
COMMANDS = """
0 inspect a.pt
0 inspect a.pt --stats --tensors
0 verify a.pt
0 digest a.pt b.pt
1 diff a.pt b.pt
0 strip-prefix a.pt plain.safetensors --verify
0 strip-prefix b.pt other.pt
0 convert plain.safetensors shards/ --shard-size 1MB
0 convert other.pt torch-shards/ --to torch-sharded --shard-size 1MB
0 inspect shards
0 verify shards --against plain.safetensors
0 convert a.pt half.safetensors --dtype bf16
0 convert a.pt full.safetensors --full
0 convert full.safetensors back.pt
0 slim a.pt slim.pt
0 slim a.pt slim.pt --force
0 delta plain.safetensors other.pt changed.safetensors
0 apply plain.safetensors changed.safetensors newer.safetensors
0 verify newer.safetensors --against other.pt
0 split plain.safetensors ranks/ --ranks 2 --as dtensor --device cpu
0 merge ranks/ merged.safetensors
0 average a.pt b.pt mean.pt
0 scan . --allow *
0 report a.pt page.html
0 inspect a.pt --html inspected.html
0 rename-keys plain.safetensors renamed.safetensors --map ^layer=block
0 convert plain.safetensors mapped.safetensors --map rules.toml
0 convert a.pt parts.pt --dtype fp16 --part 2/2
0 convert a.pt parts.pt --dtype fp16 --part 1/2
2 finish parts.pt
0 convert a.pt in-parts/ --shard-size 1MB --part 1/2
0 convert a.pt in-parts/ --shard-size 1MB --part 2/2
2 convert a.pt aux.safetensors
2 convert a.pt NUL/ --to safetensors-sharded
2 convert a.pt model.pt.
2 convert a.pt stream.pt:hidden.pt
"""

# The input is the output, or lies in the same folder: what is open has to be closed before.
IN_PLACE = """
0 strip-prefix a.pt a.pt --force
0 rename-keys plain.safetensors plain.safetensors --force --map layer=block
0 convert shards/ shards/ --force --dtype bf16
0 rename-keys shards shards --force --map layer=part
0 convert torch-shards/ torch-shards/ --force --to torch-sharded --dtype bf16
1 rename-keys shards shards --force --map nothing=else
0 verify shards
0 inspect shards --json
0 slim --in-place run --keep-newest 1 --drop optimizer
"""


def words_of(text: str) -> list[tuple[int, list[str]]]:
    return [(int(line[0]), line[2:].split()) for line in text.strip().splitlines()]


def ran(folder: Path, commands: list[tuple[int, list[str]]], *half: str) -> None:
    """Run commands in one process, as `half` says; raise AssertionError for one that ends otherwise."""
    given: Any = {
        "cwd": folder,
        "input": json.dumps([words for _, words in commands]).encode(),
        "timeout": 100,
    }
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CKPTTOOL_DEBUG": ""}
    program = [sys.executable, "-m", "tests.support.without_posix", *half]
    done = subprocess.run(program, env=env, capture_output=True, **given)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    results = json.loads(done.stdout)
    wrong = [
        (words, code, out, err)
        for (expected, words), (code, out, err) in zip(commands, results, strict=True)
        if code != expected or "Traceback" in err
    ]
    assert not wrong, "\n".join(map(str, wrong))


def written(folder: Path) -> dict[str, str]:
    """Return the digests of all files in a folder, but for the lock of a run."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".ckpttool.lock")
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def in_folder(inputs: Path, folder: Path, *half: str) -> dict[str, str]:
    """Run all commands; return what was written by them."""
    shutil.copytree(inputs, folder)
    commands = words_of(COMMANDS)
    ran(folder, commands if half else [each for each in commands if each[0] != 2], *half)
    for name, source in (("step-1.pt", "b.pt"), ("step-2.pt", "back.pt"), ("step-3.pt", "b.pt")):
        (folder / "run" / name).write_bytes((folder / source).read_bytes())
        os.utime(folder / "run" / name, ns=(10**18, int(name[5]) * 10**17))
    ran(folder, words_of(IN_PLACE), *half)
    return written(folder)


@pytest.mark.long
@pytest.mark.skipif(not system.IS_POSIX, reason="there is one half alone")
def test_both_halves_write_the_same_bytes(tmp_path: Path) -> None:
    (inputs := tmp_path / "inputs").mkdir()
    write_inputs(inputs)
    usual = in_folder(inputs, tmp_path / "posix")
    other = in_folder(inputs, tmp_path / "windows", "windows")
    assert other == usual
    assert len(usual) == 30
    assert os.stat(tmp_path / "windows" / "run" / "step-1.pt").st_mtime_ns == 10**17


@pytest.mark.skipif(system.IS_POSIX, reason="`make long` runs the test above here, which compares bytes too")
def test_all_commands_end_as_they_should_on_windows(tmp_path: Path) -> None:
    (inputs := tmp_path / "inputs").mkdir()
    write_inputs(inputs)
    assert len(in_folder(inputs, tmp_path / "windows", "itself")) == 30


def test_both_halves_have_the_same_names() -> None:
    """But for constants of the kernel, which POSIX alone has."""
    values = {name: value for name, value in vars(system).items() if not name.startswith("_")}
    names = {name for name, value in values.items() if callable(value) and not isinstance(value, type)}
    assert len(names) > 20
    assert not {name for name in names if not hasattr(windows, name)}


FIT = [
    *("model.pt", r"C:\models\a.pt", "C:/models/a.pt", r"\\server\share\a.pt", r"\\?\C:\a.pt", "out/", ".."),
    *("./a", "auxiliary.pt", "con-1.pt", "com10.pt", "a.aux", ".hidden", "é→×.pt", "a b.pt"),
]
DEVICES = [
    "aux",
    "AUX.pt",
    "nul.tar.gz",
    r"C:\x\con\a.pt",
    "com1.safetensors",
    "LPT9",
    "com¹",
    "prn .pt",
    "out/nul",
]
UNFIT = {
    "device": DEVICES,
    "character": ["ab:c.pt", r"C:\x\a.pt:stream", "what?.pt", "a*.pt", 'a".pt', "a|b", "a<b", "a\n.pt"],
    "dot or a space": ["a.", "a ", "folder./a.pt", "a.pt. ", "..."],
}


@pytest.mark.parametrize("path", FIT)
def test_a_usual_name_is_fit(path: str) -> None:
    assert windows.unfit_name(path) is None


@pytest.mark.parametrize(("why", "path"), [(why, path) for why, paths in UNFIT.items() for path in paths])
def test_a_name_that_windows_takes_for_something_else_is_refused(why: str, path: str) -> None:
    assert why in windows.unfit_name(path)


LONG = "x" * 200


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        (r"C:\a.pt", r"C:\a.pt"),
        ("C:/a/b.pt", "C:/a/b.pt"),
        (f"C:/a/../{LONG}.pt", rf"\\?\C:\{LONG}.pt"),
        (f"C:\\{LONG}\\", rf"\\?\C:\{LONG}" + "\\"),
        (rf"\\server\share\{LONG}", rf"\\?\UNC\server\share\{LONG}"),
        (rf"\\?\C:\{LONG}", rf"\\?\C:\{LONG}"),
    ],
)
def test_a_long_path_gets_the_prefix_that_lifts_the_limit(path: str, taken: str) -> None:
    assert windows.local(path) == taken


def test_urls_have_slashes_and_drives_are_no_schemes() -> None:
    assert windows.join("hf://owner/name", "model.safetensors") == "hf://owner/name/model.safetensors"
    assert windows.join("https://host/a/", "b") == "https://host/a/b"
    assert windows.join("folder", "b") == os.path.join("folder", "b")
    assert windows.path_of_url("/C:/x/a.pt") == "C:/x/a.pt"
    assert not any(map(is_url, (r"C:\x.pt", "C:/x.pt", "C://x.pt", "d:x.pt")))
    assert is_url("hf://owner/name")


def test_bytes_at_a_place_leave_the_position_and_other_threads_alone(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    fd = os.open(path, system.CREATE)
    try:
        other = os.dup(fd)  # shares the position

        def move(number: int) -> bool:
            data, at = bytes([number]) * 1000, number * 1000
            assert windows.pwrite(fd if number % 2 else other, data, at) == 1000
            room = bytearray(1000)
            assert windows.preadv(other, [memoryview(room)], at) == 1000
            return bytes(room) == data == windows.pread(fd, 1000, at)

        os.write(fd, b"abc")
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(move, range(1, 200)))
        assert os.lseek(fd, 0, os.SEEK_CUR) == 3
        assert windows.pread(fd, 10, 10**6) == b""
        os.close(other)
    finally:
        os.close(fd)
    assert path.stat().st_size == 200_000


def test_a_folder_and_a_file_are_locked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if system.IS_POSIX:
        import fcntl

        monkeypatch.setitem(sys.modules, "msvcrt", msvcrt_of(fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB))
    first = windows.lock_folder(str(tmp_path))
    with pytest.raises(BlockingIOError):
        windows.lock_folder(str(tmp_path))
    os.close(first)
    os.close(windows.lock_folder(str(tmp_path)))
    nothing = windows.hold_folder(str(tmp_path))
    with pytest.raises(OSError) as fault:  # a folder that is written has no lock, so nobody removes it
        windows.lock(nothing)
    assert not isinstance(fault.value, BlockingIOError)
    os.close(nothing)


def test_what_stays_open_elsewhere_is_named_and_both_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuses(*given: str) -> None:
        tried.append(given)
        raise PermissionError(13, "Access is denied")

    monkeypatch.setattr(os, "replace", refuses)
    monkeypatch.setattr(windows.time, "sleep", lambda _: None)
    with pytest.raises(
        PermissionError, match="another program has it open, or this one has it mapped"
    ) as fault:
        windows.replace(str(tmp_path / "new"), str(tmp_path / "old"))
    assert fault.value.filename == str(tmp_path / "old")
    assert len(tried) > 3


@pytest.mark.parametrize("encoding", ["cp1252", "cp437"])
def test_a_console_that_lacks_characters_gets_them_escaped(encoding: str, tmp_path: Path) -> None:
    header = {"ключ→×": {"dtype": "U8", "shape": [2, 1], "data_offsets": [0, 2]}}
    safetensors_file(tmp_path / "a.safetensors", header, b"ab")
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "0"}
    for words, code in (("inspect a.safetensors -v", 0), ("strip-prefix a.safetensors ключ→×.txt", 2)):
        command = [sys.executable, "-m", "ckpttool", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60)
        said = (done.stdout + done.stderr).decode(encoding)
        assert (done.returncode, "Traceback" in said) == (code, False), said
        assert "\\u043a\\u043b" in said


def test_standard_input_is_bytes_whatever_line_breaks_are_in_it(tmp_path: Path) -> None:
    """A Windows text stream changes CRLF, and ends at Ctrl-Z."""
    raw = b"\r\n\x1a\n" * 4
    header = {"w": {"dtype": "U8", "shape": [len(raw)], "data_offsets": [0, len(raw)]}}
    path = safetensors_file(tmp_path / "a.safetensors", header, raw)

    def digest(name: str, **given: Any) -> bytes:
        command = [sys.executable, "-m", "ckpttool", "digest", name]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60, **given)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[0]

    usual = digest("a.safetensors")
    assert digest("-", input=path.read_bytes()) == usual
    with open(path, "rb") as file:
        assert digest("-", stdin=file) == usual


@pytest.mark.skipif(not system.IS_POSIX, reason="there is one half alone")
def test_the_trainer_says_that_it_needs_posix(tmp_path: Path) -> None:
    code = "from tests.support.without_posix import take_away; take_away(); import train"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: the trainer runs on Linux\nhint: on Windows, run it in WSL\n"
