"""What goes wrong on the command line: one line, an exit code, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool import cli as command_line
from ckpttool import errors
from ckpttool.cli import failure
from tests.support.crafting import call, dict_of, name, storage, tensor, text, torch_zip
from tests.support.running import Ran

COMMANDS = {"inspect": 1, "strip-prefix": 2, "add-prefix": 2, "reload": 1}


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


def arguments(command: str, path: object, out: object) -> list[object]:
    more = [out] if COMMANDS[command] == 2 else []
    return [command, path, *more, *(["--model", "torch.nn:Identity"] if command == "reload" else [])]


def missing(folder: Path) -> Path:
    return folder / "missing.pt"


def a_folder(folder: Path) -> Path:
    return folder


def content(raw: bytes) -> Any:
    def write(folder: Path) -> Path:
        (folder / "in.pt").write_bytes(raw)
        return folder / "in.pt"

    return write


def cut(suffix: str, legacy: bool = False) -> Any:
    def write(folder: Path) -> Path:
        path = folder / f"in{suffix}"
        if suffix == ".safetensors":
            save_file({"module.a": torch.ones(100)}, path)
        else:
            torch.save({"module.a": torch.ones(100)}, path, _use_new_zipfile_serialization=not legacy)
        path.write_bytes(path.read_bytes()[:-100])
        return path

    return write


UNREADABLE: dict[str, tuple[Any, str]] = {
    "missing": (missing, "missing.pt: no such file"),
    "a folder": (a_folder, "is a folder"),
    "empty": (content(b""), "in.pt: is empty"),
    "text": (content(b"hello"), "in.pt: is not a checkpoint"),
    "a page": (content(b"<!doctype html>"), "HTML page"),
    "an LFS pointer": (content(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "a plain pickle": (content(b"\x80\x02}."), "running it: python -m pickletools "),
    "a zip cut short": (cut(".pt"), "in.pt: is cut short"),
    "a legacy file cut short": (cut(".pth", legacy=True), "is cut short in storage"),
    "safetensors cut short": (cut(".safetensors"), "in.safetensors:"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", UNREADABLE)
def test_an_input_that_can_t_be_read_is_one_line_and_exit_3(
    what: str, command: str, cli: Any, tmp_path: Path
) -> None:
    make, words = UNREADABLE[what]
    path = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    ran = cli(*arguments(command, path, tmp_path / "out.pt"))
    assert_one_line(ran, 3, path, words)
    assert "ckpttool inspect" not in ran.err, "which can't read it either"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_with_json_an_error_is_an_object_and_a_line(command: str, cli: Any, tmp_path: Path) -> None:
    ran = cli(*arguments(command, tmp_path / "missing.pt", tmp_path / "out.pt"), "--json")
    assert ran.code == 3
    message, hint = f"{tmp_path}/missing.pt: no such file", f"see what is there: ls {tmp_path}"
    assert ran.json == {"error": {"kind": "unreadable", "message": message, "hint": hint}}
    assert ran.err == f"error: {message}\nhint: {hint}\n"


def test_with_the_output_on_stdout_the_object_goes_where_the_result_would(cli: Any, tmp_path: Path) -> None:
    ran = cli("slim", tmp_path / "missing.pt", "-", "--json")
    assert (ran.code, ran.out) == (3, "")
    assert json.loads(ran.err)["error"]["kind"] == "unreadable"


def test_the_hint_for_an_output_that_exists_is_one_that_helps(cli: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "in.pt")
    hints = {
        (): "write it anyway with --force",
        (tmp_path,): "name a new folder, or a file in it",
        (tmp_path, "--to", "torch-zip"): "name a file in it",
        (tmp_path / "in.pt", "--to", "dcp"): "name a new folder",
    }
    for output, hint in hints.items():
        ran = cli("convert", tmp_path / "in.pt", *(output or (tmp_path / "in.pt",)))
        assert (ran.code, ran.err.splitlines()[1]) == (2, f"hint: {hint}")


def test_quiet_is_not_silent_about_errors(cli: Any, tmp_path: Path) -> None:
    assert_one_line(cli("inspect", tmp_path / "missing.pt", "-q"), 3, "no such file")


USAGE: dict[str, list[str]] = {
    "no such command": ["frobnicate"],
    "no such option": ["inspect", "x.pt", "--frobnicate"],
    "too few arguments": ["strip-prefix", "x.pt"],
    "too many arguments": ["strip-prefix", "x.pt", "y.pt", "z.pt"],
    "a value missing": ["strip-prefix", "x.pt", "y.pt", "--prefix"],
    "an option missing": ["reload", "x.pt"],
    "a malformed shape": ["reload", "x.pt", "--model", "m:f", "--input-shape", "1,a"],
    "a shape of other digits": ["reload", "x.pt", "--model", "m:f", "--input-shape", "1,²"],
    "an empty shape": ["reload", "x.pt", "--model", "m:f", "--input-shape", ""],
}


@pytest.mark.parametrize("what", USAGE)
def test_a_wrong_call_is_one_line_and_exit_2(what: str, cli: Any) -> None:
    ran = cli(*USAGE[what])
    assert_one_line(ran, 2)
    assert "--help" in ran.err


@pytest.mark.parametrize("what", USAGE)
def test_a_wrong_call_with_json_is_an_object(what: str, cli: Any) -> None:
    ran = cli(*USAGE[what], "--json") if what != "a value missing" else cli("inspect", "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (2, "usage")


def test_a_missing_value_hints_the_help_of_its_command(cli: Any) -> None:
    ran = cli("convert", "x.pt", "y.pt", "--complex")
    assert ran.err.splitlines()[1] == "hint: ckpttool convert --help"


def test_no_command_at_all_shows_the_help_and_exits_2(cli: Any) -> None:
    ran = cli()
    assert (ran.code, ran.err) == (2, "")
    assert ran.out.startswith("Usage: ckpttool")
    assert "strip-prefix" in ran.out


REFUSED_OUTPUTS = {
    "a name without ending": ("out", "does not say which format"),
    "an ending of nobody": ("out.xyz", "does not say which format"),
    "a folder that is not there": ("missing/out.pt", "there is no folder"),
    "a folder": ("folder.pt", "already exists"),
    "an existing file": ("old.pt", "--force"),
}


@pytest.mark.parametrize("command", ["strip-prefix", "add-prefix"])
@pytest.mark.parametrize("what", REFUSED_OUTPUTS)
def test_an_output_that_can_t_be_written_is_exit_2(what: str, command: str, cli: Any, tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1)}, tmp_path / "in.pt")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "old.pt").write_bytes(b"old")
    out, words = REFUSED_OUTPUTS[what]
    before = sorted(tmp_path.rglob("*"))
    assert_one_line(cli(command, tmp_path / "in.pt", tmp_path / out), 2, tmp_path / out, words)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "old.pt").read_bytes() == b"old"


@pytest.mark.parametrize("flag", ["--dry-run", "--force"])
def test_an_output_in_a_missing_folder_hints_the_command_that_makes_it(
    flag: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module.a": torch.ones(1)}, "in.pt")
    for out in ("no dir/deep/x.pt", "no dir/deep/shards/"):
        ran = cli("strip-prefix", "in.pt", out, flag)
        assert_one_line(ran, 2, f"error: {out}: there is no folder no dir/deep\nhint: mkdir -p 'no dir/deep'")
    assert os.listdir() == ["in.pt"]


NEAR = {
    "a letter amiss": ("runs/last.pth", "did you mean runs/last.pt?"),
    "another name": ("runs/epoch9.ckpt", "the folder runs has best.safetensors, last.pt"),
    "no folder": ("nosuch/deep/last.pt", "there is no folder nosuch"),
    "no folder in a folder": ("runs/7/last.pt", "there is no folder runs/7"),
    "nothing like it": ("empty/last.pt", "see what is there: ls empty"),
    "here": ("last", "see what is there: ls ."),
}


@pytest.mark.parametrize("what", NEAR)
def test_a_missing_file_hints_at_similar_files(what: str, cli: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for made in ("runs/last.pt", "runs/best.safetensors", "runs/notes.txt", "empty/x"):
        Path(made).parent.mkdir(exist_ok=True)
        Path(made).touch()
    path, hint = NEAR[what]
    assert_one_line(cli("inspect", path), 3, f"error: {path}: no such file\nhint: {hint}\n")
    assert_one_line(cli("verify", "runs/last.pt", "--against", path), 3)


def test_a_folder_without_a_checkpoint_hints_at_files(cli: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/LICENSE").touch()
    hint = "hint: expected in it: *.index.json (shards), .metadata (DCP) or the files of all ranks"
    assert cli("inspect", "runs").err.endswith(f"{hint}\n")
    for below in ("notes", "step 5/actor", "step-6"):
        Path("runs", below).mkdir(parents=True)
    assert cli("inspect", "runs").err.endswith(f"{hint}\n")
    Path("runs/step-6/.metadata").touch()
    Path("runs/step 5/model_world_size_2_rank_0.pt").touch()
    for command in (["inspect", "runs"], ["merge", "runs", "out.pt"]):
        hint = "hint: name one: ckpttool inspect runs/step-6; others: 'runs/step 5'"
        assert cli(*command).err.endswith(f"{hint}\n")
    Path("runs/last.pt").touch()
    hint = "hint: name one: ckpttool inspect runs/last.pt; others: runs/step-6, 'runs/step 5'"
    assert cli("inspect", "runs").err.endswith(f"{hint}\n")


def test_a_missing_state_hints_the_states_of_the_file(cli: Any, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1)}
    torch.save({"model": tensors, "ema": {"net": dict(tensors)}}, tmp_path / "in.pt")
    for command in (["inspect"], ["digest"], ["slim"]):
        out = [tmp_path / "out.pt"] if command == ["slim"] else []
        ran = cli(*command, tmp_path / "in.pt", *out, "--state", "nosuch")
        assert_one_line(ran, 3, "holds no state named 'nosuch'", "hint: there are: model, ema.net")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_that_is_interrupted_leaves_no_file_behind(number: int, tmp_path: Path) -> None:
    slow = f"""
