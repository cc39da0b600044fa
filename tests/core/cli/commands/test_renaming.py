"""ckpttool strip-prefix, add-prefix and rename-keys: between a wrapped model's file and a plain one."""

from __future__ import annotations

import io
import json
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.comparing import assert_same, prefixed

ONE = torch.ones(1)


def plain() -> OrderedDict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return OrderedDict(net.state_dict())


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    """Save ddp.pt, last.pt of a wrapped model's training, lit.ckpt of Lightning, and two keys as in.pt."""
    torch.save(prefixed(plain(), "module."), "ddp.pt")
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Sequential(torch.nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(wrapper.named_parameters())
    tree = {"epoch": 3, "model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, "last.pt")
    net = torch.nn.Linear(2, 2)
    lightning: dict[str, Any] = {"epoch": 2, "pytorch-lightning_version": "2.6.0"}
    lightning |= {"state_dict": prefixed(net.state_dict(), "model."), "loops": {"fit_loop": {}}}
    lightning |= {"optimizer_states": [torch.optim.SGD(net.parameters(), 0.1).state_dict()]}
    torch.save(lightning | {"hyper_parameters": {"lr": 0.1, "classes": ["cat", "dog"]}}, "lit.ckpt")
    torch.save({"backbone.0.weight": torch.ones(2), "head.bias": torch.zeros(1)}, "in.pt")


# strip-prefix


def test_the_result_is_one_line_and_safetensors_gets_the_bytes_of_save_file(cli: Any) -> None:
    ran = cli("strip-prefix ddp.pt out.safetensors")
    assert (ran.code, ran.err) == (0, "")
    (line,) = ran.out.splitlines()
    assert line.startswith("stripped 'module.' from 9 of 9 keys -> out.safetensors (") and line.endswith(
        " s)"
    )
    save_file(plain(), "oracle")
    assert Path("out.safetensors").read_bytes() == Path("oracle").read_bytes()


JSON = {
    "strip-prefix ddp.pt out.pt": {"keys": 9, "renamed": 9, "left_out": []},
    "strip-prefix last.pt out.safetensors": {"left_out": ["model._metadata", "epoch", "optimizer"]},
    "add-prefix in.pt out.safetensors": {"keys": 2, "renamed": 2, "left_out": []},
    "rename-keys in.pt out.safetensors --map head=tail": {"keys": 2, "renamed": 1, "left_out": []},
}


@pytest.mark.parametrize("command", JSON)
def test_json_has_the_fields_that_scripts_rely_on(command: str, cli: Any) -> None:
    ran = cli(f"{command} --json")
    assert (ran.code, ran.err) == (0, "")
    output = command.split()[2]
    assert ran.json == ran.json | JSON[command] | {"output": output, "bytes": os.path.getsize(output)}
    assert ran.json["seconds"] >= 0


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_the_output_may_be_the_input(ending: str, cli: Any, here: Path) -> None:
    path = here / "alone" / f"model{ending}"
    path.parent.mkdir()
    save = save_file if ending == ".safetensors" else torch.save
    save(prefixed(plain(), "module."), path)
    assert cli("strip-prefix", path, path).code == 2
    assert cli("strip-prefix", path, path, "--force").code == 0
    found = load_file(path) if ending == ".safetensors" else torch.load(path)
    assert_same(dict(sorted(plain().items())), dict(sorted(found.items())))
    assert [*path.parent.iterdir()] == [path]


def test_the_input_is_never_changed(cli: Any) -> None:
    before = Path("last.pt").read_bytes()
    for output in ("out.pt", "out.safetensors"):
        cli("strip-prefix last.pt", output)
    assert Path("last.pt").read_bytes() == before


def test_nothing_to_strip_exits_1_and_names_the_prefix_there_is(cli: Any) -> None:
    torch.save({"_forward_module.a": ONE}, "in.pt")
    ran = cli("strip-prefix in.pt out.pt")
    assert (ran.code, ran.out) == (1, "")
    assert "no key begins with 'module.' or '_orig_mod.'" in ran.err
    assert ran.err.endswith(": ckpttool strip-prefix in.pt out.pt --prefix _forward_module.\n")
    assert not os.path.exists("out.pt")
    assert cli("strip-prefix in.pt out.pt --json").json["error"]["kind"] == "nothing-to-do"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"module.a", "0._orig_mod.b"}),
        ("--repeat", {"a", "0._orig_mod.b"}),
        ("--prefix _orig_mod. --anywhere", {"module.module.a", "0.b"}),
        ("--prefix module.module.", {"a", "0._orig_mod.b"}),
    ],
)
def test_the_flags_of_renaming(flags: str, expected: set[str], cli: Any) -> None:
    torch.save({"module.module.a": ONE, "0._orig_mod.b": ONE}, "in.pt")
    assert cli(f"strip-prefix in.pt out.pt {flags}").code == 0
    assert set(torch.load("out.pt")) == expected


