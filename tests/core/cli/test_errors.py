"""What goes wrong on the command line: one line, an exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.core import cli as command_line
from ckpttool.core import formats
from tests.support.running import Ran

ONE = torch.ones(1)


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    torch.save({"module.a": ONE}, "in.pt")


def assert_one_line(ran: Ran, code: int, *words: object) -> None:
    """An error as people should see it: the line, perhaps a hint, and nothing else."""
    lines = ran.err.splitlines()
    assert ran.code == code, ran.err
    assert lines[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in lines[1:]), ran.err
    assert len(lines) <= 2
    assert len(lines[0]) < 600
    for word in words:
        assert str(word) in ran.err
    assert "\x1b" not in ran.err
    assert ran.out == ""


# Inputs.

COMMANDS = [
    "inspect IN",
    "strip-prefix IN out.pt",
    "doctor IN --model torch.nn:Identity",
    "reload IN --model torch.nn:Identity",
]


def cut(path: Path, save: Any = torch.save, **given: Any) -> None:
    save({"module.a": torch.ones(100)}, path, **given)
    path.write_bytes(path.read_bytes()[:-100])


def content(raw: bytes) -> Any:
    return lambda path: path.write_bytes(raw)


UNREADABLE: dict[str, tuple[Any, str, str]] = {
    "missing": (lambda path: None, "missing.pt", "missing.pt: no such file"),
    "a folder": (lambda path: path.mkdir(), "folder", "is a folder"),
    "empty": (content(b""), "x.pt", "copy it again"),
    "text": (content(b"hello"), "x.pt", "x.pt: is not a checkpoint"),
    "a page": (content(b"<!doctype html>"), "x.pt", "download the file again"),
    "an LFS pointer": (content(b"version https://git-lfs.github.com/spec/v1\n"), "x.pt", "git lfs pull"),
    "a plain pickle": (content(b"\x80\x02}."), "x.pt", "running it: python -m pickletools "),
    "a zip cut short": (cut, "x.pt", "x.pt: is cut short"),
    "a legacy file cut short": (
        lambda path: cut(path, _use_new_zipfile_serialization=False), "x.pth", "is cut short in storage"
    ),
    "safetensors cut short": (lambda path: cut(path, save_file), "x.safetensors", "x.safetensors:"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", UNREADABLE)
def test_an_input_that_can_t_be_read_is_one_line_and_exit_3(what: str, command: str, cli: Any) -> None:
    make, path, words = UNREADABLE[what]
    make(Path(path))
    before = sorted(os.listdir())
    ran = cli(command.replace("IN", path))
    assert_one_line(ran, 3, path, words)
    assert "ckpttool inspect" not in ran.err, "which can't read it either"
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_with_json_an_error_is_an_object_and_a_line(command: str, cli: Any, here: Path) -> None:
    ran = cli(command.replace("IN", f"{here}/missing.pt") + " --json")
    assert ran.code == 3
    message, hint = f"{here}/missing.pt: no such file", f"the folder {here} has in.pt"
    error = {"kind": "unreadable", "message": message, "hint": hint}
    assert ran.json == {"schema": 1, "error": error}
    assert ran.err == f"error: {message}\nhint: {hint}\n"


def test_with_the_output_on_stdout_the_object_goes_where_the_result_would(cli: Any) -> None:
    ran = cli("slim missing.pt - --json")
    assert (ran.code, ran.out) == (3, "")
    assert json.loads(ran.err)["error"]["kind"] == "unreadable"


def test_quiet_is_not_silent_about_errors(cli: Any) -> None:
    assert_one_line(cli("inspect missing.pt -q"), 3, "no such file")


NEAR = {
    "a letter amiss": ("runs/last.pth", "did you mean runs/last.pt?"),
    "another name": ("runs/epoch9.ckpt", "the folder runs has best.safetensors, last.pt"),
    "no folder": ("nosuch/deep/last.pt", "there is no folder nosuch"),
    "no folder in a folder": ("runs/7/last.pt", "there is no folder runs/7"),
    "nothing like it": ("empty/last.pt", "see what is there: ls empty"),
    "here": ("last", "see what is there: ls ."),
}


@pytest.mark.parametrize("what", NEAR)
def test_a_missing_file_hints_at_similar_files(what: str, cli: Any) -> None:
    os.remove("in.pt")
    for made in ("runs/last.pt", "runs/best.safetensors", "runs/notes.txt", "empty/x"):
        Path(made).parent.mkdir(exist_ok=True)
        Path(made).touch()
    path, hint = NEAR[what]
    assert_one_line(cli("inspect", path), 3, f"error: {path}: no such file\nhint: {hint}\n")
    assert_one_line(cli("verify runs/last.pt --against", path), 3)


def test_a_folder_without_a_checkpoint_hints_at_files(cli: Any) -> None:
    Path("runs").mkdir()
    Path("runs/LICENSE").touch()
    hint = "hint: expected in it: *.index.json (shards), .metadata (DCP) or the files of all ranks"
    assert cli("inspect runs").err.endswith(f"{hint}\n")
    for below in ("notes", "step 5/actor", "step-6"):
        Path("runs", below).mkdir(parents=True)
    assert cli("inspect runs").err.endswith(f"{hint}\n")
    Path("runs/step-6/.metadata").touch()
    Path("runs/step 5/model_world_size_2_rank_0.pt").touch()
    for command in ("inspect runs", "merge runs out.pt"):
        hint = "hint: name one (others: 'runs/step 5'): ckpttool inspect runs/step-6"
        assert cli(command).err.endswith(f"{hint}\n")
    Path("runs/last.pt").touch()
    hint = "hint: name one (others: runs/step-6, 'runs/step 5'): ckpttool inspect runs/last.pt"
    assert cli("inspect runs").err.endswith(f"{hint}\n")


@pytest.mark.parametrize(
    "command", ["inspect IN", "digest IN", "verify IN", "slim IN o.pt", "convert IN o.safetensors"]
)
def test_a_missing_state_hints_the_states_of_the_file(command: str, cli: Any) -> None:
    torch.save({"model": {"a": ONE}, "ema": {"net": {"a": ONE}}}, "in.pt")
    ran = cli(command.replace("IN", "in.pt") + " --state nosuch")
    assert_one_line(ran, 3, "holds no state named 'nosuch'", "hint: there are: model, ema.net")


# Wrong calls.

USAGE = {
    "no such command": "frobnicate",
    "no such option": "inspect x.pt --frobnicate",
    "too few arguments": "strip-prefix x.pt",
    "too many arguments": "strip-prefix x.pt y.pt z.pt",
    "a value missing": "strip-prefix x.pt y.pt --prefix",
    "an option missing": "reload x.pt",
    "a map missing": "rename-keys x.pt y.pt",
    "a malformed shape": "reload x.pt --model m:f --input-shape 1,a",
    "a shape of other digits": "reload x.pt --model m:f --input-shape 1,²",
    "an empty shape": "reload x.pt --model m:f --input-shape ''",
}


@pytest.mark.parametrize("what", USAGE)
def test_a_wrong_call_is_one_line_and_exit_2_with_json_an_object(what: str, cli: Any) -> None:
    ran = cli(USAGE[what])
    assert_one_line(ran, 2, *(["--map"] if what == "a map missing" else []))
    assert "--help" in ran.err
    ran = cli(f"{USAGE[what]} --json") if what != "a value missing" else cli("inspect --json")
    assert (ran.code, ran.json["error"]["kind"]) == (2, "usage")


@pytest.mark.parametrize(
    ("command", "line", "said"),
    [
        ("convert x.pt y.pt --complex", 1, "hint: ckpttool convert --help"),
        ("optimizer a.pt b.pt", 0, "error: Missing option '--to'. Choose from: names, indices, flat"),
        ("-q digest two.pt", 1, "hint: options follow the command: ckpttool COMMAND -q"),
    ],
)
def test_a_wrong_call_is_told_what_is_right(command: str, line: int, said: str, cli: Any) -> None:
    ran = cli(command)
    assert (ran.code, ran.err.splitlines()[line]) == (2, said)


def test_no_command_at_all_shows_the_help_and_exits_2(cli: Any) -> None:
    ran = cli()
    assert (ran.code, ran.err) == (2, "")
    assert ran.out.startswith("Usage: ckpttool")
    assert "strip-prefix" in ran.out


# Outputs.

REFUSED_OUTPUTS = {
    "a name without ending": ("out", "for a DCP folder: ckpttool convert IN out --to dcp"),
    "an ending of nobody": ("out.xyz", "its ending does not say which format"),
    "a folder that is not there": ("missing/out.pt", "there is no folder"),
    "a folder": ("folder.pt", "already exists"),
    "an existing file": ("old.pt", "hint: write it anyway with --force"),
}


@pytest.mark.parametrize("command", ["strip-prefix", "add-prefix"])
@pytest.mark.parametrize("what", REFUSED_OUTPUTS)
def test_an_output_that_can_t_be_written_is_exit_2(what: str, command: str, cli: Any, here: Path) -> None:
    Path("folder.pt").mkdir()
    Path("old.pt").write_bytes(b"old")
    out, words = REFUSED_OUTPUTS[what]
    before = sorted(here.rglob("*"))
    assert_one_line(cli(command, "in.pt", out), 2, out, words)
    assert sorted(here.rglob("*")) == before
    assert Path("old.pt").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("in.pt", "write it anyway with --force"),
        (".", "name a new folder, or a file in it"),
        (". --to torch-zip", "name a file in it"),
        ("in.pt --to dcp", "name a new folder"),
    ],
)
def test_the_hint_for_an_output_is_one_that_helps(output: str, hint: str, cli: Any) -> None:
    ran = cli(f"convert in.pt {output}")
    assert ran.code == 2 and ran.err.splitlines()[1] == f"hint: {hint}"


@pytest.mark.parametrize("flag", ["--dry-run", "--force"])
@pytest.mark.parametrize("out", ["no dir/deep/x.pt", "no dir/deep/shards/"])
def test_an_output_in_a_missing_folder_hints_the_command_that_makes_it(out: str, flag: str, cli: Any) -> None:
    ran = cli("strip-prefix in.pt", out, flag)
    assert_one_line(ran, 2, f"error: {out}: there is no folder no dir/deep\nhint: mkdir -p 'no dir/deep'")
    assert os.listdir() == ["in.pt"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("strip-prefix in.pt out.safetensors", "out.safetensors: file too large"),
        ("convert in.pt out/", "out/: file too large"),
        ("convert in.pt out --to dcp", "out: file too large"),
        ("verify z.pt", "file too large"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(words: str, said: str, warm_python: Any) -> None:
    torch.save({"module.a": torch.ones(1 << 18)}, "in.pt")
    with zipfile.ZipFile("in.pt") as plain, zipfile.ZipFile("z.pt", "w", zipfile.ZIP_DEFLATED) as zipped:
        for record in plain.namelist():
            zipped.writestr(record, plain.read(record))
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999)); "
    ran = warm_python.run("-c", limited + "from ckpttool.core.cli import main; main()", *words.split())
    assert_one_line(Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode()), 3, said)
    assert sorted(os.listdir()) == ["in.pt", "z.pt"]


# Files that mean harm.


def test_nothing_in_messages_steers_the_terminal(cli: Any, here: Path) -> None:
    key = "\x1b[31m\x07\n\r\u202e\ud800"
    torch.save({key: ONE, "module." + key: ONE}, "in.pt")
    assert_one_line(cli("strip-prefix in.pt out.pt"), 3, r"\x1b[31m\x07\n\r\u202e\ud800")
    assert_one_line(cli("inspect", "\x1b[31m\nmissing"), 3, r"\x1b[31m\nmissing: no such file")
    ran = cli("inspect", os.fsdecode(os.fsencode(here) + b"/\xff.pt"), "--json")
    assert ran.code == 3 and ran.json["error"]["kind"] == "unreadable"


# Errors of this program, and of the machine.


def test_a_bug_of_this_program_is_not_hidden(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a bug")

    monkeypatch.setattr(command_line.program, "group", broken)
    with pytest.raises(AssertionError, match="a bug"):
        cli("inspect x")


def test_the_whole_traceback_is_shown_when_asked_for(process: Any) -> None:
    ran = process("inspect", "missing.pt", env={"CKPTTOOL_DEBUG": "1"})
    assert b"Traceback" in ran.stderr
    assert b"Unreadable" in ran.stderr


def test_an_interrupt_exits_130(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(formats, "open", interrupted)
    ran = cli("inspect x")
    assert (ran.code, ran.err.strip()) == (130, "interrupted")


def on_a_terminal(path: str, environment: dict[str, str]) -> str:
    """Return what `inspect` says of a missing file on a terminal."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "ckpttool", "inspect", path]
    env = os.environ | environment
    subprocess.run(command, stderr=there, stdout=subprocess.DEVNULL, env=env, timeout=30, check=False)
    os.close(there)
    said = os.read(here, 10_000).decode()
    os.close(here)
    return said


@pytest.mark.parametrize("off", [{}, {"NO_COLOR": "1"}], ids=["colour", "no colour"])
def test_colour_is_for_terminals_without_NO_COLOR(off: dict[str, str], monkeypatch: Any) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert ("\x1b[" in on_a_terminal("missing.pt", off)) == (not off)


def test_a_path_in_an_error_is_not_broken_by_a_narrow_terminal() -> None:
    path = "missing/" + "x" * 90 + ".pt"
    said = on_a_terminal(path, {"COLUMNS": "40"})
    assert path in said and "no such file" in said
