"""What every command promises: -q, -v, --json and --dry-run, bars on a terminal alone, and how it ends where
stdout is full or a pipe whose reader has gone."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.core import cli as command_line
from ckpttool.core.cli import console, group
from ckpttool.core.cli.console import MAX_INDENTED, to_json
from tests.ranks.forked import WarmPython
from tests.support.comparing import prefixed, saved_predictions
from tests.support.running import Terminal

ARGUMENTS = {
    "inspect": "last.pt",
    "digest": "last.pt",
    "report": "last.pt page.html --force",
    "strip-prefix": "last.pt OUT",
    "add-prefix": "last.pt OUT",
    "rename-keys": "last.pt OUT --map module=m",
    "convert": "last.pt OUT",
    "conform": "last.pt OUT --like plain.pt --check-values",
    "maps": "",
    "slim": "last.pt OUT",
    "disarm": "last.pt OUT",
    "convert-batchnorm": "old.pt OUT --to sync",
    "average": "last.pt last.pt OUT",
    "optimizer": "last.pt OUT --to names",
    "delta": "old.pt plain.pt OUT",
    "apply": "old.pt plain.delta.safetensors OUT",
    "diff": "last.pt last.pt",
    "verify": "last.pt",
    "seal": "last.pt --force",
    "scan": "last.pt",
    "gather-metrics": "rank0.safetensors",
    "doctor": "last.pt --model net.py:make",
    "reload": "last.pt --model net.py:make",
    "explain": "error.log",
    "schema": "inspect",
    "skill": "",
}
MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
"""
NOTE = re.compile("left out|2 running statistics|7 of 7 keys had")
WRITERS = [name for name, words in ARGUMENTS.items() if "OUT" in words]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    net = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    (folder / "net.py").write_text(MODEL)
    adam = torch.optim.Adam(net.named_parameters())
    net(torch.ones(3, 200)).sum().backward()
    adam.step()
    torch.save(
        {"model": prefixed(net.state_dict(), "module."), "optimizer": adam.state_dict()}, folder / "last.pt"
    )
    torch.save({k: v for k, v in net.state_dict().items() if "num_" not in k}, folder / "old.pt")
    torch.save(net.state_dict(), folder / "plain.pt")
    (folder / "error.log").write_text("RuntimeError: PytorchStreamReader failed reading zip archive\n")
    saved_predictions(folder, 1, 4)
    ckpttool.delta(folder / "old.pt", folder / "plain.pt", folder / "plain.delta.safetensors")
    return folder


@pytest.fixture
def folder(files: Path, monkeypatch: pytest.MonkeyPatch, here: Path) -> Path:
    monkeypatch.chdir(files)
    return files


def words_of(name: str, output: Path | str) -> list[str]:
    if name == "delta" and isinstance(output, Path):  # which is a safetensors file
        output = output.with_suffix(".safetensors")
    return [name, *ARGUMENTS[name].replace("OUT", str(output)).split()]


def test_every_command_is_tried() -> None:
    of_folders = {
        "merge",
        "split",
        "merge-lora",
        "extract-lora",
        "adapter",
        "prove",
        "finish",
    }  # which need the files of a training
    assert list(ARGUMENTS) == [name for name in group.commands if name not in of_folders]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_quiet_prints_nothing_but_a_digest(name: str, cli: Any, tmp_path: Path) -> None:
    ran = cli(*words_of(name, tmp_path / "out.pt"), "-q")
    assert (ran.code, ran.err, bool(ran.out)) == (int(name == "doctor"), "", name == "digest")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_dry_run_tells_the_exact_size_and_writes_nothing(
    name: str, ending: str, cli: Any, tmp_path: Path
) -> None:
    if ending == {"disarm": ".safetensors", "delta": ".pt"}.get(name):
        pytest.skip(f"{name} writes another kind of file")
    out = tmp_path / f"out{ending}"
    words = words_of(name, out)
    assert cli(*words, "--dry-run").out.startswith("would have ")
    dry = cli(*words, "--dry-run", "--json").json
    assert [*tmp_path.iterdir()] == []
    wet = cli(*words, "--json", "--verify").json
    assert dry.pop("dry_run") is True
    assert {**dry, "seconds": 0} == {**wet, "seconds": 0}
    assert dry["bytes"] == out.stat().st_size
    assert cli(*words, "--dry-run").code == 2  # it exists


# Names, as an example of the commands that rewrite a file.


@pytest.fixture
def many(here: Path) -> None:
    """Save seven keys with a prefix, seven without, and seven things beside the model."""
    model = {f"module.a{i}": torch.full((2,), float("nan")) for i in range(7)}
    model |= {f"b{i}": torch.ones(2) for i in range(7)}
    torch.save({"model": model, **{f"beside{i}": i for i in range(7)}}, "in.pt")