LIGHTNING = {"pytorch-lightning_version": "2.5.0", "epoch": 1}

# What is saved, the state that is stripped without a flag or by the command in the hint, and what is said
WRAPPED: dict[str, tuple[Any, list[str], str]] = {
    "torch.compile": (
        {"_orig_mod.a": ONE, "_orig_mod.b.w": ONE},
        ["a", "b.w"],
        "stripped '_orig_mod.' from 2",
    ),
    "DDP of it": ({"module._orig_mod.a": ONE}, ["a"], "stripped 'module._orig_mod.' from 1 of 1"),
    "it of DDP": ({"_orig_mod.module.a": ONE}, ["a"], "stripped '_orig_mod.module.' from 1 of 1"),
    "it of DDP of it": ({"_orig_mod.module._orig_mod.a": ONE}, ["a"], "'_orig_mod.module._orig_mod.'"),
    "some keys": ({"_orig_mod.a": ONE, "b": ONE}, ["a", "b"], "stripped '_orig_mod.' from 1 of 2"),
    "a module called module in it": (
        {"_orig_mod.module.a": ONE, "_orig_mod.b": ONE},
        ["module.a", "b"],
        "stripped '_orig_mod.' from 2 of 2",
    ),
    "in a checkpoint": ({"model": {"_orig_mod.a": ONE}, "epoch": 3}, ["a"], "stripped '_orig_mod.'"),
    "Lightning": ({**LIGHTNING, "state_dict": {"model.a": ONE}}, ["a"], "stripped 'model.'"),
    "Lightning beside a loss": (
        {**LIGHTNING, "state_dict": {"net.a.w": ONE, "net.b.w": ONE, "loss.w": ONE}},
        ["a.w", "b.w", "loss.w"],
        "stripped 'net.'",
    ),
    "Fabric": ({"_forward_module.a": ONE}, ["a"], "stripped '_forward_module.'"),
    "compiled parts": ({"0._orig_mod.a": ONE}, ["0.a"], "stripped '_orig_mod.'"),
    "an average alone": ({"model": {"a": ONE}, "ema": {"module.a": ONE}}, ["a"], "stripped 'module.'"),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_without_a_flag_a_prefix_goes_or_the_hint_is_the_whole_command(case: str, cli: Any) -> None:
    tree, names, said = WRAPPED[case]
    torch.save(tree, "in.pt")
    ran = cli("strip-prefix in.pt 'out of it.pt'")
    if ran.code:
        (command,) = re.findall(r"ckpttool (strip-prefix .*)", ran.err)
        ran = cli(command)
    assert ran.code == 0, ran.err
    assert said in ran.out
    found = torch.load("out of it.pt")
    where = "ema" if case == "an average alone" else "state_dict" if "state_dict" in tree else "model"
    assert list(found.get(where, found)) == names


def test_optimizers_averages_and_versions_follow_whatever_wraps_them(cli: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(compiled.named_parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    average = {f"module.{name}": value for name, value in compiled.state_dict().items()}
    inside = {"state": compiled.state_dict(), "average": average, "optim": optimizer.state_dict()}
    torch.save({"run": inside, "epoch": 1}, "in.pt")
    assert cli("strip-prefix in.pt out.pt").code == 0
    found = torch.load("out.pt")["run"]
    assert list(found["state"]) == list(found["average"]) == list(net.state_dict())
    assert found["optim"]["param_groups"][0]["param_names"] == [name for name, _ in net.named_parameters()]
    assert found["state"]._metadata["1"]["version"] == 2
    net.load_state_dict(found["state"])


def test_the_chosen_state_is_named_and_state_selects_another(cli: Any) -> None:
    torch.save({"model": {"module.a": ONE}, "ema": {"module.b": ONE}}, "in.pt")
    assert "state: 'model'; also available: --state ema" in cli("strip-prefix in.pt out.safetensors").err
    assert "also available" not in cli("strip-prefix in.pt ema.safetensors --state ema").err
    assert list(load_file("ema.safetensors")) == ["b"]
    assert cli("strip-prefix in.pt x.pt --state teacher").code == 3
    cli("rename-keys in.pt out.pt --map b=c --state ema")
    assert [list(state) for state in torch.load("out.pt").values()] == [["module.a"], ["module.c"]]


def test_a_state_under_a_key_with_dots_is_the_one_that_is_written(cli: Any) -> None:
    """The dotted name fits another dict first."""
    torch.save({"a": {"b": {"x": 1}}, "a.b": {"module.w": ONE}}, "in.pt")
    assert cli("strip-prefix in.pt out.safetensors").code == 0
    assert list(load_file("out.safetensors")) == ["w"]


def test_the_file_goes_to_standard_output_and_words_elsewhere(process: Any) -> None:
    ran = process("strip-prefix", "ddp.pt", "-")
    assert list(torch.load(io.BytesIO(ran.stdout), weights_only=True)) == list(plain())
    assert ran.stderr.startswith(b"stripped 'module.' from 9 of 9 keys -> - (")
    ran = process("strip-prefix", "ddp.pt", "-", "--json")
    assert json.loads(ran.stderr)["output"] == "-"
    torch.load(io.BytesIO(ran.stdout), weights_only=True)


def test_keep_writes_plain_keys_and_what_is_named(cli: Any) -> None:
    ran = cli("strip-prefix lit.ckpt out.pt --prefix model. --keep hyper_parameters --json")
    assert ran.code == 0, ran.err
    assert ran.json["left_out"] == ["epoch", "pytorch-lightning_version", "loops", "optimizer_states"]
    found = torch.load("out.pt")
    assert list(found) == ["state_dict", "hyper_parameters"]
    assert list(found["state_dict"]) == ["weight", "bias"]
    assert found["hyper_parameters"] == {"lr": 0.1, "classes": ["cat", "dog"]}
    torch.nn.Linear(2, 2).load_state_dict(found["state_dict"])
    more = "--keep epoch --keep hyper_parameters"
    assert cli(f"strip-prefix lit.ckpt out.pt --force --prefix model. {more}").code == 0
    assert list(torch.load("out.pt")) == ["epoch", "state_dict", "hyper_parameters"]


def test_keep_of_a_missing_name_hints_those_there_are(cli: Any) -> None:
    ran = cli("strip-prefix lit.ckpt out.pt --prefix model. --keep hparams")
    said = "nothing to do: lit.ckpt: holds nothing named 'hparams' outside the state"
    hint = "hint: there are: epoch, pytorch-lightning_version, loops, optimizer_states and 1 more"
    assert (ran.code, ran.err.splitlines()) == (1, [said, hint])
    assert not os.path.exists("out.pt")


@pytest.mark.parametrize("output", ["out.safetensors", "out/"])
def test_keep_is_refused_where_the_format_holds_only_tensors(output: str, cli: Any) -> None:
    ran = cli(f"strip-prefix lit.ckpt {output} --prefix model. --keep hyper_parameters")
    assert (ran.code, ran.err.splitlines()[1]) == (2, "hint: name a .pt file, which holds what --keep names")


# rename-keys


def test_one_line_says_how_many_keys_and_the_others_are_named(cli: Any) -> None:
    ran = cli("rename-keys in.pt out.pt --map", r"^backbone\.=model.")
    assert (ran.code, ran.err) == (0, "kept as they were: head.bias\n")
    assert ran.out.startswith("renamed 1 of 2 keys -> out.pt (")
    assert list(torch.load("out.pt")) == ["model.0.weight", "head.bias"]


@pytest.mark.parametrize(
    ("maps", "wanted"),
    [
        (["backbone=b", "^b=c"], ["c.0.weight", "head.bias"]),
        ([r"(\w+)\.(\w+)$=\2.\1"], ["backbone.weight.0", "bias.head"]),
        (["e=E", "E=="], ["backbon=.0.w=ight", "h=ad.bias"]),
        ([r"(?<=backbone)\.0=_zero"], ["backbone_zero.weight", "head.bias"]),
        ([r"(?=bias)=the_"], ["backbone.0.weight", "head.the_bias"]),
        ([r"[=a]=A"], ["bAckbone.0.weight", "heAd.biAs"]),
        ([r"\.bias="], ["backbone.0.weight", "head"]),
        (["$=.x=1"], ["backbone.0.weight.x=1", "head.bias.x=1"]),
    ],
)
def test_maps_are_applied_in_order(maps: list[str], wanted: list[str], cli: Any) -> None:
    assert cli("rename-keys in.pt out.pt", *(word for each in maps for word in ("--map", each))).code == 0
    assert list(torch.load("out.pt")) == wanted


MALFORMED = dict.fromkeys(
    ["backbone", "=x", "", "(=x", "[a=b", "(?=x", "*=y"], "'{}' is not REGEX=REPLACEMENT"
)
MALFORMED |= {"(a=x": "'{}' is not REGEX=REPLACEMENT: missing ), unterminated subpattern at position 0"}
MALFORMED |= dict.fromkeys([r"head=\1", r"(head)=\g<x>", r"head=\q"], "error: --map: ")


@pytest.mark.parametrize(
    ("rule", "code", "said"),
    [
        *((rule, 2, said) for rule, said in MALFORMED.items()),
        ("^.*$=w", 3, "'backbone.0.weight' and 'head.bias' would both be named 'w'"),
        ("stem=x", 1, "no key would change\nhint: the first key is 'backbone.0.weight'"),
    ],
)
def test_a_rule_that_can_t_be_applied(rule: str, code: int, said: str, cli: Any) -> None:
    ran = cli("rename-keys in.pt out.pt --map", rule)
    assert ran.code == code and said.format(rule) in ran.err
    assert not os.path.exists("out.pt")


# add-prefix


def test_every_key_gets_the_prefix(cli: Any) -> None:
    save_file({"a": ONE, "module.b": -ONE}, "in.safetensors")
    ran = cli("add-prefix in.safetensors out.pt")
    assert ran.out.startswith("added 'module.' to 2 of 2 keys -> out.pt (")


def test_an_empty_prefix_is_a_usage_error(cli: Any) -> None:
    assert cli("add-prefix in.pt out.pt --prefix ''").code == 2
    assert not os.path.exists("out.pt")


def test_metadata_of_a_safetensors_file_stays(cli: Any) -> None:
    save_file({"a": ONE}, "in.safetensors", metadata={"format": "pt"})
    cli("add-prefix in.safetensors out.safetensors")
    save_file({"module.a": ONE}, "oracle", metadata={"format": "pt"})
    assert Path("out.safetensors").read_bytes() == Path("oracle").read_bytes()


def test_a_prefix_without_a_dot_is_noted(cli: Any) -> None:
    torch.save({"emb.weight": ONE}, "in.pt")
    ran = cli("add-prefix in.pt out.pt --prefix model")
    said = "the prefix ends in no dot, so keys are like 'modelemb.weight'; with a dot: --prefix model.\n"
    assert (ran.code, ran.err) == (0, said)
    assert cli("add-prefix in.pt out.pt --force").err == ""


def test_a_very_long_name_is_cut_in_messages_and_whole_with_v(cli: Any) -> None:
    torch.save({"n" * 10_000: torch.ones(1), "a": torch.ones(1)}, "long.pt")
    ran = cli("rename-keys long.pt out.pt --map ^a$=b")
    assert f"kept as they were: {'n' * 300}…\n" in ran.err
    assert "n" * 10_000 in cli("rename-keys long.pt out.pt --map ^a$=b --force -v").err
    torch.save({"a": torch.ones(1)}, "other.pt")
    rename = "rename-keys long.pt out.pt --force --map"
    for words in (f"{rename} .+=same", f"{rename} ^n+$=", "verify long.pt --against other.pt"):
        assert 300 < len(cli(words).err) < 1000
