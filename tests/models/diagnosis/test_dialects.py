"""The doctor for a model of another program: a script, a map, and several causes at once."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpttool
from ckpttool.mapping.applying import named
from tests.support.comparing import prefixed
from tests.support.dialects import (
    CASES,
    GPT,
    LLAMA,
    State,
    filled,
    fused,
    llama,
    mapped,
    meta,
    random_state,
    renamed,
)
from tests.support.running import Cli

# ---- The doctor's script for a reference in the place of a model: one code, asking for names and shapes


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
    for path, like, flags in ((*paths, "OUT --map meta-llama"), (*paths[::-1], "--map meta-llama --inverse")):
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


# ---- doctor proposes a map where a model of another program would fit, and only then ------------------


def model_of(state: State) -> nn.Module:
    """Return a module with parameters of these names and shapes."""
    root = nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.empty_like(tensor)))
    return root


@pytest.fixture
def pair(tmp_path: Path) -> tuple[State, State]:
    """Return Meta's Llama and the same of Hugging Face, the config of which lies in the folder."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    meta = random_state(CASES["meta-llama"][1])
    return meta, mapped(meta, tmp_path, named("meta-llama"), config=LLAMA)[0]


def advised(state: State, model: nn.Module, folder: Path) -> list[str | None]:
    torch.save(state, folder / "a.pt")
    return [problem.command for problem in ckpttool.doctor(folder / "a.pt", model).problems]


def test_a_map_is_proposed_in_the_direction_that_fits(pair: tuple[State, State], tmp_path: Path) -> None:
    meta, hf = pair
    (there,) = advised(meta, model_of(hf), tmp_path)
    assert there is not None and there.startswith("ckpttool convert") and there.endswith("--map meta-llama")
    (back,) = advised(hf, model_of(meta), tmp_path)
    assert back is not None and back.endswith("--map meta-llama --inverse")


def test_none_is_for_another_model_or_without_numbers(pair: tuple[State, State], tmp_path: Path) -> None:
    meta, hf = pair
    commands = advised(meta, nn.Linear(2, 2), tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    commands += advised(meta, model_of(hf), tmp_path)
    assert not any("meta-llama" in (command or "") for command in commands)


# ---- doctor finds each of several causes that keep one file from loading, and prints commands that run


# Each tensor of the model depends on its size.
CODE = """
from torch import nn

def model(vocab=16, d=4, n=2):
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d)) for _ in range(n))
    head = nn.Linear(d, vocab, bias=False)
    return nn.ModuleDict({"embed": nn.Embedding(vocab, d), "blocks": blocks, "head": head})
"""


@pytest.fixture
def own(here: Path) -> nn.Module:
    """The model of `own.py:model`, in whose folder the test runs."""
    (here / "own.py").write_text(CODE, encoding="utf-8")
    space: dict[str, object] = {}
    exec(CODE, space)
    built = space["model"]()  # type: ignore[operator]
    assert isinstance(built, nn.Module)
    return built


def commands(script: str) -> list[str]:
    """Return the commands of a script that doctor printed."""
    return [line.removeprefix("ckpttool ") for line in script.splitlines() if line.startswith("ckpttool ")]


def pasted(cli: Cli, script: str) -> None:
    """Run each command of a script; all must succeed."""
    assert commands(script)
    for line in commands(script):
        ran = cli(*shlex.split(line))
        assert ran.code == 0, f"{line}: {ran.err}"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "net."])
def test_a_prefix_does_not_hide_a_model_of_another_size(
    prefix: str, own: nn.Module, cli: Cli, here: Path
) -> None:
    torch.save({"model": prefixed(own.state_dict(), prefix)}, here / "a.pt")
    ran = cli("doctor", "a.pt", "--model", "own.py:model(d=8)")
    assert ran.code == 1 and "d is 4 in the file and 8 in the model" in " ".join(ran.out.split("\n#  "))
    pasted(cli, ran.out)