@pytest.mark.usefixtures("many")
def test_the_first_names_are_listed_and_the_rest_is_counted(cli: Any) -> None:
    ran = cli("strip-prefix in.pt out.safetensors")
    assert "stripped 'module.' from 7 of 14 keys" in ran.out
    assert "kept as they were: b0, b1, b2, b3 and 3 more" in ran.err
    listed = (
        "left out, as safetensors holds only a state's tensors: beside0, beside1, beside2, beside3 and 3 more"
    )
    assert listed in ran.err and "module.a0" not in ran.err
    assert "model.module.a3 (2) and 3 more" in cli("verify in.pt").err


@pytest.mark.usefixtures("many")
def test_verbose_lists_every_name(cli: Any) -> None:
    ran = cli("strip-prefix in.pt out.safetensors -v")
    assert "more" not in ran.err and len(ran.out.splitlines()) == 1
    assert f"kept as they were: {', '.join(f'b{i}' for i in range(7))}" in ran.err
    for i in range(7):
        assert f"module.a{i} -> a{i}\n" in ran.err and f"beside{i}" in ran.err
    assert "model.module.a6" in cli("verify in.pt -v").err
    ran = cli("rename-keys in.pt out.pt --dry-run -v --map", r"^b(\d)=c.\1")
    assert "b0 -> c.0\n" in ran.err and "b6 -> c.6\n" in ran.err
    assert ran.out.startswith("would have renamed 7 of 14 keys")


@pytest.mark.usefixtures("many")
def test_json_is_alone_on_stdout_and_stderr_is_empty(cli: Any) -> None:
    ran = cli("strip-prefix in.pt out.safetensors --json -v")
    assert (ran.code, ran.err) == (0, "")
    assert (ran.json["keys"], ran.json["renamed"]) == (14, 7)
    assert ran.json["left_out"] == [f"beside{i}" for i in range(7)]
    assert ran.json["kept"] == [f"b{i}" for i in range(7)]
    assert (ran.json["copied"], ran.json["mentions"]) == ([], [])


@pytest.mark.parametrize("odd", [math.nan, -math.inf, (1, math.inf)], ids=str)
def test_large_json_holds_the_same_on_few_lines(odd: Any) -> None:
    data = {"rows": [{"name": f"é\ud800{i}", "value": None} for i in range(3)], "odd": odd, "map": {"a": 1}}
    large = data | {"much": "x" * MAX_INDENTED}
    small, much = json.loads(to_json(data)), json.loads(to_json(large))
    assert {key: much[key] for key in small} == small
    assert len(to_json(large).splitlines()) == 2 + len(large)
    assert "NaN" not in to_json(large) and "Infinity" not in to_json(large)


