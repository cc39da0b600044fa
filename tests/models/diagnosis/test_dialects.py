"""The doctor's script for a reference in the place of a model: one code, asking for names and shapes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.running import Cli
from tests.support.two_dialects import filled, fused, llama, meta, renamed

FP8 = {
    "a.weight": torch.ones(16, 16).to(torch.float8_e4m3fn),
    "a.weight_scale_inv": torch.full((1, 1), 0.01),
    "norm.weight": torch.ones(16),
}


def kinds(ran: Any) -> list[str]:
    return [problem["kind"] for problem in ran.json["problems"] if not problem["remark"]]


def test_the_script_brings_a_file_over_and_the_result_fits(cli: Cli, tmp_path: Path) -> None:
    save_file(llama(), tmp_path / "in.safetensors")
    save_file(fused(llama()), tmp_path / "like.safetensors")
    arguments = ("doctor", tmp_path / "in.safetensors", "--like", tmp_path / "like.safetensors")
    found = cli(*arguments, "--json")
    assert (found.code, kinds(found), found.json["loads"]) == (1, ["dialect"], False)
    script = [shlex.split(line) for line in cli(*arguments).out.splitlines() if not line.startswith("#")]
    assert [words[1] for words in script] == ["conform", "doctor"]
    assert [cli(*words[1:]).code for words in script] == [0, 0]
    made = load_file(script[0][3])
    assert all(torch.equal(made[name], tensor) for name, tensor in fused(llama()).items())


def test_a_prefix_is_stripped_by_the_simpler_command(cli: Cli, tmp_path: Path) -> None:
    torch.save({f"module.{name}": tensor for name, tensor in llama().items()}, tmp_path / "in.pt")
    torch.save(llama(), tmp_path / "like.pt")
    found = cli("doctor", tmp_path / "in.pt", "--like", tmp_path / "like.pt", "--json")
    assert kinds(found) == ["prefix"]
    assert found.json["problems"][0]["command"].startswith("ckpttool strip-prefix")
    assert found.json["then"].startswith("ckpttool doctor")


def test_a_model_and_its_checkpoint_get_the_same_commands(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch.nn import Linear, Sequential\n\n\n"
        "def net():\n    return Sequential(Linear(6, 4), Linear(4, 2))\n"
    )
    shapes = {"0.weight": (4, 6), "0.bias": (4,), "1.weight": (2, 4), "1.bias": (2,)}
    save_file(filled(shapes), tmp_path / "like.safetensors")
    state = filled({"net.a.weight": (4, 6), "net.a.bias": (4,), "net.c.weight": (4, 2), "net.c.bias": (2,)})
    save_file(state, tmp_path / "in.safetensors")
    sides = ("--like", tmp_path / "like.safetensors"), ("--model", f"{tmp_path}/nets.py:net")
    found = [cli("doctor", tmp_path / "in.safetensors", *side, "--json") for side in sides]
    commands = [
        [str(problem.get("command")).partition(side[0])[0] for problem in ran.json["problems"]]
        for ran, side in zip(found, sides, strict=True)
    ]
    assert commands[0] == commands[1]
    assert found[0].json["then"].startswith("ckpttool doctor")
    assert found[1].json["then"].startswith("ckpttool reload")


def test_several_ways_are_said_and_no_command_is_printed(cli: Cli, tmp_path: Path) -> None:
    save_file(renamed(llama(), {"model": "m"}), tmp_path / "in.safetensors")
    save_file({f"a.{k}": v for k, v in meta(llama()).items()}, tmp_path / "like.safetensors")
    found = cli("doctor", tmp_path / "in.safetensors", "--like", tmp_path / "like.safetensors", "--json")
    assert (found.code, kinds(found)) == (1, ["ambiguous"])
    assert "heads reordered" in found.json["problems"][0]["message"]


def written(state: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(state, path)
    return path


ATTENTION = {f"b.{n}.attn.{w}.weight": (8, 8) for n in (0, 1) for w in ("query", "key", "value")}
WORDS = {"b": "layers", "attn": "att", "query": "q_proj", "key": "k_proj", "value": "v_proj"}
EQUAL = filled({f"enc.{word}.weight": (8, 8) for word in ("zeta", "alpha", "mid")})
OPEN = {
    "another family's rotary rows": (meta(llama()), llama(), "heads reordered"),
    "and the way back": (llama(), meta(llama()), "heads reordered"),
    "q, k and v of one shape": (filled(ATTENTION), renamed(filled(ATTENTION), WORDS), "heads reordered"),
    "squares": (EQUAL, renamed(EQUAL, {"enc": "net", "zeta": "0", "alpha": "1", "mid": "2"}), "one shape"),
    "squares beside a head of another size": (
        {**EQUAL, "enc.head.weight": torch.ones(10, 8)},
        {
            **renamed(EQUAL, {"enc": "net", "zeta": "0", "alpha": "1", "mid": "2"}),
            "head.weight": torch.ones(5, 8),
        },
        "one shape",
    ),
}


@pytest.mark.covered(lambda flag, what: flag == "--model" and "head" not in what)
@pytest.mark.parametrize("what", OPEN)
@pytest.mark.parametrize("flag", ["--like", "--model"])
def test_what_conform_refuses_is_not_guessed_by_order_and_shapes(
    what: str, flag: str, cli: Cli, tmp_path: Path
) -> None:
    theirs, ours, said = OPEN[what]
    path, like = written(theirs, tmp_path / "in.safetensors"), written(ours, tmp_path / "like.safetensors")
    (tmp_path / "net.py").write_text(
        "import torch\nfrom safetensors.torch import load_file\n\n\ndef net():\n"
        f"    root = torch.nn.Module()\n    for name, tensor in load_file({str(like)!r}).items():\n"
        "        *parts, last = name.split('.')\n        module = root\n        for part in parts:\n"
        "            if part not in module._modules:\n"
        "                module.add_module(part, torch.nn.Module())\n"
        "            module = module._modules[part]\n"
        "        module.register_parameter(last, torch.nn.Parameter(tensor))\n    return root\n"
    )
    side = like if flag == "--like" else f"{tmp_path}/net.py:net"
    found = cli("doctor", path, flag, side, "--json")
    assert (found.code, kinds(found)) == (1, ["ambiguous"])
    assert said in found.json["problems"][0]["message"]
    assert ("--check-values" in found.json["problems"][0]["message"]) is (flag == "--like")
    assert "command" not in found.json["problems"][0]


def test_words_for_parts_are_believed_before_shapes(cli: Cli, tmp_path: Path) -> None:
    words = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    sizes = {"down_proj": (8, 16), "up_proj": (16, 8), "gate_proj": (16, 8)}
    theirs = filled({f"a.{word}.weight": sizes[word] for word in sizes})
    ours = {f"b.{words[word]}.weight": theirs[f"a.{word}.weight"] for word in words}
    torch.save(theirs, tmp_path / "in.pt")
    torch.save(ours, tmp_path / "like.pt")
    script = cli("doctor", tmp_path / "in.pt", "--like", tmp_path / "like.pt").out.splitlines()
    commands = [shlex.split(line)[1:] for line in script if not line.startswith("#")]
    assert [cli(*words).code for words in commands] == [0] * len(commands)
    made = torch.load(commands[0][2])
    assert all(torch.equal(made[name], tensor) for name, tensor in ours.items())


def test_the_map_that_decides_is_named_where_its_numbers_are_not_known(cli: Cli, tmp_path: Path) -> None:
    paths = (
        written(meta(llama()), tmp_path / "meta.safetensors"),
        written(llama(), tmp_path / "hf.safetensors"),
    )
    for path, like, flags in ((*paths, "--map meta-llama,"), (*paths[::-1], "--map meta-llama --inverse")):
        found = cli("doctor", path, "--like", like, "--json")
        assert flags in found.json["problems"][0]["message"]


def quantised(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    codes = {k: v.to(torch.float8_e4m3fn) for k, v in state.items() if "proj" in k}
    return {**state, **codes, **{f"{name}_scale_inv": torch.ones(1, 1) for name in codes}}


def test_a_quantised_file_of_another_dialect_is_plain_first(cli: Cli, tmp_path: Path) -> None:
    path = written(quantised(llama()), tmp_path / "in.safetensors")
    like = written(fused(llama()), tmp_path / "like.safetensors")
    script = cli("doctor", path, "--like", like).out.splitlines()
    commands = [shlex.split(line)[1:] for line in script if not line.startswith("#")]
    assert [words[0] for words in commands] == ["convert", "conform", "doctor"]
    assert [cli(*words).code for words in commands] == [0, 0, 0]


def test_no_rows_of_a_quantised_file_are_guessed(cli: Cli, tmp_path: Path) -> None:
    path = written(quantised(llama()), tmp_path / "in.safetensors")
    found = cli("doctor", path, "--like", written(meta(llama()), tmp_path / "like.safetensors"), "--json")
    assert kinds(found) == ["quantised", "ambiguous"]


CLASSES = {"fc.weight": (10, 8), "fc.bias": (10,), "conv.weight": (8, 3, 3, 3)}
REFUSED = {
    "a map": (llama(), meta(llama()), "in.safetensors OUTPUT --map meta-llama --inverse\n"),
    "plain tensors": (
        FP8,
        {"a.weight": torch.ones(16, 16).bfloat16(), "norm.weight": torch.ones(16)},
        "in.safetensors PLAIN --dequantize\n",
    ),
    "another head": (
        filled(CLASSES),
        filled({**CLASSES, "fc.weight": (20, 8), "fc.bias": (20,)}),
        "a reference with 10 rows",
    ),
    "a larger vocabulary": (llama(rows=50), fused(llama(rows=64)), "--pad-vocab adds rows of zeros"),
    "a larger vocabulary of another family": (meta(llama(rows=50)), llama(rows=64), "--pad-vocab"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_conform_names_what_else_brings_the_file_over(what: str, cli: Cli, tmp_path: Path) -> None:
    theirs, ours, hint = REFUSED[what]
    path, like = written(theirs, tmp_path / "in.safetensors"), written(ours, tmp_path / "like.safetensors")
    ran = cli("conform", path, tmp_path / "out.safetensors", "--like", like)
    assert ran.code == 1
    assert hint in ran.err


@pytest.mark.parametrize("sides", [(), ("--like", "a", "--model", "b:c")])
def test_one_side_to_fit_is_named(sides: tuple[str, ...], cli: Cli, tmp_path: Path) -> None:
    torch.save(llama(), tmp_path / "in.pt")
    assert cli("doctor", tmp_path / "in.pt", *sides).code == 2


def test_a_file_that_fits_is_exit_0(cli: Cli, tmp_path: Path) -> None:
    torch.save(llama(), tmp_path / "in.pt")
    assert cli("doctor", tmp_path / "in.pt", "--like", tmp_path / "in.pt").code == 0


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_quantised_file_is_dequantised_and_its_codes_are_never_cast(
    prefix: str, cli: Cli, tmp_path: Path
) -> None:
    save_file(FP8, tmp_path / "in.safetensors")
    plain = {"a.weight": torch.ones(16, 16).bfloat16(), "norm.weight": torch.ones(16)}
    save_file({prefix + name: tensor for name, tensor in plain.items()}, tmp_path / "like.safetensors")
    arguments = ("doctor", tmp_path / "in.safetensors", "--like", tmp_path / "like.safetensors")
    found = cli(*arguments, "--json")
    commands = [shlex.split(problem["command"]) for problem in found.json["problems"] if "command" in problem]
    assert kinds(found)[0] == "quantised"
    assert "--dequantize" in commands[0]
    assert not any("--exclude" in words for words in commands)
    script = [shlex.split(line) for line in cli(*arguments).out.splitlines() if not line.startswith("#")]
    assert [cli(*words[1:]).code for words in script] == [0] * len(script)
    made = load_file(script[0][3])[f"{prefix}a.weight"]
    assert torch.allclose(made.float(), torch.full((16, 16), 0.01), rtol=0.01)


def test_no_scale_is_left_out_where_the_codes_can_t_be_dequantised(cli: Cli, tmp_path: Path) -> None:
    state = {**FP8, "a.weight_scale_inv": torch.ones(7, 3)}
    save_file(state, tmp_path / "in.safetensors")
    save_file({"a.weight": torch.ones(16, 16), "norm.weight": torch.ones(16)}, tmp_path / "like.safetensors")
    found = cli("doctor", tmp_path / "in.safetensors", "--like", tmp_path / "like.safetensors", "--json")
    assert not any("command" in problem for problem in found.json["problems"])
    assert kinds(found) == ["quantised"]
    assert "--dequantize" in found.json["problems"][0]["message"]


def test_a_model_that_is_quantised_too_gets_its_codes(cli: Cli, tmp_path: Path) -> None:
    save_file({f"model.{name}": tensor for name, tensor in FP8.items()}, tmp_path / "in.safetensors")
    save_file(FP8, tmp_path / "like.safetensors")
    found = cli("doctor", tmp_path / "in.safetensors", "--like", tmp_path / "like.safetensors", "--json")
    assert kinds(found) == ["prefix"]
