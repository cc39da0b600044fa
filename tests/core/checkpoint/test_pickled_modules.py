"""Whole pickled models are found, and named as their state dict is, without their classes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpttool
from ckpttool.core.checkpoint.state import State
from ckpttool.core.tensors.values import live_tensors
from ckpttool.dcp import writing as dcp
from ckpttool.errors import CkptToolError, Damaged, Refused
from tests.support.comparing import assert_same, opened, saved, values
from tests.support.crafting import dict_of, name, storage, tensor, torch_zip, tuple_of
from tests.support.running import Cli

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
torchvision = pytest.importorskip("torchvision")

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def bytes_of(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: values(tensor) for name, tensor in state.items()}


def assert_names_and_values(state: State, model: nn.Module) -> None:
    """Check that the state is the model's: names in order, types and values, detached as torch does."""
    wanted = model.state_dict()
    found = live_tensors(state.tensors)
    assert list(found) == [key for key in wanted if isinstance(wanted[key], torch.Tensor)]
    for key, value in found.items():
        assert (value.dtype, value.shape) == (wanted[key].dtype, wanted[key].shape), key
        assert not value.requires_grad and values(value) == values(wanted[key]), key


class Everything(nn.Module):
    """A module with every kind of entry that a state dict shows or hides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("early", torch.ones(2))
        self.weight = nn.Parameter(torch.rand(3))
        self.register_parameter("nothing", None)
        self.register_buffer("empty", None)
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.buffer = nn.Buffer(torch.rand(2, 2))
        self.hidden_buffer = nn.Buffer(torch.rand(2), persistent=False)
        self.tagged = nn.Parameter(torch.rand(2))
        self.tagged.lr_scale = 0.1  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.normed = nn.utils.weight_norm(nn.Linear(2, 3))
        self.spectral = nn.utils.spectral_norm(nn.Linear(2, 3))
        self.layers = nn.ModuleList([nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(3)])
        self.named = nn.ModuleDict({"a": nn.Embedding(3, 2)})
        self.shared = self.layers
        self.parameters_list = nn.ParameterList([torch.rand(2), torch.rand(1)])
        self.parameters_dict = nn.ParameterDict({"x": torch.rand(2)})
        self.recurrent = nn.LSTM(2, 3, num_layers=2)
        self.attention = nn.MultiheadAttention(4, 2)
        self.plain = torch.rand(5)
        self.tied = nn.Linear(2, 3, bias=False)
        self.tied.weight = self.named["a"].weight
        self.channels_last = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.half_precision = nn.Linear(2, 2).to(torch.bfloat16)


@FORMATS
def test_every_kind_of_entry_is_named(zipped: bool, tmp_path: Path) -> None:
    model = Everything()
    torch.save(model, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    state = ckpttool.open(tmp_path / "m.pt").state()
    assert state.where == "" and state.module is not None
    assert_names_and_values(state, model)
    assert state.tensors["tied.weight"].storage is state.tensors["named.a.weight"].storage
    assert state.tensors["shared.0.weight"].storage is state.tensors["layers.0.weight"].storage


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "DDP": nn.parallel.DistributedDataParallel,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "torch.fx": lambda model: torch.fx.symbolic_trace(model.eval()),
    "half": nn.Module.half,
    "eval": nn.Module.eval,
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrapped_models_are_named_as_they_save_themselves(wrap: str, tmp_path: Path) -> None:
    model = WRAPPERS[wrap](nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    try:
        path = saved(model, tmp_path / "m.pt")
    except Exception as error:
        if wrap != "compiled":
            raise
        pytest.skip(f"this torch does not pickle it: {error}")
    assert_names_and_values(ckpttool.open(path).state(), model)


FAMILIES = (
    "resnet18 mobilenet_v3_small mobilenet_v2 shufflenet_v2_x0_5 mnasnet0_5 squeezenet1_1 googlenet "
    "densenet121 regnet_y_400mf efficientnet_b0 convnext_tiny swin_t maxvit_t inception_v3 alexnet"
)


def quickly(make: Callable[..., nn.Module], **given: Any) -> nn.Module:
    """Return a model of zeros, which is made faster than one of random values."""
    try:
        with torch.device("meta"):
            model = make(**given)
    except NotImplementedError:  # regnet computes its widths with tensors
        return make(**given)
    model.to_empty(device="cpu")
    for value in model.state_dict().values():
        value.zero_()
    return model


@pytest.mark.covered(lambda family: family not in ("resnet18", "swin_t"))
@pytest.mark.parametrize("family", FAMILIES.split())
def test_torchvision_models_are_named(family: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"init_weights": False} if family in ("googlenet", "inception_v3") else {}
    model = quickly(getattr(torchvision.models, family), **given)
    assert_names_and_values(opened(model, tmp_path).state(), model)


UNIMPORTABLE = """
import sys
sys.modules["torchvision"] = sys.modules["torch"] = None
import ckpttool
for path in sys.argv[1:]:
    checkpoint = ckpttool.open(path)
    ckpttool.save(checkpoint, path + ".safetensors")
    ckpttool.save(checkpoint, path + ".again.pt")
