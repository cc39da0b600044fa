"""Every command says how it is used, by examples that work when pasted; the rows of docs/tasks.md do too."""

from __future__ import annotations

import contextlib
import inspect
import re
import shlex
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpttool
from ckpttool import __version__
from ckpttool.core.checkpoint.prefixes import WRAPPERS
from ckpttool.core.cli import SECTIONS, group
from ckpttool.core.cli.options import FORMATS
from ckpttool.core.files.parts import OutputParts
from ckpttool.core.formats import destination, folders
from ckpttool.core.tensors import cast
from tests.ranks import shardings
from tests.support import report_files
from tests.support.comparing import prefixed, saved_predictions
from tests.support.dialects import GPT, random_state
from tests.support.quantised import pair, save_adapter
from tests.support.recorder_dumps import programs, write_dumps
from tests.support.running import ROOT, Cli
from train import main

# ---- Every command says how it is used, by an example that works when pasted --------------------------


OWN = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

def optimizer(model):
    pairs = [*model.named_parameters()]
    groups = [[pair for pair in pairs if (pair[1].ndim > 1) is decays] for decays in (True, False)]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
"""


def prepare(folder: Path, example: str) -> None:
    """The files that an example speaks of, and what is small."""
    net: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if "torchvision:resnet18" in example:
        net = pytest.importorskip("torchvision").models.resnet18()
    state = net.state_dict()
    words = shlex.split(example)

    def put(name: str, make: Callable[[], Any], save: Callable[[Any, Path], object] = torch.save) -> None:
        if any(fnmatch(name, word) or name in word for word in words):
            save(make(), folder / name)

    def trained(prefix: str, parameters: Any) -> dict[str, Any]:
        optimizer = torch.optim.SGD(parameters, 0.1).state_dict()
        return {"model": prefixed(state, prefix), "optimizer": optimizer, "epoch": 1}

    def tuned() -> dict[str, torch.Tensor]:
        return {key: t + torch.rand(t.shape) if t.dim() > 1 else t for key, t in state.items()}

    put("last.pt", lambda: trained("module.", net.named_parameters()))
    put("normed.pt", lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)).state_dict())
    inside = {"fc.base_layer.weight": torch.ones(2, 2)}
    inside |= {f"fc.lora_{letter}.default.weight": torch.ones(2, 2) for letter in "AB"}
    put("peft.pt", lambda: inside)
    put("run.pt", lambda: trained("", net.parameters()))
    put("model.pt", lambda: prefixed(state, "backbone."))
    put("model.bin", lambda: state)
    if "net.py" in example:
        (folder / "net.py").write_text(OWN)
    if "error.log" in example:
        (folder / "error.log").write_text("RuntimeError: PytorchStreamReader failed reading zip archive\n")
    if "fr_trace_rank" in example:
        hanging = programs(2)
        hanging[0].call(state="started")
        write_dumps(folder, hanging)
    put("model.safetensors", lambda: state, save_file)
    put("other-side.safetensors", lambda: prefixed(state, "net."), save_file)
    put("ref.pt", lambda: prefixed(state, "net."))
    lightning = {"state_dict": prefixed(state, "model."), "hyper_parameters": {"lr": 0.1}}
    put("lightning.ckpt", lambda: lightning)
    norm = torch.nn.BatchNorm1d(2).state_dict()
    for rank in range(2):
        norm["running_mean"] += rank
        torch.save(norm, folder / f"rank{rank}.pt")
    del norm["num_batches_tracked"]
    torch.save(norm, folder / "old.pt")
    save_file(state, folder / "base.safetensors")
    put("tuned.safetensors", tuned, save_file)
    for name in ("base.pt", "epoch8.pt", "epoch9.pt"):
        put(name, lambda: {"model": state, "epoch": 8})
    if "step-" in example:
        for step in (100, 200):
            torch.save({key: tensor + step for key, tensor in state.items()}, folder / f"step-{step}.pt")
        steps = (folder / f"step-{step}.pt" for step in (100, 200))
        ckpttool.delta(*steps, folder / "step-200.delta.safetensors")
    (folder / "sync").mkdir()
    if "sync new" in example:
        save_file(tuned(), folder / "tuned.safetensors")
        of_both = folder / "base.pt", folder / "tuned.safetensors"
        ckpttool.delta(*of_both, folder / "sync" / "weight_v000001", layout="weight-v")
    layer = next(key.removesuffix(".weight") for key in state)
    rows, columns = state[f"{layer}.weight"].flatten(1).shape
    save_adapter(folder, pair(layer, torch.ones(1, columns), torch.ones(rows, 1)), r=1)
    (folder / "fp8-model").mkdir()
    codes = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file({"l.weight": codes, "l.weight_scale": torch.ones(2)}, folder / "fp8-model/model.safetensors")
    (folder / "fp8-model" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    if "runs/first" in example:
        (folder / "runs" / "first").mkdir(parents=True)
        for name in ("last.pt", "step-100.pt", "step-200.pt"):
            torch.save(trained("module.", net.named_parameters()), folder / "runs" / "first" / name)
    if example.startswith("ckpttool report "):
        (folder / "runs").mkdir()
        report_files.run(folder).rename(folder / "runs" / "a")
    (folder / "eval").mkdir()
    saved_predictions(folder / "eval", 2, 5)


def prepare_ranks(folder: Path, run_ranks: Any) -> None:
    """The files of two ranks that examples speak of."""
    run_ranks(2, shardings.save_pieces, str(folder))
    (folder / "checkpoint" / "actor").mkdir(parents=True)
    for rank in range(2):
        shutil.copy(folder / f"placed-{rank}.pt", folder / f"rank{rank}.pt")
        shutil.copy(folder / f"placed-{rank}.pt", folder / f"checkpoint/actor/model_rank_{rank}.pt")
    ckpttool.merge(folder / "checkpoint" / "actor", folder / "first.safetensors")


def leave_unfinished(cli: Any, output: str) -> None:
    """Write the only part of an output, without what the last part does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputParts, "finishing", lambda _: contextlib.nullcontext(False))
        assert cli("convert", "base.safetensors", output, "--part", "1/1").code == 0


