"""What messages say: the file, the state that was chosen, what is left to do, and the next command, in names
that are there."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file

from ckpttool import errors
from ckpttool.core.cli import failure
from tests.support.comparing import prefixed
from tests.support.running import Ran

TWO = torch.ones(2)
STATE = {"w": torch.ones(2), "b": torch.zeros(2)}
NORM = torch.nn.BatchNorm1d(2).state_dict()


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    torch.save({"model": STATE, "ema": {k: v + 1 for k, v in STATE.items()}, "epoch": 1}, "two.pt")


def pasted(cli: Any, hint: str) -> Ran:
    """Run the command in a hint."""
    return cli(hint.partition("ckpttool ")[2])  # type: ignore[no-any-return]


OF_FILES = (errors.Unreadable, errors.Damaged, errors.Unsupported, errors.Refused)
OF_OTHERS = (errors.CkptToolError, errors.Collision, errors.NothingToDo, errors.CheckFailed, errors.Mismatch)


@pytest.mark.parametrize(
    "error",
    [
        *(kind("in.pt", "it failed") for kind in OF_FILES),
        *(kind("it failed") for kind in OF_OTHERS),
        MemoryError(),
        OSError(28, "No space left on device", "in.pt"),
        OSError(5, "Input/output error", "in.pt"),
    ],
    ids=repr,
)
def test_every_error_names_the_file_and_the_next_thing_to_do(error: BaseException, capsys: Any) -> None:
    code = failure.fail(error, as_json=False, call=failure.Call("ckpttool convert", ("in.pt",)))
    answers = errors.NothingToDo, errors.CheckFailed, errors.Mismatch
    assert code == (1 if isinstance(error, answers) else 3)
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith("nothing to do: " if isinstance(error, errors.NothingToDo) else "error: ")
    assert message.count("in.pt") == 1 and hint.startswith("hint: ")


@pytest.mark.parametrize("error", [errors.UsageFault, errors.OutputExists, click.UsageError])
def test_a_wrong_call_is_exit_2_and_hints_the_help_of_its_command(error: Any, capsys: Any) -> None:
    assert failure.fail(error("x"), as_json=False, call=failure.Call("ckpttool convert", ("in.pt",))) == 2
    message, *hint = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ")
    assert error is errors.OutputExists or hint == ["hint: ckpttool convert --help"]


def test_an_error_of_a_descriptor_is_one_line() -> None:
    _, message, _, code = failure.describe(OSError(errno.EIO, "Input/output error", 5), failure.Call())
    assert (message, code) == ("input/output error", 3)


def test_every_class_of_errors_has_a_kind_of_its_own() -> None:
    def family(cls: type) -> list[type]:
        return [cls, *(sub for child in cls.__subclasses__() for sub in family(child))]

    classes = family(errors.CkptToolError)
    own = [cls for cls in classes if cls.__module__.startswith("ckpttool.") and cls.__name__[0] != "_"]
    kinds = [cls.kind for cls in own if cls is not errors.FileError]  # type: ignore[attr-defined]
    assert len(kinds) == len(set(kinds))


def test_a_command_with_nothing_to_do_says_so_and_calls_it_no_error(cli: Any) -> None:
    torch.save(NORM, "norm.pt")
    for command in (
        "convert-batchnorm norm.pt out.pt --to plain",
        "strip-prefix norm.pt out.pt",
        "convert norm.pt out.pt --dtype fp32",
    ):
        ran = cli(command)
        assert (ran.code, ran.out) == (1, "")
        message, hint = ran.err.splitlines()
        assert message.startswith("nothing to do: norm.pt: ") and hint.startswith("hint: ")
        assert cli(f"{command} --json").json["error"]["kind"] == "nothing-to-do"


# The state that was chosen.

CHOSEN = "state: 'model'; also available: --state ema"


def test_digest_and_diff_say_which_state_they_took(cli: Any) -> None:
    assert cli("digest two.pt").err == f"{CHOSEN}\n"
    assert (cli("digest two.pt --state ema").err, cli("digest two.pt --json").err) == ("", "")
    assert cli("diff two.pt two.pt --model-only").err == f"two.pt: {CHOSEN}\n" * 2
    assert (cli("diff two.pt two.pt").err, cli("diff two.pt two.pt --state ema").err) == ("", "")


def test_verify_and_diff_of_a_model_say_which_states_they_compared_if_any(cli: Any) -> None:
    cli("slim two.pt model.safetensors")
    ran = cli("verify two.pt --against model.safetensors")
    assert (ran.code, ran.err) == (0, f"two.pt: {CHOSEN}\n")
    for command in ("verify model.safetensors --against two.pt", "diff two.pt model.safetensors"):
        ran = cli(command)
        assert (ran.code, f"two.pt: {CHOSEN}" in ran.err.splitlines()) == (0, True)
    assert (cli("verify two.pt").err, cli("verify two.pt --against two.pt").err) == ("", "")


# What a strip leaves, and an add doubles.


@pytest.mark.parametrize(
    ("prefix", "said", "flags"),
    [
        ("_fsdp_wrapped_module.", "--prefix _fsdp_wrapped_module.", "--prefix module._fsdp_wrapped_module."),
        ("module.", "--prefix module. --repeat", "--repeat"),
    ],
)
def test_a_strip_that_leaves_a_prefix_says_so(prefix: str, said: str, flags: str, cli: Any) -> None:
    torch.save(prefixed(STATE, f"module.{prefix}"), "in.pt")
    found = cli("strip-prefix in.pt out.pt").err
    command = f"ckpttool strip-prefix out.pt out.pt {said} --force"
    assert found == f"2 of 2 keys still begin with '{prefix}': {command}\n"
    assert cli(command.removeprefix("ckpttool ")).code == 0
    assert torch.load("out.pt").keys() == STATE.keys()
    assert cli(f"strip-prefix in.pt plain.pt {flags}").err == ""


def test_an_add_that_doubles_the_prefix_says_so(cli: Any) -> None:
    torch.save({**prefixed(STATE, "module."), "n": torch.ones(1)}, "in.pt")
    said = "2 of 3 keys had 'module.' already, and now begin with 'module.module.'\n"
    assert cli("add-prefix in.pt out.pt").err == said


# What a format can't hold, and what a command can't do with it.


def test_module_versions_that_are_left_out_are_explained(cli: Any) -> None:
    torch.save({"model": torch.nn.Linear(2, 2).state_dict(), "epoch": 1}, "in.pt")
    said = cli("convert in.pt out.safetensors").err
    assert said.splitlines() == ["left out, as safetensors holds only a state's tensors: epoch"]
    said = cli("convert in.pt again.safetensors -v").err
    wanted = "left out: torch's versions of modules (model._metadata), which load_state_dict can do without"
    assert said.splitlines()[-1] == wanted
    assert cli("convert in.pt third.safetensors --json").json["left_out"] == ["model._metadata", "epoch"]


def test_what_can_t_be_averaged_is_left_out_or_cast(cli: Any) -> None:
    torch.save({"w[0]": torch.eye(2).to_sparse(), "b": TWO}, "s.pt")
    ran = cli("average s.pt s.pt mean.pt")
    assert ran.code == 3
    assert ran.err.endswith("leave them out: ckpttool convert s.pt plain.pt --exclude 'w[[]0]'\n")
    assert "keep them" not in ran.err
    assert pasted(cli, ran.err).code == 0
    assert list(torch.load("plain.pt")) == ["b"]
    said = cli("convert s.pt o.safetensors").err
    assert "hint: keep them: ckpttool convert s.pt out.pt; or leave them out: " in said
    torch.save({"w": torch.zeros(2).to(torch.float8_e4m3fn)}, "q.pt")
    ran = cli("average q.pt q.pt mean.pt")
    assert ran.code == 3
    assert pasted(cli, ran.err).code == 0, ran.err
    assert torch.load("bf16.pt")["w"].dtype is torch.bfloat16


@pytest.mark.parametrize("files", ["wrapped.pt named.pt", "named.pt wrapped.pt"])
def test_an_average_of_a_wrapped_file_and_a_plain_one_strips_the_prefix(files: str, cli: Any) -> None:
    torch.save(prefixed(STATE, "module."), "wrapped.pt")
    torch.save(STATE, "named.pt")
    ran = cli(f"average {files} mean.pt")
    assert ran.code == 3
    assert "ckpttool strip-prefix wrapped.pt plain.safetensors --prefix module." in ran.err
    assert pasted(cli, ran.err).code == 0


def test_metrics_of_a_folder_name_its_files(cli: Any) -> None:
    ran = cli("gather-metrics .")
    assert ran.code == 3 and "is not a prediction file but a folder" in ran.err
    assert "ckpttool gather-metrics ./*.safetensors" in ran.err


@pytest.mark.parametrize("count", [2, 30])
def test_keys_that_differ_between_ranks_are_all_in_the_hint(count: int, cli: Any) -> None:
    norm = torch.nn.BatchNorm1d(2)
    for rank in (0, 1):
        norm(torch.randn(4, 2) + rank)
        own = {f"block.w{i}": torch.full((2,), float(rank)) for i in range(count)}
        torch.save(own | dict(prefixed(norm.state_dict(), "bn.")), f"r{rank}.pt")
    ran = cli("convert-batchnorm r0.pt r1.pt o.pt")
    assert ran.code == 3
    flags = shlex.split(ran.err.partition("to take the first file's: ")[2])
    assert len(flags) == (4 if count == 2 else 2)
    assert cli("convert-batchnorm r0.pt r1.pt o.pt", *flags).code == 0


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("conv*", "--only 'module.conv*' matches 1 of 3 keys"),
        ("0.weight", "--only '*.0.weight' matches 1 of 3 keys"),
        ("nothing", "the first key is 'module.conv.weight'"),
    ],
)
def test_a_pattern_that_matches_behind_a_prefix(pattern: str, hint: str, cli: Any) -> None:
    keys = ("module.conv.weight", "module.fc.0.weight", "module.fc.1.weight")
    torch.save(dict.fromkeys(keys, TWO), "m.pt")
    ran = cli(f"convert m.pt o.pt --only {pattern}")
    assert (ran.code, ran.err.partition("hint: ")[2]) == (1, f"{hint}\n")


def test_a_tie_that_is_there_already_is_nothing_to_do(cli: Any) -> None:
    torch.save({"a": TWO, "b": TWO, "c": torch.zeros(2)}, "t.pt")
    ran = cli("convert t.pt o.pt --tie a=b")
    assert ran.code == 1 and "nothing to do: t.pt: 'a' and 'b' are one tensor already" in ran.err
    assert cli("convert t.pt o.pt --tie a=c").code == 3


# What no model's state is.


def test_two_entries_of_one_dotted_name_have_the_dicts_to_choose_from(cli: Any) -> None:
    torch.save({"a": {"b.c": TWO}, "a.b": {"c": TWO}}, "t.pt")
    ran = cli("convert t.pt o.safetensors")
    assert ran.code == 3
    assert "hint: take one of the dicts: --state a or --state a.b\n" in ran.err
    assert cli("convert t.pt o.safetensors --state a").code == 0


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({0: TWO, 1: TWO}, "the dict at the top has tensors, but its key 0"),
        ({"a": TWO, 3: TWO}, "the dict at the top has tensors, but its key 3"),
        ({"model": {0: TWO}}, "'model' has tensors, but its key 0"),
    ],
)
def test_a_dict_with_numbers_as_keys_is_named_with_one_of_them(tree: Any, where: str, cli: Any) -> None:
    torch.save(tree, "n.pt")
    ran = cli("convert n.pt o.pt --to safetensors")
    assert ran.code == 3
    assert f"no dict of tensors by name, so no model's state: {where} is no text\n" in ran.err


def test_a_tensor_of_too_many_axes_is_called_that(cli: Any) -> None:
    torch.save({"a": TWO, "w": torch.zeros([1] * 70)}, "axes.pt")
    ran = cli("inspect axes.pt")
    assert ran.code == 3
    assert "its pickle has a tensor of 70 axes, more than the 64 that are read here\n" in ran.err


# Files that are not there.


def test_a_link_to_nowhere_is_not_what_was_meant(cli: Any) -> None:
    os.symlink("gone.pt", "last.pt")
    ran = cli("inspect last.pt")
    said = "error: last.pt: is a link to gone.pt, where there is no file\n"
    assert (ran.code, ran.err) == (3, f"{said}hint: see what it points to: ls -l last.pt\n")


def test_the_folder_of_a_run_has_the_command_for_its_last_checkpoint(here: Path, cli: Any) -> None:
    os.remove("two.pt")
    for name in ("best.pt", "last.pt"):
        torch.save({"w": TWO}, name)
    Path("log.jsonl").write_text("{}\n")
    os.utime("last.pt", (1, 1))  # copied, say
    ran = cli("merge", here, "o.pt")
    assert ran.code == 3
    assert "is the folder of a training run, in which each checkpoint is a file: last.pt, best.pt" in ran.err
    assert f"{here}/last.pt: torch-zip" in pasted(cli, ran.err).out
    found = cli("inspect", here, "--json").json["checkpoints"]
    assert [entry["path"] for entry in found] == [f"{here}/last.pt", f"{here}/best.pt"]


def test_a_run_with_a_model_exported_into_its_folder_stays_a_run(here: Path, cli: Any) -> None:
    os.remove("two.pt")
    run = here / "runs" / "two"
    run.mkdir(parents=True)
    (run / "log.jsonl").write_text("{}\n")
    torch.save({"model": prefixed(STATE, "module."), "progress": {"global_step": 12}}, run / "best.pt")
    torch.save({"model": prefixed(STATE, "module."), "progress": {"global_step": 15}}, run / "last.pt")
    assert cli("strip-prefix", run / "best.pt", run / "model.safetensors").code == 0
    for command in (f"verify {run}", f"digest {run}", f"convert {run} o.safetensors"):
        ran = cli(command)
        assert ran.code == 3 and "is the folder of a training run" in ran.err, command
    for folder in (run, run.parent):
        found = cli("inspect", folder, "--json").json["checkpoints"]
        steps = {os.path.basename(entry["path"]): entry["step"] for entry in found}
        assert steps == {"last.pt": 15, "model.safetensors": None, "best.pt": 12}
        assert found[0]["path"] == f"{run}/last.pt"


def test_a_model_beside_a_log_or_an_optimizer_of_others_is_the_folders_checkpoint(
    here: Path, cli: Any
) -> None:
    save_file(STATE, here / "model.safetensors")
    torch.save({}, "optimizer.pt")
    Path("log.jsonl").write_text("{}\n")
    assert cli("inspect", here, "--json").json["format"] == "safetensors"