"""


@FORMATS
def test_a_model_whose_class_cannot_be_imported_is_read_and_written(zipped: bool, tmp_path: Path) -> None:
    model = torchvision.models.shufflenet_v2_x0_5()
    torch.save({"model": model, "epoch": 3}, tmp_path / "m", _use_new_zipfile_serialization=zipped)
    subprocess.run([sys.executable, "-c", UNIMPORTABLE, tmp_path / "m"], check=True, timeout=60)
    loaded = load_file(tmp_path / "m.safetensors")
    assert bytes_of(loaded) == bytes_of(model.state_dict())
    again = torch.load(tmp_path / "m.again.pt", weights_only=False)
    once = torch.load(tmp_path / "m", weights_only=False)
    assert_same(again["model"].state_dict(), once["model"].state_dict())
    assert again["epoch"] == 3


@FORMATS
def test_pt_to_pt_keeps_a_model_whole(zipped: bool, tmp_path: Path) -> None:
    torch.save(Everything(), tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    ckpttool.save(ckpttool.open(tmp_path / "m.pt"), tmp_path / "again.pt")
    once = torch.load(tmp_path / "m.pt", weights_only=False)
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    assert_same(once.state_dict(), again.state_dict())
    assert again.tagged.lr_scale == 0.1 and isinstance(again.buffer, nn.Buffer)
    assert again._non_persistent_buffers_set == once._non_persistent_buffers_set


# A model among other values.


@FORMATS
def test_a_model_inside_a_checkpoint_is_found_and_named(zipped: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    optimizer = torch.optim.Adam(model.parameters())
    content = {"epoch": 3, "model": model, "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    checkpoint = ckpttool.open(tmp_path / "m.pt")
    assert checkpoint.states() == [("model",)]
    assert_names_and_values(checkpoint.state(), model)
    assert_names_and_values(checkpoint.state("model"), model)


def test_several_models_are_taken_by_name_and_have_it_in_the_file_s(tmp_path: Path) -> None:
    checkpoint = opened({"ema": nn.Linear(2, 3), "model": nn.Linear(4, 5)}, tmp_path)
    assert checkpoint.state().tensors["weight"].shape == (5, 4)
    assert checkpoint.state("ema").tensors["weight"].shape == (3, 2)
    wanted = ["ema.weight", "ema.bias", "model.weight", "model.bias"]
    assert [name for name, _ in checkpoint.tensors()] == wanted


def test_inspect_does_not_list_the_attributes_of_a_model(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": nn.Sequential(nn.Linear(2, 3)), "epoch": 3}, tmp_path / "m.pt")
    found = cli("inspect", tmp_path / "m.pt", "--json").json
    assert found["state"] == "model" and found["parameters"] == 9
    assert [row["name"] for row in found["tensors"]] == ["model.0.weight", "model.0.bias"]
    types = {row["name"]: row["type"] for row in found["other"]}
    assert types == {"model": "torch.nn.modules.container.Sequential", "epoch": "int"}


# Renaming.


def test_a_prefix_is_stripped_on_the_way_to_safetensors(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": nn.DataParallel(nn.Linear(2, 3)), "epoch": 3}, tmp_path / "m.pt")
    ran = cli("strip-prefix", tmp_path / "m.pt", tmp_path / "m.safetensors", "--json")
    assert ran.code == 0 and ran.json["left_out"] == ["epoch"]
    assert list(ckpttool.open(tmp_path / "m.safetensors").state().tensors) == ["bias", "weight"]


def test_no_pickled_model_is_changed_and_the_way_out_works(cli: Cli, tmp_path: Path) -> None:
    model = nn.DataParallel(nn.Linear(2, 3))
    torch.save({"model": model, "epoch": 3}, tmp_path / "m.pt")
    for options in (["strip-prefix"], ["add-prefix"], ["convert", "--dtype", "bf16"]):
        ran = cli(*options, tmp_path / "m.pt", tmp_path / "out.pt")
        assert ran.code == 3 and "is a pickled object" in ran.err
        assert "ckpttool slim" in ran.err and not (tmp_path / "out.pt").exists()
    assert cli("slim", tmp_path / "m.pt", tmp_path / "state.pt").code == 0
    assert cli("strip-prefix", tmp_path / "state.pt", tmp_path / "out.pt").code == 0
    loaded = torch.load(tmp_path / "out.pt")
    assert bytes_of(loaded) == bytes_of(model.module.state_dict())


def test_dcp_needs_the_state_alone(tmp_path: Path) -> None:
    checkpoint = opened({"model": nn.Linear(2, 3)}, tmp_path)
    with pytest.raises(Refused, match=r"'model' is an object \(torch\.nn\.modules\.linear\.Linear\)"):
        dcp.write(checkpoint, str(tmp_path / "folder"))


# Malformed modules.


def module(parameters: bytes = b"}", buffers: bytes = b"}", modules: bytes = b"}") -> bytes:
    groups = {"_parameters": parameters, "_buffers": buffers, "_modules": modules}
    return name("m", "M") + b")\x81" + dict_of(groups) + b"b"


LEAF = module(dict_of({"w": tensor(storage(1), (1,))}))


def put(index: int) -> bytes:
    return b"r" + index.to_bytes(4, "little")


def get(index: int) -> bytes:
    return b"j" + index.to_bytes(4, "little")


def doubled(levels: int, name: str = "a") -> bytes:
    """Return a module that holds another twice, which holds another twice, …: 2^levels paths to the last."""
    body = LEAF + put(100)
    for level in range(levels):
        inner = get(100 + level)
        body += b"0" + module(modules=dict_of({name: inner, "b": inner})) + put(101 + level)
    return body


def nested(levels: int) -> bytes:
    body = LEAF
    for _ in range(levels):
        body = module(modules=dict_of({"m": body}))
    return body


def test_a_shared_module_is_named_on_every_path(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "f", doubled(2), {"0": bytes(4)})
    assert list(ckpttool.open(path).state().tensors) == ["a.a.w", "a.b.w", "b.a.w", "b.b.w"]


OBJECT = name("m", "M") + b")\x81"
AGAIN = {"_parameters": b"}", "_buffers": b"}", "_modules": dict_of({"again": get(7)})}
ENDLESS: dict[str, tuple[bytes, type[CkptToolError], str]] = {
    "shared on too many paths": (doubled(60), Damaged, "too many ways"),
    "shared under long names": (doubled(16, "a" * 10_000), Damaged, "too many ways"),
    "inside itself": (OBJECT + put(7) + dict_of(AGAIN) + b"b", Damaged, "is nested in itself"),
    "nested too deeply": (nested(300), CkptToolError, ""),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_modules_whose_names_have_no_end_are_refused(what: str, tmp_path: Path) -> None:
    body, error, words = ENDLESS[what]
    with pytest.raises(error, match=words or None):
        ckpttool.open(torch_zip(tmp_path / "f", body, {"0": bytes(4)})).state()


ODD: dict[str, bytes] = {
    "parameters that are a list": module(parameters=b"]"),
    "names that are numbers": module(parameters=b"}K\x01" + tensor(storage(1), (1,)) + b"s"),
    "modules that are none": module(modules=dict_of({"a": b"K\x01", "b": b"}"})),
    "parameters that are none": module(parameters=dict_of({"a": b"K\x01", "b": b"}", "c": storage(1)})),
    "state beside slots": name("m", "M") + b")\x81" + tuple_of(dict_of({"_parameters": b"}"}), b"N") + b"b",
}


@pytest.mark.parametrize("what", ODD)
def test_malformed_modules_are_handled(what: str, cli: Cli, tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "f", ODD[what], {"0": bytes(4)})
    assert cli("inspect", path).code == 0
    assert cli("inspect", path, "--json").code == 0
