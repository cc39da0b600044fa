"""Names that could run something are shown first and whole, said when written, and refused by --no-code."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.inert_pickle.known_names import names_in, names_that_run, unknown_names
from ckpttool.inert_pickle.reader import read_pickle
from ckpttool.inert_pickle.values import Global
from tests.support.crafting import call, dict_of, list_of, name, program, storage, tensor, text, torch_zip
from tests.support.running import Cli
from tests.support.saved import opened
from tests.support.trees import model, training_checkpoint
from tests.support.user_classes import NAMES_BY_ENUMS

WEIGHT = tensor(storage(1), (1,))
BYTES = {"0": bytes(4)}
NINE = [name(f"aaa{i}", "Thing") for i in range(8)] + [name("posix", "system")]


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """A state next to eight unknown names that sort before `posix.system`."""
    tree = {"model": dict_of({"w": WEIGHT}), "x": list_of(*NINE)}
    return torch_zip(tmp_path / "in.pt", dict_of(tree), BYTES)


def test_what_runs_is_shown_first_and_never_shortened(hidden: Path, cli: Cli) -> None:
    shown = " ".join(cli("inspect", hidden).out.split())
    assert shown.index("posix.system") < shown.index("aaa0.Thing") < shown.index("aaa7.Thing")
    assert cli("inspect", hidden, "--json").json["unknown"][0] == "posix.system"


def test_every_command_says_what_it_writes_on(hidden: Path, cli: Cli, tmp_path: Path) -> None:
    for command in (["convert"], ["add-prefix"], ["rename-keys", "--map", "w=v"]):
        ran = cli(*command, hidden, tmp_path / "out.pt", "--force")
        assert ran.code == 0
        assert all(each in ran.err for each in ["posix.system", *(f"aaa{i}.Thing" for i in range(8))])
    ran = cli("convert", hidden, tmp_path / "out.safetensors")
    assert "posix.system" not in ran.err
    ran = cli("slim", hidden, tmp_path / "slim.pt", "--json")
    assert (ran.code, ran.json["mentions"]) == (0, [])


def test_verify_no_code_fails_for_names_that_run(hidden: Path, cli: Cli) -> None:
    assert cli("verify", hidden).code == 0
    ran = cli("verify", hidden, "--no-code", "--json")
    assert (ran.code, ran.json["ok"]) == (1, False)
    assert next((each["kind"], each["name"]) for each in ran.json["problems"]) == ("code", "posix.system")
    assert "posix.system" in cli("verify", hidden, "--no-code").err


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_verify_no_code_accepts_an_honest_file(zipped: bool, cli: Cli, tmp_path: Path) -> None:
    torch.save(training_checkpoint(), tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    assert cli("verify", tmp_path / "in.pt", "--no-code").code == 0


CALL = call(name("os", "system"), text("true"))
DROPPED = {
    "popped": CALL + b"0}",
    "stored in the memo": CALL + b"q\x000}",
    "overwritten": b"}" + text("a") + CALL + b"s" + text("a") + b"Ns",
    "popped with a mark": b"}(" + CALL + b"1",
    "a name alone": b"}" + name("os", "system") + b"0",
}


@pytest.mark.parametrize("how", DROPPED)
def test_a_call_whose_result_is_dropped_is_found(how: str, cli: Cli, tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "in.pt", DROPPED[how])
    assert cli("inspect", path, "--json").json["unknown"] == ["os.system"]
    assert cli("verify", path, "--no-code").code == 1


def test_a_call_in_another_pickle_of_a_legacy_file_is_found(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    sizes = {"short": 2, "int": 4, "long": 4}
    facts = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}, 2)
    raw = path.read_bytes()
    assert facts in raw
    path.write_bytes(raw.replace(facts, program(CALL)))
    assert cli("inspect", path, "--json").json["unknown"] == ["os.system"]


def test_names_in_shards_are_found(cli: Cli, tmp_path: Path) -> None:
    checkpoint = opened({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path)
    ckpttool.save(checkpoint, tmp_path / "folder", to="torch-sharded", shard_size=8)
    (shard, *_) = sorted((tmp_path / "folder").glob("*.bin"))
    torch_zip(shard, CALL + b"0" + dict_of({"a": tensor(storage(2), (2,))}), {"0": bytes(8)})
    assert cli("verify", tmp_path / "folder", "--no-code").code == 1


def test_names_in_a_dcp_folder_are_found(cli: Cli, tmp_path: Path) -> None:
    ckpttool.save(opened({"a": torch.ones(2), "n": [1, "x"]}, tmp_path), tmp_path / "dcp", to="dcp")
    assert cli("inspect", tmp_path / "dcp", "--json").json["unknown"] == NAMES_BY_ENUMS
    assert cli("verify", tmp_path / "dcp", "--no-code").code == bool(NAMES_BY_ENUMS)
    metadata = tmp_path / "dcp" / ".metadata"
    raw = metadata.read_bytes()  # PROTO, FRAME and its length come first
    metadata.write_bytes(raw[:2] + CALL + b"0" + raw[11:])
    assert cli("inspect", tmp_path / "dcp", "--json").json["unknown"] == ["os.system"]


HARMLESS: list[Any] = [
    *(1j, range(3), {1, 2}, frozenset({1}), b"bytes", bytearray(b"x"), OrderedDict(a=1)),
    *(defaultdict(list, a=[1]), defaultdict(int), Counter("ab"), deque([1]), pathlib.PurePosixPath("x")),
    *(np.float64(0.5), np.arange(3), np.dtype("int8"), np.random.RandomState(0)),
    *(torch.Size([1]), torch.float16, torch.device("cpu"), torch.strided, torch.nn.Parameter(torch.ones(1))),
    *(torch.bfloat16, torch.ones(1).to_sparse(), torch.optim.SGD([torch.ones(1)], 0.1).state_dict(), model()),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", HARMLESS, ids=lambda value: type(value).__name__)
def test_harmless_names_are_not_called_unknown(value: Any, tmp_path: Path) -> None:
    with opened(value, tmp_path) as checkpoint:
        assert unknown_names(checkpoint.names) == []


PLAIN = [argparse.Namespace(a=1), datetime.datetime(2020, 1, 1)]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_data_of_the_standard_library_is_unknown_but_does_not_run(value: Any) -> None:
    names = read_pickle(pickle.dumps(value, 2)).names
    assert unknown_names(names) and names_that_run(names) == []


_ATTACKS = """
    os:system posix:system nt:system builtins:eval builtins:exec builtins:getattr builtins:__import__
    builtins:type __builtin__:execfile runpy:run_path subprocess:Popen torch.storage:_load_from_bytes
    torch:load torch:storage._load_from_bytes torch.serialization:os.system
    torch.nn.modules.module:torch.load torch.nn.modules.linear:Linear.forward torch.nn.modules:F.linear
    torch.optim.optimizer:torch._utils.sys.modules torch:FloatStorage.from_file numpy:load
    numpy.testing._private.utils:runstring numpy:ndarray.tofile collections:OrderedDict.__init__
    collections:namedtuple operator:attrgetter functools:partial antigravity:x pathlib:Path.write_text
    argparse:FileType argparse.Namespace:x torch.nn.modules.evil.sub:Linear
    torch.nn.modules.evilé:Linear torch_nn.modules.linear:Linear __main__:Net
"""
ATTACKS = [tuple(name.split(":")) for name in _ATTACKS.split()]


@pytest.mark.parametrize(("module", "attribute"), ATTACKS)
def test_a_name_that_could_run_is_never_called_harmless(module: str, attribute: str) -> None:
    assert names_that_run([Global(module, attribute)]) == [f"{module}.{attribute}"]


def test_names_by_which_pickles_run_code_come_first() -> None:
    """A package's own module may be called like one; what is reached through another module is one."""
    texts = "mine.commands:B z:Y os:system builtins:eval torch.serialization:os.remove"
    names = [Global(*text.split(":")) for text in texts.split()]
    first = ["builtins.eval", "os.system", "torch.serialization.os.remove"]
    assert names_that_run(names) == [*first, "mine.commands.B", "z.Y"]


def test_names_in_finds_names_wherever_they_are() -> None:
    body = b"}" + name("m", "key") + list_of(call(name("m", "C"), name("m", "arg"))) + b"s"
    tree = read_pickle(program(body)).value
    assert {str(each) for each in names_in(tree)} == {"m.key", "m.C", "m.arg"}
