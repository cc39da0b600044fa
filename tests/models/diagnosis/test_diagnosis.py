"""Diagnose why a checkpoint does not load; the printed commands, when pasted, make it load strictly."""

from __future__ import annotations

import copy
import json
import os
import shlex
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim.swa_utils import AveragedModel

import ckpttool
from ckpttool.models import factory
from tests.ranks.forked import WarmPython
from tests.support import architectures
from tests.support.architectures import Net
from tests.support.comparing import prefixed
from tests.support.running import Cli, Ran

pytestmark = pytest.mark.usefixtures("one_rank")

ARCHITECTURES = Path(architectures.__file__)


def spec(name: str) -> str:
    return f"{ARCHITECTURES}:{name}"


def made(name: str) -> nn.Module:
    torch.manual_seed(7)
    model: nn.Module = getattr(architectures, name)()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    return model


class ModelEma(nn.Module):
    """An average of the model as timm keeps it: a copy under `module`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")  # the default would be imported for seconds


def compiled_inside(model: Net) -> Net:
    model.conv, model.head = compiled(model.conv), compiled(model.head)
    return model


def checkpointed_inside(model: Net) -> Net:
    model.conv = checkpoint_wrapper(model.conv)
    return model


def fsdp(model: nn.Module) -> nn.Module:
    how, cpu = ShardingStrategy.NO_SHARD, torch.device("cpu")
    return FullyShardedDataParallel(model, sharding_strategy=how, use_orig_params=True, device_id=cpu)


def by_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a state as scripts collect it by hand, with the wrappers' names in it."""
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def without(state: Any, *ends: str) -> Any:
    kept = OrderedDict((key, value) for key, value in state.items() if not key.endswith(ends))
    kept._metadata = state._metadata  # type: ignore[attr-defined]
    return kept


def transposed(state: Any, *names: str) -> dict[str, Any]:
    return {k: v.mT.contiguous() if k in names else v for k, v in state.items()}


def cast(state: Any, dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}


def as_tensorflow(state: Any) -> dict[str, Any]:
    """Return a state with convolutions as HWIO and matrices as (in, out)."""
    orders: dict[int, tuple[int, ...]] = {2: (1, 0), 4: (2, 3, 1, 0)}
    return {k: v.permute(orders[v.dim()]).contiguous() if v.dim() in orders else v for k, v in state.items()}