def test_another_number_of_layers_is_found_by_the_factory_or_said(
    own: nn.Module, cli: Cli, here: Path
) -> None:
    torch.save(own.state_dict(), here / "a.pt")
    ran = cli("doctor", "a.pt", "--model", "own.py:model(n=3)")
    assert "size: n is 2 in the file and 3 in the model" in ran.out
    pasted(cli, ran.out)
    torch.save({**own.state_dict(), "blocks.2.0.weight": torch.ones(4)}, here / "like.pt")
    ran = cli("doctor", "a.pt", "--like", "like.pt")
    said = " ".join(line.strip("# ") for line in ran.out.splitlines())
    assert "lacks 1 of the model's names; the model has 3 layers 'blocks.N', the file 2" in said
    assert said.count("blocks.2.0.weight") == 1  # not once more below


def test_no_names_are_guessed_for_another_model(cli: Cli, here: Path) -> None:
    names = {f"layer{i}.{j}.conv.weight": torch.ones(4, 4, 3, 3) for i in range(2) for j in range(2)}
    torch.save({**names, "fc.weight": torch.ones(3, 9)}, here / "a.pt")
    torch.save(
        {f"stage{i}.conv.weight": torch.ones(4, 4, 3, 3) for i in range(3)}
        | {"top.weight": torch.ones(5, 7)},
        here / "b.pt",
    )
    ran = cli("doctor", "a.pt", "--like", "b.pt")
    assert ran.code == 1 and not commands(ran.out) and "shapes alone" not in ran.out


@pytest.fixture
def gpt(here: Path) -> State:
    """nanoGPT's weights; `gpt2.pt` has what GPT-2 of transformers saves of them."""
    state = random_state(GPT)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    torch.save(mapped(state, here, named("nanogpt-gpt2"), config=LLAMA)[0], here / "gpt2.pt")
    return state


def with_optimizer(state: State, order: int = 1) -> dict[str, object]:
    """Return a checkpoint as nanoGPT writes it: two groups of an AdamW that names no parameters."""
    parameters = [nn.Parameter(value) for name, value in state.items() if name != "lm_head.weight"][::order]
    groups = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return {"model": state, "optimizer": optimizer.state_dict(), "iter_num": 5}


@pytest.mark.parametrize("has_head", [True, False])
def test_a_prefix_does_not_hide_a_map(has_head: bool, gpt: State, cli: Cli, here: Path) -> None:
    state = {name: value for name, value in gpt.items() if has_head or name != "lm_head.weight"}
    torch.save({"model": prefixed(state, "module.")}, here / "a.pt")
    ran = cli("doctor", "a.pt", "--like", "gpt2.pt")
    assert [line.split()[0] for line in commands(ran.out)] == ["strip-prefix", "convert", "doctor"]
    pasted(cli, ran.out)


def test_the_optimizer_is_named_before_a_map(gpt: State, cli: Cli, here: Path) -> None:
    torch.save(whole := with_optimizer(gpt), here / "a.pt")
    ran = cli("doctor", "a.pt", "--like", "gpt2.pt")
    assert commands(ran.out)[0] == "optimizer a.pt a.mended.pt --to names --order state"
    assert "they are taken in the order of the file's state" in " ".join(ran.out.split("\n#  "))
    pasted(cli, ran.out)
    made = torch.load(here / "a.mended.pt")
    assert made["iter_num"] == whole["iter_num"]
    ends = [name for name in gpt if name != "lm_head.weight"]
    for number, name in enumerate(ends):
        kept = made["optimizer"]["state"][name]["exp_avg"]
        assert kept.shape == made["model"][name].shape
        torch.testing.assert_close(kept, torch.full_like(kept, 0.1 * (number + 1)))


def test_an_optimizer_that_no_order_names_is_left_out_by_name(gpt: State, cli: Cli, here: Path) -> None:
    torch.save(with_optimizer(gpt, order=-1), here / "a.pt")
    ran = cli("doctor", "a.pt", "--like", "gpt2.pt")
    assert commands(ran.out)[0] == "convert a.pt a.mended.pt --drop optimizer"
    assert "can't follow the map, and is left out: optimizer" in " ".join(ran.out.split("\n#  "))
    pasted(cli, ran.out)
    assert torch.load(here / "a.mended.pt")["iter_num"] == 5