# Terminals.


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs a command with a terminal in place of stderr, and returns what it says."""

    def run(typed: str, bar_from: int = 1) -> str:
        terminal = Terminal()
        with monkeypatch.context() as patched:
            patched.setattr(console.sys, "stderr", terminal)
            patched.setattr(console, "BAR_FROM", bar_from)
            assert command_line.run(typed.split()) == 0
        return terminal.getvalue()

    return run


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("command", ["strip-prefix", "convert", "slim", "verify", "digest"])
def test_long_work_shows_its_bytes_on_a_terminal_alone(
    command: str, on_a_terminal: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = f"{command} in.pt" + (" out.pt" if command not in ("verify", "digest") else "")
    said = on_a_terminal(typed)
    assert "%|" in said and "B/s]" in said
    force = " --force" if "out.pt" in typed else ""
    for flag in (" --json", " --quiet"):
        assert on_a_terminal(typed + force + flag) == ""
    monkeypatch.setattr(console, "BAR_FROM", 1)
    assert "%|" not in cli(typed + force).err


@pytest.mark.usefixtures("many")
def test_notes_break_between_words_on_a_terminal_and_nowhere_in_a_pipe(
    on_a_terminal: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    said = cli("slim in.pt a.pt").err
    assert len(said.splitlines()) == 1 and len(said) > 40
    lines = on_a_terminal("slim in.pt b.pt", bar_from=1 << 30).splitlines()
    assert max(map(len, lines)) <= 40 and " ".join(lines) == said.strip()


def test_a_bar_stops_at_its_total_when_the_work_was_underestimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.sys, "stderr", Terminal())
    monkeypatch.setattr(console, "BAR_FROM", 1)
    with console.Console().progress(100, "reading") as progress:
        assert progress is not None
        for _ in range(3):
            progress(60)
    assert "180" not in console.sys.stderr.getvalue()


# Where stdout can't be written.

Run = Callable[[list[str]], tuple[int, list[str]]]


def ran(python: WarmPython, folder: Path, words: list[str], stdout: int) -> tuple[int, list[str]]:
    done = python.run("-m", "ckpttool", *words, stdout=stdout, cwd=folder)
    return done.returncode, [line for line in done.stderr.decode().splitlines() if not NOTE.match(line)]


@pytest.fixture
def into_a_full_disk(files: Path, warm_python: WarmPython) -> Run:
    def run(words: list[str]) -> tuple[int, list[str]]:
        with open("/dev/full", "wb") as full:
            return ran(warm_python, files, words, full.fileno())

    return run


@pytest.fixture
def into_a_broken_pipe(files: Path, warm_python: WarmPython) -> Run:
    def run(words: list[str]) -> tuple[int, list[str]]:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return ran(warm_python, files, words, writer)
        finally:
            os.close(writer)

    return run


NOT_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
OUTPUTS = pytest.mark.parametrize("name", WRITERS)
COMMANDS = pytest.mark.parametrize("name", ARGUMENTS)
PLAIN_OR_JSON = pytest.mark.parametrize("more", [[], ["--json"]], ids=" ".join)
ALIKE = (
    "adapter",
    "add-prefix",
    "apply",
    "average",
    "conform",
    "delta",
    "disarm",
    "extract-lora",
    "merge-lora",
    "split",
)
"""They write and end as others do."""

SOME = pytest.mark.covered(
    lambda name, more: bool(more) != (name in ("inspect", "verify", "doctor", "maps")) or name in ALIKE
)
SOME_OUTPUTS = pytest.mark.covered(lambda name: name not in ("convert", "disarm", "strip-prefix"))
HELP = [["--help"], ["--version"], [], ["inspect", "--help"]]
WRONG = [["inspect", "missing.pt", "--json"], ["inspect", "--json"]]


@NOT_FULL
@SOME
@PLAIN_OR_JSON
@COMMANDS
def test_a_result_that_stdout_has_no_space_for_is_one_line_and_exit_3(
    name: str, more: list[str], into_a_full_disk: Run, tmp_path: Path
) -> None:
    code, lines = into_a_full_disk([*words_of(name, tmp_path / "out.pt"), *more])
    assert (code, lines[0]) == (3, "error: stdout: no space left on device")
    assert len(lines) == 2 and lines[1].startswith("hint: ")


@NOT_FULL
@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_for_a_full_stdout_is_one_line_and_exit_3(words: list[str], into_a_full_disk: Run) -> None:
    code, lines = into_a_full_disk(words)
    assert (code, lines[0]) == (3, "error: stdout: no space left on device")


@NOT_FULL
@SOME_OUTPUTS
@OUTPUTS
def test_an_output_for_a_full_stdout_is_one_line_and_exit_3(name: str, into_a_full_disk: Run) -> None:
    code, lines = into_a_full_disk(words_of(name, "-"))
    assert code == 3
    assert lines[0].startswith("error: ") and lines[0].endswith("no space left on device")
    assert all(line.startswith("hint: ") for line in lines[1:])


@NOT_FULL
def test_an_error_whose_object_stdout_has_no_space_for_keeps_its_exit_code(into_a_full_disk: Run) -> None:
    code, lines = into_a_full_disk(WRONG[0])
    assert (code, lines[0]) == (3, "error: missing.pt: no such file")
    assert into_a_full_disk(WRONG[1])[0] == 2


@SOME
@PLAIN_OR_JSON
@COMMANDS
def test_a_reader_that_has_gone_is_exit_141_without_a_word(
    name: str, more: list[str], into_a_broken_pipe: Run, tmp_path: Path
) -> None:
    assert into_a_broken_pipe([*words_of(name, tmp_path / "out.pt"), *more]) == (141, [])


@SOME_OUTPUTS
@OUTPUTS
def test_a_reader_of_the_output_that_has_gone_is_exit_141(name: str, into_a_broken_pipe: Run) -> None:
    assert into_a_broken_pipe(words_of(name, "-")) == (141, [])


@pytest.mark.parametrize("words", [*HELP, *WRONG], ids=" ".join)
def test_a_reader_of_help_and_errors_that_has_gone_is_exit_141(words: Any, into_a_broken_pipe: Run) -> None:
    assert into_a_broken_pipe(words)[0] == 141


def test_a_reader_of_completions_that_has_gone_is_exit_141(into_a_broken_pipe: Run, monkeypatch: Any) -> None:
    asked = {"_CKPTTOOL_COMPLETE": "bash_complete", "COMP_WORDS": "ckpttool ", "COMP_CWORD": "1"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert into_a_broken_pipe([]) == (141, [])