import os, sys
from ckpttool import cli
from ckpttool.files import copying
whole = copying.Output.copy
def copy(self, range):
    whole(self, range)
    os.kill(os.getpid(), {int(number)})  # in the middle of writing
copying.Output.copy = copy
sys.argv = ["ckpttool", "convert", "in.pt", "out.pt"]
cli.main()
"""
    torch.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "in.pt")
    command = [sys.executable, "-c", slow]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == -number
    assert ran.stderr.split() == (["interrupted"] if number == signal.SIGINT else [])
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_a_folder_with_other_files_is_not_replaced_even_by_force(cli: Any, tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1)}, tmp_path / "in.pt")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "folder.pt" / "diary.txt").write_text("dear diary")
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "folder.pt", "--force")
    assert_one_line(ran, 2, "holds other files too (diary.txt)")
    assert (tmp_path / "folder.pt" / "diary.txt").read_text() == "dear diary"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("strip-prefix IN OUT.safetensors", "out.safetensors: file too large"),
        ("convert IN OUT/", "out/: file too large"),
        ("convert IN OUT --to dcp", "out: file too large"),
        ("verify ZIPPED", "file too large"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(words: str, said: str, tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1 << 18)}, tmp_path / "in.pt")
    with (
        zipfile.ZipFile(tmp_path / "in.pt") as plain,
        zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as zipped,
    ):
        for name in plain.namelist():
            zipped.writestr(name, plain.read(name))
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999)); "
    limited += "from ckpttool.cli import main; main()"
    for short, name in (("IN", "in.pt"), ("ZIPPED", "z.pt"), ("OUT", "out")):
        words = words.replace(short, str(tmp_path / name))
    command = [sys.executable, "-c", limited, *words.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_one_line(Ran(ran.returncode, ran.stdout, ran.stderr), 3, said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "z.pt"]


def test_keys_in_messages_can_t_steer_the_terminal(cli: Any, tmp_path: Path) -> None:
    key = "\x1b[31m\x07\n\r\u202e\ud800"
    torch.save({key: torch.ones(1), "module." + key: torch.ones(1)}, tmp_path / "in.pt")
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt")
    assert_one_line(ran, 3, r"\x1b[31m\x07\n\r\u202e\ud800")


def test_names_of_files_in_messages_can_t_steer_the_terminal(cli: Any, tmp_path: Path) -> None:
    assert_one_line(cli("inspect", tmp_path / "\x1b[31m\nmissing"), 3, r"\x1b[31m\nmissing: no such file")


def test_a_file_name_that_is_not_unicode_is_reported_in_json(process: Any, tmp_path: Path) -> None:
    ran = process("inspect", os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt"), "--json")
    assert ran.returncode == 3 and json.loads(ran.stdout)["error"]["kind"] == "unreadable"


def test_a_bug_of_this_program_is_not_hidden(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a bug")

    monkeypatch.setattr(command_line.program, "group", broken)
    with pytest.raises(AssertionError, match="a bug"):
        cli("inspect", "x")


def test_the_whole_traceback_is_shown_when_asked_for(process: Any, tmp_path: Path) -> None:
    ran = process("inspect", tmp_path / "missing.pt", env={"CKPTTOOL_DEBUG": "1"})
    assert b"Traceback" in ran.stderr
    assert b"Unreadable" in ran.stderr


@pytest.mark.parametrize(
    "error, code",
    [
        (MemoryError(), 3),
        (OSError(28, "No space left on device", "out.pt"), 3),
        (errors.CkptToolError("x"), 3),
        (errors.Damaged("f", "x"), 3),
        (errors.NothingToDo("x"), 1),
        (errors.Mismatch("x"), 1),
        (errors.UsageFault("x"), 2),
        (errors.OutputExists("x"), 2),
        (errors.Collision("x"), 3),
        (click.UsageError("x"), 2),
    ],
    ids=repr,
)
def test_every_expected_error_has_its_exit_code(error: BaseException, code: int, capsys: Any) -> None:
    assert failure.fail(error, as_json=False) == code
    label = "nothing to do: " if isinstance(error, errors.NothingToDo) else "error: "
    assert capsys.readouterr().err.startswith(label)


def test_every_class_of_errors_has_a_kind_of_its_own() -> None:
    def family(cls: type) -> list[type]:
        return [cls, *(sub for child in cls.__subclasses__() for sub in family(child))]

    classes = family(errors.CkptToolError)
    own = [cls for cls in classes if cls.__module__.startswith("ckpttool.") and cls.__name__[0] != "_"]
    kinds = [cls.kind for cls in own if cls is not errors.FileError]  # type: ignore[attr-defined]
    assert len(kinds) == len(set(kinds))


def test_an_interrupt_exits_130(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ckpttool.formats, "open", interrupted)
    ran = cli("inspect", "x")
    assert (ran.code, ran.err.strip()) == (130, "interrupted")


def on_a_terminal(env: dict[str, str], *arguments: object) -> bytes:
    """What a command writes to a terminal on stderr."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "ckpttool", *map(str, arguments)]
    with subprocess.Popen(command, stderr=there, stdout=subprocess.DEVNULL, env=os.environ | env) as running:
        running.wait(30)
    os.close(there)
    said = os.read(here, 10_000)
    os.close(here)
    return said


