"""What messages say: the file, the next command, the state that was chosen, and what is left to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import errors
from ckpttool.cli import failure

STATE = {"w": torch.ones(2), "b": torch.zeros(2)}
BOTH = "module._orig_mod."
OF_FILES = (errors.Unreadable, errors.Damaged, errors.Unsupported, errors.Refused)
OF_OTHERS = (errors.CkptToolError, errors.Collision, errors.NothingToDo, errors.CheckFailed, errors.Mismatch)
NORM = torch.nn.BatchNorm1d(2).state_dict()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": STATE, "ema": {k: v + 1 for k, v in STATE.items()}, "epoch": 1}, "two.pt")
    return tmp_path


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
    failure.fail(error, as_json=False, call=failure.Call("ckpttool convert", ("in.pt",)))
    message, hint = capsys.readouterr().err.splitlines()
    assert "in.pt" in message and hint.startswith("hint: ")
    assert message.count("in.pt") == 1


def test_a_usage_error_hints_the_help_of_its_command(capsys: Any) -> None:
    call = failure.Call("ckpttool convert", ("in.pt",))
    assert failure.fail(errors.UsageFault("no"), as_json=False, call=call) == 2
    assert capsys.readouterr().err.splitlines()[1] == "hint: ckpttool convert --help"


def test_a_command_with_nothing_to_do_says_so_and_calls_it_no_error(cli: Any) -> None:
    torch.save(NORM, "norm.pt")
    for words in (
        ["convert-batchnorm", "norm.pt", "out.pt", "--to", "plain"],
        ["strip-prefix", "norm.pt", "out.pt"],
        ["convert", "norm.pt", "out.pt", "--dtype", "fp32"],
    ):
        ran = cli(*words)
        assert (ran.code, ran.out) == (1, "")
        message, hint = ran.err.splitlines()
        assert message.startswith("nothing to do: norm.pt: ") and hint.startswith("hint: ")
        assert cli(*words, "--json").json["error"]["kind"] == "nothing-to-do"


def test_a_missing_choice_is_listed_on_the_line(cli: Any) -> None:
    said = "error: Missing option '--to'. Choose from: names, indices, flat"
    assert cli("optimizer", "a.pt", "b.pt").err.splitlines()[0] == said


def test_an_option_before_the_command_is_answered_by_where_it_belongs(cli: Any) -> None:
    ran = cli("-q", "digest", "two.pt")
    assert (ran.code, ran.err.splitlines()[1]) == (2, "hint: options follow the command: ckpttool COMMAND -q")


# The state that was chosen.

CHOSEN = "state: 'model'; also available: --state ema"


def test_digest_says_which_state_it_took(cli: Any) -> None:
    assert cli("digest", "two.pt").err == f"{CHOSEN}\n"
    assert cli("digest", "two.pt", "--state", "ema").err == ""
    assert cli("digest", "two.pt", "--json").err == ""


def test_verify_says_which_states_it_compared(cli: Any) -> None:
    cli("slim", "two.pt", "model.safetensors")
    ran = cli("verify", "two.pt", "--against", "model.safetensors")
    assert (ran.code, ran.err) == (0, f"two.pt: {CHOSEN}\n")
    ran = cli("verify", "model.safetensors", "--against", "two.pt")
    assert (ran.code, f"two.pt: {CHOSEN}" in ran.err.splitlines()) == (0, True)


def test_verify_that_compares_no_states_says_none(cli: Any) -> None:
    assert (cli("verify", "two.pt").err, cli("verify", "two.pt", "--against", "two.pt").err) == ("", "")


def test_verify_refuses_a_state_that_is_not_there(cli: Any) -> None:
    ran = cli("verify", "two.pt", "--state", "emb")
    assert (ran.code, ran.err.splitlines()[1]) == (3, "hint: there are: model, ema")


def test_diff_says_which_states_it_compared(cli: Any) -> None:
    cli("slim", "two.pt", "model.safetensors")
    ran = cli("diff", "two.pt", "model.safetensors")
    assert (ran.code, f"two.pt: {CHOSEN}" in ran.err.splitlines()) == (0, True)
    assert CHOSEN in cli("diff", "two.pt", "two.pt", "--model-only").err
    assert cli("diff", "two.pt", "two.pt").err == ""


def test_reload_says_which_state_it_took(cli: Any) -> None:
    Path("net.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 1)\n")
    state = torch.nn.Linear(2, 1).state_dict()
    torch.save({"model": state, "ema": dict(state)}, "two.pt")
    assert cli("reload", "two.pt", "--model", "net.py:make").err == f"{CHOSEN}\n"
    assert cli("reload", "two.pt", "--model", "net.py:make", "--state", "ema").err == ""


# What a strip leaves, and an add doubles.


@pytest.mark.parametrize(
    ("prefix", "said", "flags"),
    [
        (
            "_orig_mod.",
            "'_orig_mod.': ckpttool strip-prefix --prefix _orig_mod.",
            "--prefix module._orig_mod.",
        ),
        ("module.", "'module.': --repeat strips it as often as it is there", "--repeat"),
    ],
)
def test_a_strip_that_leaves_a_prefix_says_so(prefix: str, said: str, flags: str, cli: Any) -> None:
    torch.save({f"module.{prefix}{k}": v for k, v in STATE.items()}, "in.pt")
    assert cli("strip-prefix", "in.pt", "out.pt").err == f"2 of 2 keys still begin with {said}\n"
    assert cli("strip-prefix", "in.pt", "plain.pt", *flags.split()).err == ""


def test_an_add_that_doubles_the_prefix_says_so(cli: Any) -> None:
    torch.save({f"module.{k}": v for k, v in STATE.items()} | {"n": torch.ones(1)}, "in.pt")
    said = cli("add-prefix", "in.pt", "out.pt").err
    assert said == "2 of 3 keys had 'module.' already, and now begin with 'module.module.'\n"


# The rest.


def test_module_versions_that_are_left_out_are_explained(cli: Any) -> None:
    torch.save({"model": torch.nn.Linear(2, 2).state_dict(), "epoch": 1}, "in.pt")
    ran = cli("convert", "in.pt", "out.safetensors")
    assert ran.err.splitlines() == ["left out, as safetensors holds only tensors: epoch"]
    ran = cli("convert", "in.pt", "again.safetensors", "-v")
    wanted = "left out: torch's versions of modules (model._metadata), which load_state_dict can do without"
    assert ran.err.splitlines()[-1] == wanted
    ran = cli("convert", "in.pt", "third.safetensors", "--json")
    assert ran.json["left_out"] == ["model._metadata", "epoch"]


def test_a_link_to_nowhere_is_not_what_was_meant(cli: Any) -> None:
    os.symlink("gone.pt", "last.pt")
    ran = cli("inspect", "last.pt")
    assert ran.code == 3
    assert ran.err.splitlines() == [
        "error: last.pt: is a link to gone.pt, where there is no file",
        "hint: see what it points to: ls -l last.pt",
    ]