@pytest.fixture(scope="module")
def proved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a record that examples speak of."""
    folder = tmp_path_factory.mktemp("proved") / "a"
    flags = "--data fake:40 --batch-size 2 --epochs 1 --save-every 10steps --keep 3 --prove-every 5"
    assert main.main([*flags.split(), "--out", str(folder)]) == 0
    return folder


ANSWERS = ("diff", "doctor", "verify", "prove")
"""Commands whose exit code is the answer: 1 is one as good as 0, and depends on the files."""


def help_of(name: str) -> str:
    return inspect.cleandoc(str(group.commands[name].help))


def examples() -> list[str]:
    texts = [help_of(name).partition("\b\nExample")[2] for name in group.commands]
    return [line for text in texts for line in re.findall(r"^  (ckpttool .+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("name", group.commands)
def test_the_help_of_every_command_ends_in_an_example(name: str, cli: Any) -> None:
    assert help_of(name).splitlines()[-1].startswith(f"  ckpttool {name}")
    ran = cli(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"Usage: ckpttool {name}" in ran.out


@pytest.mark.covered(lambda example: example.startswith("ckpttool prove ") and "--from" not in example)
@pytest.mark.usefixtures("forked_replays")
@pytest.mark.parametrize("example", examples())
def test_the_example_works_when_pasted(
    example: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    prepare(tmp_path, example)
    if example.startswith("ckpttool merge "):
        prepare_ranks(tmp_path, request.getfixturevalue("run_ranks"))
    if example.startswith("ckpttool prove "):
        shutil.copytree(request.getfixturevalue("proved_run"), tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    words = [word for text in shlex.split(example)[1:] for word in sorted(glob(text)) or [text]]
    with group.commands[words[0]].make_context(words[0], words[1:]) as parsed:
        if output := parsed.params.get("output"):  # an example writes a file that is not there yet
            (tmp_path / output).unlink(missing_ok=True)
    if words[0] == "finish":
        (tmp_path / words[1]).unlink()
        leave_unfinished(cli, words[1])
    ran = cli(*words)
    assert ran.code == 0 or (ran.code == 1 and words[0] in ANSWERS), f"{ran.err}(`prepare` makes the files)"
    assert ran.out


def test_the_help_of_the_tool_lists_every_command(cli: Any) -> None:
    for flag in ("--help", "-h"):
        ran = cli(flag)
        assert (ran.code, "Exit codes: 0 done" in ran.out) == (0, True)
        assert all(f"  {name} " in ran.out for name in group.commands)


def test_the_help_of_the_tool_gives_each_command_one_line_that_fits_80_columns(process: Any) -> None:
    lines = process("--help", env={"COLUMNS": "80"}).stdout.decode().splitlines()
    assert max(map(len, lines)) <= 80
    for commands in SECTIONS.values():
        for command in commands:
            line = command.summary
            assert re.fullmatch(r"[A-Z][^…]+[^.…]", line), "a phrase, without a dot at its end"
            widest = max(map(len, group.commands))
            assert f"  {command.name:{widest}}  {line}" in lines, f"too long: {line}"


def test_commands_are_shown_in_the_order_of_their_use(cli: Any) -> None:
    names = [command.name for commands in SECTIONS.values() for command in commands]
    assert list(group.commands) == names
    assert re.findall(r"^  ([a-z]+(?:-[a-z]+)*)  ", cli("--help").out, re.MULTILINE) == names


def test_the_versions_are_shown(process: Any) -> None:
    said = process("--version").stdout.decode()
    assert said.splitlines()[0] == f"ckpttool {__version__}"
    assert f"torch {metadata.version('torch')}" in said


@pytest.mark.parametrize("typed", ["strip-prefx", "strip"])
def test_a_misspelt_command_is_answered_with_similar_ones(typed: str, cli: Any) -> None:
    ran = cli(typed)
    assert ran.code == 2 and f"there is no command '{typed}'; did you mean strip-prefix" in ran.err


def test_the_name_that_other_tools_have_is_answered_with_ours(cli: Any) -> None:
    ran = cli("info last.pt")
    assert ran.code == 2 and "there is no command 'info'; did you mean inspect?" in ran.err


def test_a_shell_can_ask_for_completions(process: Any) -> None:
    assert "complete -o nosort -F" in process(env={"_CKPTTOOL_COMPLETE": "bash_source"}).stdout.decode()
    asked = {"_CKPTTOOL_COMPLETE": "bash_complete", "COMP_WORDS": "ckpttool conv", "COMP_CWORD": "1"}
    assert "plain,convert" in process(env=asked).stdout.decode().splitlines()


@pytest.mark.parametrize("name", group.commands)
def test_every_option_is_explained_in_sentences(name: str) -> None:
    for option in group.commands[name].params:
        if isinstance(option, click.Option):
            said = (option.help or "").partition("  [default")[0]
            assert re.fullmatch(r"[A-Za-z-].*\.", said), f"{name} {option.opts[0]}: {said}"
            assert len(said) < 160, f"{name} {option.opts[0]}: what is longer belongs above the options"


def test_convert_lists_the_formats_that_can_be_written_and_the_types(cli: Any) -> None:
    said = " ".join(cli("convert", "--help").out.split())
    assert set(FORMATS) == {*destination.ENDINGS.values(), *folders.NAMES}
    assert f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}." in said
    offered = re.search(r"--dtype TYPE .*? to (.*?) --only", said)
    assert offered and set(re.findall(r"\b\w+\d+\b|half", offered[1])) <= set(cast.TARGETS)
    assert {"bf16", "fp16", "fp32", "fp64"} <= set(re.findall(r"\w+", offered[1]))


def test_help_is_a_word_too(cli: Any) -> None:
    assert cli("help").out == cli("--help").out
    for name in group.commands:
        asked = cli("help", name)
        assert (asked.code, asked.out) == (0, cli(name, "--help").out)
    ran = cli("help", "inspekt")
    assert (ran.code, "did you mean inspect" in ran.err) == (2, True)
    assert cli("-V").out == cli("--version").out


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", ["", "inspect", "strip-prefix", "average"])
def test_help_keeps_to_the_terminal(name: str, width: int, process: Any) -> None:
    lines = process(*name.split(), "--help", env={"COLUMNS": str(width)}).stdout.decode().splitlines()
    prose = [line for line in lines if "ckpttool " not in line]  # what is typed stays in one line
    assert max(map(len, prose)) <= min(width, 100)
    assert any(len(line) > min(width, 100) - 12 for line in prose)


def test_examples_fit_80_columns() -> None:
    assert [example for example in examples() if len(f"    {example}") > 80] == []


# ---- docs/tasks.md and docs/maps.md: commands on names and optimizers do what their row says, as they stand


TASKS = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
MAPS = (ROOT / "docs" / "maps.md").read_text(encoding="utf-8")


def in_rows(verb: str) -> list[str]:
    """Return the whole commands of a verb in the tables of the page, in their order."""
    rows = (line for line in TASKS.splitlines() if line.startswith("|"))
    return [command for row in rows for command in re.findall(rf"`ckpttool ({verb} [^`]* [^`]*)`", row)]


@pytest.fixture
def files(here: Path) -> None:
    """Checkpoints of a model whose layers have one shape, with an optimizer that names nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    whole = {"model": prefixed(model.state_dict(), "module."), "optimizer": optimizer.state_dict()}
    torch.save(whole, here / "last.pt")
    (here / "net.py").write_text(OWN)
    torch.save(prefixed(model.state_dict(), "_fsdp_wrapped_module."), here / "fsdp.pt")
    inside = {f"_orig_mod.0._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save(inside, here / "parts.pt")
    hyper = {"pytorch-lightning_version": "2", "state_dict": prefixed(model.state_dict(), "model.")}
    torch.save(hyper | {"hyper_parameters": {"lr": 1.0}}, here / "in.ckpt")


@pytest.mark.usefixtures("files")
def test_the_rows_on_prefixes_leave_none(cli: Cli) -> None:
    assert len(in_rows("strip-prefix")) == 4
    for command in in_rows("strip-prefix"):
        assert cli(f"{command} --force").code == 0, command
        output = command.split()[2]
        names = [tensor["name"] for tensor in cli(f"inspect {output} --json").json["tensors"]]
        assert names and not any(prefix in name for name in names for prefix in WRAPPERS), command


@pytest.mark.usefixtures("files")
def test_the_rows_on_optimizers_work_one_after_the_other(cli: Cli) -> None:
    assert len(in_rows("optimizer")) == 4
    for command in in_rows("optimizer"):
        ran = cli(command)
        assert ran.code == 0, f"{command}: {ran.err}"


def test_the_page_of_maps_takes_nanogpt_s_own_checkpoint(cli: Cli, here: Path) -> None:
    state = random_state(GPT)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    parameters = [nn.Parameter(value) for name, value in state.items() if name != "lm_head.weight"]
    groups = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    whole = {"model": prefixed(state, "_orig_mod."), "optimizer": optimizer.state_dict()}
    torch.save(whole | {"model_args": {"n_layer": 2}}, here / "ckpt.pt")
    block = MAPS.partition("nanoGPT's `ckpt.pt`")[2]
    commands = re.findall(r"^    ckpttool (.*)$", block.partition("\n## ")[0], re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        ran = cli(command)
        assert ran.code == 0, f"{command}: {ran.err}"
    assert torch.load("gpt2.pt")["model"]["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