def test_colour_is_for_terminals_without_NO_COLOR(tmp_path: Path) -> None:
    os.environ.pop("NO_COLOR", None)
    assert b"\x1b[" in on_a_terminal({}, "inspect", tmp_path / "missing.pt")
    assert b"\x1b[" not in on_a_terminal({"NO_COLOR": "1"}, "inspect", tmp_path / "missing.pt")


@pytest.mark.parametrize(
    "arguments", [["inspect", "in.pt"], ["strip-prefix", "in.pt", "-"]], ids=lambda a: a[0]
)
def test_a_reader_that_stops_early_ends_the_command(arguments: list[str], tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1)}, tmp_path / "in.pt")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ckpttool", *arguments]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_a_command_with_stdout_closed_exits_as_usual(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m ckpttool --version >&-"
    ran = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_code_that_a_pickle_names_is_not_run_by_any_command(cli: Any, tmp_path: Path) -> None:
    canary = tmp_path / "CANARY"
    body = dict_of(
        {
            "module.a": tensor(storage(1), (1,)),
            "x": call(name("os", "system"), text(f"touch {canary}")),
            "y": call(name("builtins", "exec"), text(f"open({str(canary)!r}, 'w')")),
        }
    )
    path = torch_zip(tmp_path / "in.pt", body, {"0": bytes(4)})
    ran = cli("inspect", path, "--json")
    assert (ran.code, ran.json["unknown"]) == (0, ["builtins.exec", "os.system"])
    ran = cli("strip-prefix", path, tmp_path / "out.safetensors", "--json")
    assert (ran.code, ran.json["left_out"]) == (0, ["x", "y"])
    assert cli("add-prefix", path, tmp_path / "out.pt").code == 0
    assert cli("reload", path, "--model", "torch.nn:Identity").code == 1
    assert not canary.exists()


def test_an_error_of_a_descriptor_is_one_line() -> None:
    _, message, _, code = failure.describe(OSError(errno.EIO, "Input/output error", 5), failure.Call())
    assert (message, code) == ("input/output error", 3)