def stepped(name: str, optimizer: str, wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> Any:
    """Return a training checkpoint after two steps."""
    model = wrap(made(name))
    kind = {"sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p)}
    chosen = kind[optimizer](model.parameters())
    for _ in range(2):
        chosen.zero_grad()
        inputs = torch.rand(2, 4) if name == "first_second" else torch.rand(2, 3, 6, 6)
        model(inputs).square().sum().backward()
        chosen.step()
    return {"model": model.state_dict(), "optimizer": chosen.state_dict(), "epoch": 2}


@dataclass(frozen=True)
class Way:
    """One way in which a load fails.

    Attributes:
        make: what is saved, of the model that was trained.
        kinds: the names of the problems that the doctor must find, in order.
        model: the factory of the model that is to be loaded; by default of the one that was trained.
        trained: the factory of the model that was trained.
        save: how it is saved.
        same: what the loaded model's state must be, of the trained model; by default its own, and None for
            any.
    """

    make: Callable[[Any], Any]
    kinds: str
    model: str = "net"
    trained: str = "net"
    save: Callable[[Any, Path], object] = torch.save
    name: str = "f.pt"
    same: Callable[[Any], Any] | None = field(default=lambda state: state)


def legacy(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def sharded(value: Any, path: Path) -> None:
    path.mkdir()
    places = {}
    for number in (1, 2):
        shard, names = f"model-{number:05d}-of-00002.safetensors", list(value)[number - 1 :: 2]
        save_file({name: value[name] for name in names}, path / shard)
        places |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def dcp(value: Any, path: Path) -> None:
    import torch.distributed.checkpoint

    torch.distributed.checkpoint.save(value, checkpoint_id=path, no_dist=True)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict()


def of_ddp(model: nn.Module) -> dict[str, torch.Tensor]:
    return prefixed(model.state_dict(), "module.")


def lightning(model: nn.Module) -> dict[str, Any]:
    return {"state_dict": prefixed(model.state_dict(), "model."), "pytorch-lightning_version": "2.6.0"}


def layer_norm(model: nn.Module) -> dict[str, Any]:
    new = {"norm.weight": "norm.gamma", "norm.bias": "norm.beta"}
    return {new.get(name, name): tensor for name, tensor in model.state_dict().items()}


def slashed(model: nn.Module) -> dict[str, Any]:
    return {name.replace(".", "/"): tensor for name, tensor in model.state_dict().items()}


def in_pairs(model: Any) -> dict[str, Any]:
    return {"phase.real": model.phase.real.clone(), "phase.imag": model.phase.imag.clone()}


def as_backbone(model: nn.Module) -> dict[str, Any]:
    return dict(prefixed(model.state_dict(), "backbone."))


def with_momentum(model: nn.Module) -> Any:
    return stepped("net", "sgd")


def as_dict(model: nn.Module) -> Any:
    return dict(model.state_dict())


def swapped(model: nn.Module) -> Any:
    return stepped("first_second", "adamw")


def tied_once(model: nn.Module) -> Any:
    return without(model.state_dict(), "out.weight")


def beside(teacher: Any) -> dict[str, Any]:
    return {"model": numbers_by_name(), "teacher": teacher}


def everything(model: nn.Module) -> dict[str, Any]:
    head_turned = transposed(model.state_dict(), "head.weight")
    return {"model": numbers_by_name(), "ema": {**prefixed(head_turned, "module._orig_mod."), "n": 1}}


def inside(state: Any) -> Any:
    return prefixed(state, "model.")


SPECTRAL = "spectral-norm"
WAYS = {
    "DataParallel": Way(lambda m: nn.DataParallel(m).state_dict(), "prefix"),
    "DDP": Way(lambda m: nn.parallel.DistributedDataParallel(m).state_dict(), "prefix"),
    "DataParallel twice": Way(lambda m: nn.DataParallel(nn.DataParallel(m)).state_dict(), "prefix"),
    "compiled": Way(lambda m: compiled(m).state_dict(), "prefix"),
    "DDP of compiled": Way(lambda m: nn.DataParallel(compiled(m)).state_dict(), "prefix"),
    "compiled layers": Way(lambda m: compiled_inside(m).state_dict(), "prefix"),
    "DDP of compiled layers": Way(lambda m: of_ddp(compiled_inside(m)), "prefix prefix"),
    "FSDP by names": Way(lambda m: by_names(fsdp(m)), "prefix"),
    "activation checkpointing by names": Way(lambda m: by_names(checkpointed_inside(m)), "prefix"),
    "an average of timm's kind": Way(lambda m: ModelEma(m).state_dict(), "prefix"),
    "AveragedModel": Way(lambda m: AveragedModel(m).state_dict(), "prefix"),
    "AveragedModel of DDP": Way(lambda m: AveragedModel(nn.DataParallel(m)).state_dict(), "prefix"),
    "a LightningModule's attribute": Way(lightning, "prefix"),
    "a model held by another": Way(state_of, "prefix", model="inside", same=inside),
    "a model held under another name": Way(as_backbone, "names", model="inside", same=inside),
    "one of two models": Way(lambda m: beside(m.state_dict()), "state"),
    "one of two wrapped models": Way(lambda m: beside(nn.DataParallel(m).state_dict()), "state prefix"),
    "a whole pickled DataParallel": Way(lambda m: nn.DataParallel(m), "pickled-model prefix"),
    "another number of classes": Way(lambda m: Net(classes=5).state_dict(), "size", same=None),
    "another width and classes": Way(lambda m: Net(width=6, classes=5).state_dict(), "size", same=None),
    "a transposed head": Way(lambda m: transposed(m.state_dict(), "head.weight"), "layout"),
    "axes as TensorFlow has them": Way(lambda m: as_tensorflow(m.state_dict()), "layout"),
    "a linear layer for a 1×1 convolution": Way(state_of, "shape", "convolved", "linear", same=None),
    "a 1×1 convolution for a linear layer": Way(state_of, "shape", "linear", "convolved", same=None),
    "BatchNorm without counters": Way(lambda m: without(m.state_dict(), "num_batches_tracked"), "counters"),
    "weight norm, new": Way(state_of, "weight-norm", "weight_normed_before", "weight_normed", same=None),
    "spectral norm": Way(state_of, SPECTRAL, "spectral_normed_before", "spectral_normed", same=None),
    "spectral norm, old": Way(as_dict, SPECTRAL, "spectral_normed", "spectral_normed_before", same=None),
    "gamma and beta": Way(layer_norm, "layer-norm"),
    "a tie stored once": Way(tied_once, "ties", "tied", "tied", save_file, "f.safetensors"),
    "complex numbers as pairs": Way(in_pairs, "complex", "waves", "waves"),
    "pairs that were complex": Way(state_of, "complex", "pairs", "waves", same=None),
    "counters of a profiler": Way(
        lambda m: m.state_dict() | {"total_ops": torch.zeros(1), "conv.total_ops": torch.zeros(1)}, "extra"
    ),
    "an epoch among the tensors": Way(lambda m: {**m.state_dict(), "epoch": 3}, "extra"),
    "slashes for dots": Way(slashed, "names"),
    "layers by number": Way(state_of, "names names", "named", "numbered", same=None),
    "momentum of other shapes": Way(with_momentum, "optimizer-order", model="head_first", same=None),
    "momentum of another layer": Way(swapped, "optimizer-order", "second_first", "first_second", same=None),
    "legacy, wrapped": Way(of_ddp, "prefix", save=legacy),
    "safetensors, wrapped": Way(of_ddp, "prefix", save=save_file, name="f.safetensors"),
    "shards, wrapped": Way(of_ddp, "prefix", save=sharded, name="shards"),
    "DCP, wrapped": Way(lambda m: {"model": of_ddp(m)}, "prefix", save=dcp, name="dcp"),
    "everything at once": Way(everything, "state prefix layout extra"),
}


def numbers_by_name() -> dict[str, torch.Tensor]:
    return dict(made("numbered").state_dict())


def diagnosed(cli: Cli, folder: Path, value: Any, model: str = "net") -> Ran:
    """Save a value in f.pt, and diagnose it for a model."""
    torch.save(value, folder / "f.pt")
    return cli("doctor", folder / "f.pt", "--model", model if ":" in model else spec(model), "--json")


def pasted(cli: Cli, commands: list[str]) -> None:
    """Run commands as the shell would split them; each must succeed."""
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "ckpttool"
        ran = cli(*words[1:])
        assert ran.code == 0, f"{command}\n{ran.err}"


@pytest.mark.parametrize("what", WAYS)
def test_the_printed_commands_make_the_file_load(what: str, cli: Cli, tmp_path: Path) -> None:
    way = WAYS[what]
    model, path = made(way.trained), tmp_path / way.name
    own = {k: v.clone() for k, v in model.state_dict().items()}
    expected = way.same(own) if way.same else {}
    way.save(way.make(model), path)

    found = cli("doctor", path, "--model", spec(way.model), "--json")
    assert found.code == 1
    wrong = [problem for problem in found.json["problems"] if not problem["remark"]]
    assert [problem["kind"] for problem in wrong] == way.kinds.split()
    commands = [problem["command"] for problem in wrong if problem["command"] != found.json["then"]]
    printed = cli("doctor", path, "--model", spec(way.model)).out.splitlines()
    script = [line for line in printed if not line.startswith("#")]
    assert script == [*commands, found.json["then"]]

    pasted(cli, script)
    loaded = strictly_loaded(script[-1], found.json["python"])
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


def strictly_loaded(command: str, python: str) -> dict[str, Any]:
    """Return the state of the model that a `reload` command names, after the printed line of Python."""
    words = shlex.split(command)
    assert words[1] == "reload"
    model = factory.build(words[words.index("--model") + 1])
    exec(python, {"model": model, "torch": torch, "safetensors": safetensors, "ckpttool": None})
    return dict(model.state_dict())


@pytest.mark.long
def test_a_plain_program_loads_what_was_fixed(cli: Cli, warm_python: WarmPython, tmp_path: Path) -> None:
    """One program without ckpttool runs all lines of Python."""
    program = ["import sys", "import torch, safetensors.torch"]
    program += [f"sys.path.insert(0, {str(ARCHITECTURES.parent)!r})", "import architectures"]
    kinds = set()
    for number, (what, way) in enumerate(WAYS.items()):
        tree = way.make(made(way.trained))
        if way.save is not torch.save or not isinstance(tree, dict) or not is_state(tree):
            continue
        path = tmp_path / f"{number}.pt"
        torch.save({"model": tree, "epoch": 3}, path)
        found = cli("doctor", path, "--model", spec(way.model), "--json").json
        commands = [problem["command"] for problem in found["problems"] if not problem["remark"]]
        pasted(cli, [command for command in commands if command != found["then"]])
        name, _, arguments = shlex.split(found["then"])[4].rpartition(":")[2].partition("(")
        program += [f"print({what!r})", f"model = architectures.{name}({arguments.removesuffix(')')})"]
        program += [found["python"]]
        kinds |= {problem["kind"] for problem in found["problems"]}
    assert kinds >= {"prefix", "names", "layout", "shape", "counters", "complex", "extra", "size"}
    assert "layer-norm" in kinds
    ran = warm_python.run("-c", "\n".join(program))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def is_state(tree: dict[str, Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in tree.values())


def run_in_shell(script: str) -> str:
    """Run a script with sh, which finds `ckpttool`; return its stdout."""
    tool = Path(sys.executable).with_name("ckpttool")
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    given = {"env": environment, "text": True, "capture_output": True, "timeout": 110}
    ran = subprocess.run(["sh", "-e"], input=script, **given)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_shell_reads_the_words_of_the_commands(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "it's $HOME.pt"
    torch.save(AveragedModel(nn.DataParallel(made("net"))).state_dict(), path)
    script = cli("doctor", path, "--model", spec("net")).out
    found = cli("doctor", path, "--model", spec("net"), "--json").json
    commands = [each["command"] for each in found["problems"] if each["command"] and not each["remark"]]
    tool = """ckpttool() { printf '%s\\n' ckpttool "$@"; }"""
    ran = subprocess.run(["sh", "-e"], input=f"{tool}\n{script}", text=True, capture_output=True, timeout=60)
    words = [word for command in [*commands, found["then"]] for word in shlex.split(command)]
    assert len(commands) > 0 and (ran.returncode, ran.stdout.splitlines()) == (0, words)


@pytest.mark.long
def test_the_output_is_a_shell_script(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "it's $HOME.pt"
    torch.save(AveragedModel(nn.DataParallel(made("net"))).state_dict(), path)
    script = cli("doctor", path, "--model", spec("net")).out
    assert "loaded 9 of 9 tensors" in run_in_shell(script)


def test_a_prefix_that_reload_strips_by_itself_is_said(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": prefixed(made("Net").state_dict(), "module.")}, tmp_path / "ddp.pt")
    found = cli("doctor", tmp_path / "ddp.pt", "--model", spec("Net"), "--json")
    assert (found.code, found.json["loads"]) == (1, False)
    remark = next(problem for problem in found.json["problems"] if problem["kind"] == "reload")
    assert remark["remark"] is True
    assert "strips 'module.' by itself" in remark["message"]
    assert "load_state_dict does not" in remark["message"]
    assert remark["command"] == f"ckpttool reload {tmp_path}/ddp.pt --model {spec('Net')}"
    assert cli(*shlex.split(remark["command"])[1:]).code == 0
    page = cli("doctor", tmp_path / "ddp.pt", "--model", spec("Net")).out
    assert f"\n#   {remark['command']}" in page


def test_a_file_that_loads_is_exit_0_with_remarks(cli: Cli, tmp_path: Path) -> None:
    found = diagnosed(cli, tmp_path, {"model": cast(made("net").state_dict(), torch.half), "epoch": 1})
    assert (found.code, found.json["loads"], found.json["state"]) == (0, True, "model")
    assert [problem["kind"] for problem in found.json["problems"]] == ["nested", "precision"]
    assert all(problem["remark"] for problem in found.json["problems"])
    pasted(cli, [found.json["problems"][1]["command"], found.json["then"]])
    with ckpttool.open(tmp_path / "f.mended.pt") as checkpoint:
        assert {tensor.dtype.name for tensor in checkpoint.state().tensors.values()} == {"float32", "int64"}


LOADS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "plain": ("net", state_of),
    "BatchNorm from before counters": ("net", lambda m: dict(without(m.state_dict(), "num_batches_tracked"))),
    "weight norm in its old names": ("weight_normed", lambda m: made("weight_normed_before").state_dict()),
    "a scalar as torch 0.3 had it": ("counted", lambda m: {"scale": torch.ones(1)}),
    "a whole pickled model": ("net", lambda m: m),
    "a tie": ("tied", state_of),
}


@pytest.mark.parametrize("what", LOADS)
def test_a_file_that_torch_loads_has_no_problem(what: str, cli: Cli, tmp_path: Path) -> None:
    name, make = LOADS[what]
    found = diagnosed(cli, tmp_path, make(made(name)), name)
    assert (found.code, found.json["loads"]) == (0, True)
    pasted(cli, [found.json["then"]])


def wide_head() -> Any:
    return nn.Sequential(nn.Conv2d(3, 9, 1)).state_dict()


def headless() -> Any:
    return without(made("net").state_dict(), "head.weight", "head.bias")


LORA = {f"base_model.model.head.lora_{part}.weight": torch.rand(2, 2) for part in "AB"}


def adapted(*, inside: bool) -> Any:
    """Return the state of a model with an adapter in it, or beside it."""
    state = dict(made("net").state_dict())
    weight = state["head.weight"] if not inside else state.pop("head.weight")
    factors = {f"head.lora_{part}.default.weight": torch.rand(2, 2) for part in "AB"}
    return {**state, **factors, **({"head.base_layer.weight": weight} if inside else {})}


NINE = "'0' has 9 outputs in the file and 5 in the model"
BEYOND: dict[str, tuple[str, Callable[[], Any], str, str]] = {
    "another architecture": ("net", lambda: state_of(made("tied")), "architecture", "of the model's 9 names"),
    "layers that are missing": ("net", headless, "missing", "lacks 2 of the model's names"),
    "an adapter": ("net", lambda: LORA, "adapter", "merge-lora"),
    "a model with an adapter inside": ("net", partial(adapted, inside=True), "adapter", "--fold lora"),
    "a model and an adapter": ("net", partial(adapted, inside=False), "adapter", "merge-lora"),
    "a head that the factory can't make": ("convolved", wide_head, "head", NINE),
    "flat parameters of FSDP": (
        *("net", lambda: {"_fsdp_wrapped_module._flat_param": torch.rand(9)}, "fsdp-flat", "FULL_STATE_DICT"),
    ),
    "an optimizer alone": (
        *("net", lambda: stepped("net", "adamw")["optimizer"], "optimizer-only", "in another file"),
    ),
}


@pytest.mark.parametrize("what", BEYOND)
def test_a_misfit_that_no_command_fixes_is_described(what: str, cli: Cli, tmp_path: Path) -> None:
    model, make, kind, words = BEYOND[what]
    found = diagnosed(cli, tmp_path, make(), model)
    assert (found.code, found.json["loads"], found.json["then"]) == (1, False, None)
    problem = next(problem for problem in found.json["problems"] if not problem["remark"])
    assert problem["kind"] == kind
    assert words in problem["message"]
    assert "command" not in problem
    assert what != "another architecture" or [problem] == found.json["problems"]
    assert "# no command can fix that" in cli("doctor", tmp_path / "f.pt", "--model", spec(model)).out


def test_no_reload_is_printed_for_a_state_that_needs_objects(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(2, 2)\n"
        "    def get_extra_state(self):\n        return {'since': __import__('datetime').date(2026, 1, 1)}\n"
        "    def set_extra_state(self, state):\n        pass\n"
    )
    state = factory.build(f"{tmp_path}/m.py:Net").state_dict()
    found = diagnosed(cli, tmp_path, state, f"{tmp_path}/m.py:Net")
    assert (found.code, found.json["then"]) == (1, None)
    assert [problem["kind"] for problem in found.json["problems"]] == ["object"]
    assert cli("reload", tmp_path / "f.pt", "--model", f"{tmp_path}/m.py:Net").code == 3


@pytest.mark.parametrize("is_lazy", [True, False])
def test_lazy_layers_that_saw_no_batch_are_said_to_have_no_values(
    is_lazy: bool, cli: Cli, tmp_path: Path
) -> None:
    layer = "LazyLinear(2)" if is_lazy else "Linear(3, 2)"
    (tmp_path / "m.py").write_text(f"import torch\ndef made(): return torch.nn.{layer}\n")
    found = diagnosed(cli, tmp_path, nn.LazyLinear(2).state_dict(), f"{tmp_path}/m.py:made")
    assert (found.code, found.json["loads"], found.json["then"]) == (1, False, None)
    (problem,) = found.json["problems"]
    assert "2 tensors without values in the file (weight, bias): the model was saved" in problem["message"]


def test_square_matrices_beside_transposed_ones_are_named(cli: Cli, tmp_path: Path) -> None:
    """No shape tells that a square matrix is transposed too."""
    first = {"0.weight": torch.rand(3, 5), "0.bias": torch.rand(5)}
    state = {**first, "2.weight": torch.rand(2, 5), "2.bias": torch.rand(2)}
    assert "don't show" not in diagnosed(cli, tmp_path, state, "numbered").json["problems"][0]["message"]
    layers = "torch.nn.Linear(3, 5), torch.nn.Linear(5, 5)"
    (tmp_path / "m.py").write_text(f"import torch\ndef net(): return torch.nn.Sequential({layers})\n")
    state = {**first, "1.weight": torch.rand(5, 5), "1.bias": torch.rand(5)}
    found = diagnosed(cli, tmp_path, state, f"{tmp_path}/m.py:net")
    assert "1.weight" in found.json["problems"][0]["message"]


def test_tensors_that_fit_in_several_orders_of_axes_are_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "def convs(): return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))\n"
        "def odd(): return torch.nn.ParameterDict({'w': torch.zeros(2, 4, 2)})\n"
    )
    last = {"0.weight": torch.rand(8, 3, 3, 3), "1.weight": torch.rand(8, 3, 3, 8)}
    state = {**last, "0.bias": torch.rand(8), "1.bias": torch.rand(8)}
    message = diagnosed(cli, tmp_path, state, f"{tmp_path}/m.py:convs").json["problems"][0]["message"]
    assert "the shapes of 1 others don't show whether they are too (0.weight)" in message
    found = diagnosed(cli, tmp_path, {"w": torch.rand(4, 2, 2)}, f"{tmp_path}/m.py:odd")
    message = found.json["problems"][0]["message"]
    assert "the shapes of 1 don't show which order, so it is guessed (w)" in message


@pytest.mark.parametrize("shift", [1, -1])
def test_layers_counted_from_another_number_keep_their_order(shift: int, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "def net(stem=0):\n"
        "    layers = [torch.nn.Identity()] * stem + [torch.nn.Linear(2, 2) for _ in range(4)]\n"
        "    return torch.nn.Sequential(*layers)\n"
    )
    here, there = (0, 1) if shift > 0 else (1, 0)
    model = f"{tmp_path}/m.py:net(stem={here})"
    trained = factory.build(f"{tmp_path}/m.py:net(stem={there})").state_dict()
    found = diagnosed(cli, tmp_path, trained, model)
    pasted(cli, [found.json["problems"][0]["command"], found.json["then"]])
    loaded = strictly_loaded(found.json["then"], found.json["python"])
    assert all(map(torch.equal, loaded.values(), trained.values())) and len(loaded) == len(trained)


@pytest.mark.parametrize("name", ["a\ntouch gone\n'.pt", "-f.pt", "\x1b[31m.pt"])
@pytest.mark.parametrize("prefix", ["", "a=b.", "'\ntouch gone\n#\x1b[0m."])
def test_no_name_of_a_file_or_a_key_becomes_a_command(
    name: str, prefix: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it holds, the page is a script in which each name is one word again."""
    monkeypatch.chdir(tmp_path)
    torch.save(prefixed({k: v.half() for k, v in made("net").state_dict().items()}, prefix), name)
    script = cli("doctor", "--model", spec("net"), "--", name).out
    assert "\x1b" not in script
    words_of = 'ckpttool() { printf "%s\\0" "$#" "$@"; }\n'
    said = subprocess.run(["bash", "-c", words_of + script], capture_output=True, timeout=60)
    assert (said.stderr, sorted(path.name for path in tmp_path.iterdir())) == (b"", [name])
    words = iter(said.stdout.decode().split("\0")[:-1])
    for count in words:
        ran = cli(*(next(words) for _ in range(int(count))))
        assert ran.code == 0, ran.err


def test_the_commands_do_not_overwrite_an_existing_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "f.mended.pt").write_bytes(b"mine")
    found = diagnosed(cli, tmp_path, prefixed(made("net").state_dict(), "module."))
    pasted(cli, [found.json["problems"][0]["command"], found.json["then"]])
    assert (tmp_path / "f.mended.pt").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("kind", "make", "problems"),
    [
        ("LBFGS", torch.optim.LBFGS, ["optimizer-order"]),
        ("stateless", torch.optim.SGD, []),
        ("momentum", partial(torch.optim.SGD, momentum=0.9), ["optimizer-order"]),
    ],
)
def test_optimizers_lose_nothing(kind: str, make: Any, problems: Any, cli: Cli, tmp_path: Path) -> None:
    model = made("first_second")
    optimizer = make(model.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        total.backward()
        return total

    optimizer.step(loss)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = diagnosed(cli, tmp_path, state, "second_first")
    wrong = [problem for problem in found.json["problems"] if not problem["remark"]]
    assert (found.code, [problem["kind"] for problem in wrong]) == (int(bool(problems)), problems)
    commands = [problem["command"] for problem in found.json["problems"] if problem.get("command")]
    pasted(cli, [*commands, found.json["then"]])
    if kind == "momentum":
        assert "optimizer" in torch.load(tmp_path / "f.mended.pt", weights_only=True)


def test_a_model_that_leaves_parameters_out_of_its_state_loads(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "def leave_out(model, state, prefix, local):\n"
        "    state.pop(prefix + 'bias', None)\n"
        "def net():\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    model._register_state_dict_hook(leave_out)\n"
        "    model.register_load_state_dict_pre_hook(lambda m, s, p, *_: s.setdefault(p + 'bias', m.bias))\n"
        "    return model\n"
    )
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters()).state_dict()
    state = {"model": {"weight": torch.rand(2, 2)}, "optimizer": optimizer}
    assert diagnosed(cli, tmp_path, state, f"{tmp_path}/m.py:net").code == 0


def test_a_cast_is_advised_only_for_floats(cli: Cli, tmp_path: Path) -> None:
    state = made("net").state_dict()
    for dtype, command in ((torch.float16, True), (torch.int8, False)):
        found = diagnosed(cli, tmp_path, cast(state, dtype))
        assert [("command" in p) for p in found.json["problems"] if p["kind"] == "precision"] == [command]


def test_a_named_state_is_the_one_that_is_diagnosed(cli: Cli, tmp_path: Path) -> None:
    net = made("net").state_dict()
    torch.save({"model": net, "ema": prefixed(net, "module.")}, tmp_path / "f.pt")
    assert cli("doctor", tmp_path / "f.pt", "--model", spec("net")).code == 0
    found = cli("doctor", tmp_path / "f.pt", "--model", spec("net"), "--state", "ema", "--json")
    assert (found.code, found.json["state"]) == (1, "ema")
    pasted(cli, [problem["command"] for problem in found.json["problems"] if not problem["remark"]])


def test_a_checkpoint_that_lightning_wrote_is_fixed(cli: Cli, tmp_path: Path) -> None:
    """A checkpoint that Lightning itself wrote, and its Fabric's prefix."""
    lightning = pytest.importorskip("lightning", reason="needs the extra interop")
    module = lightning.LightningModule()
    module.net = made("net")
    trainer = lightning.Trainer(logger=False, barebones=False, enable_checkpointing=False, accelerator="cpu")
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "f.ckpt")
    found = cli("doctor", tmp_path / "f.ckpt", "--model", spec("net"), "--json")
    assert [p["kind"] for p in found.json["problems"] if not p["remark"]] == ["prefix"]
    pasted(cli, [found.json["problems"][0]["command"], found.json["then"]])
