"""Averages of a model, in the forms in which training programs save them, load into the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import Mismatch, NoState, NothingToDo
from tests.support.running import Cli
from tests.support.saved import prefixed, saved
from tests.support.small_net import SmallNet, used

SPEC = "tests/support/small_net.py:SmallNet"


def shadow_params(model: torch.nn.Module, *, trainable: bool = False) -> dict[str, Any]:
    """Return the state dict of torch_ema's and diffusers' averages: a list in the parameters' order."""
    parameters = [p for p in model.parameters() if p.requires_grad or not trainable]
    listed = [p.detach().clone() for p in parameters]
    return {"decay": 0.999, "num_updates": 3, "shadow_params": listed, "collected_params": None}


def without_dots(model: torch.nn.Module, outer: str = "") -> dict[str, torch.Tensor]:
    """Return the buffers of latent diffusion's LitEma."""
    counters = {"decay": torch.tensor(0.999), "num_updates": torch.tensor(3, dtype=torch.int)}
    named = {f"{outer}{n}".replace(".", ""): p.detach() for n, p in model.named_parameters()}
    return counters | named


def assert_parameters(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (name, mine), (_, other) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(mine, other), name


MODEL, AVERAGE = used(1), used(2)
BOTH = prefixed(MODEL.state_dict(), "model.") | prefixed(AVERAGE.state_dict(), "ema_model.")
COUNTED = {"n_averaged": torch.tensor(3)}
AVERAGING = {"current_model_state": MODEL.state_dict(), "averaging_state": COUNTED}
ONLINE = prefixed(MODEL.state_dict(), "online_model.") | prefixed(AVERAGE.state_dict(), "ema_model.")
WRAPPED = prefixed(AVERAGE.state_dict(), "module.")

BY_STATE: dict[str, tuple[Any, str]] = {
    "timm": ({"state_dict": MODEL.state_dict(), "state_dict_ema": AVERAGE.state_dict()}, "state_dict_ema"),
    "Lightning's WeightAveraging": ({"state_dict": AVERAGE.state_dict(), **AVERAGING}, "state_dict"),
    "a module next to the model in a Lightning file": ({"state_dict": BOTH}, "ema_model"),
    "the same by its whole path": ({"state_dict": BOTH}, "state_dict.ema_model"),
    "ema-pytorch": (ONLINE | {"initted": torch.tensor(True), "step": torch.tensor(3)}, "ema_model"),
    "AveragedModel next to a model": (dict(MODEL.state_dict()) | WRAPPED | COUNTED, "module"),
}


@pytest.mark.parametrize("case", BY_STATE)
def test_an_average_by_name_loads_from_the_place_that_state_names(case: str, tmp_path: Path) -> None:
    value, where = BY_STATE[case]
    model = SmallNet()
    loaded = ckpttool.reload(saved(value, tmp_path / "in.pt"), model, state=where)
    assert loaded.covered.parameters == loaded.covered.of_parameters > 0
    for name, tensor in AVERAGE.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_file_of_lightning_s_weight_averaging_has_both_models(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import WeightAveraging

    module = lightning.LightningModule()
    module.net = used(1)
    callback, checkpoint = WeightAveraging(), {"state_dict": {}}
    callback.setup(lightning.Trainer(logger=False, accelerator="cpu"), module, "fit")
    callback._average_model.update_parameters(module)
    checkpoint["state_dict"] = module.state_dict()
    module.net.load_state_dict({n: t + 1 for n, t in module.net.state_dict().items()})
    callback.on_save_checkpoint(None, module, checkpoint)
    path = saved(checkpoint, tmp_path / "in.ckpt")
    for where, source in (("state_dict.net", used(1)), ("current_model_state.net", module.net)):
        model = SmallNet()
        ckpttool.reload(path, model, state=where)
        assert_parameters(model, source)


def test_the_keys_without_a_prefix_are_a_state_too(tmp_path: Path) -> None:
    ddp = prefixed(MODEL.state_dict(), "module.")
    value = {"model": ddp | dict(AVERAGE.state_dict()) | COUNTED}
    path = saved(value, tmp_path / "in.pt")
    model = SmallNet()
    loaded = ckpttool.reload(path, model, state="model.!module", allow_unexpected=["n_averaged"])
    assert loaded.ignored == ("n_averaged",)
    assert_parameters(model, AVERAGE)
    with ckpttool.open(path) as checkpoint:
        ckpttool.save(checkpoint, tmp_path / "out.safetensors", state="!module")
    assert load_file(tmp_path / "out.safetensors").keys() == {*AVERAGE.state_dict(), "n_averaged"}
    model_alone = saved(MODEL.state_dict(), tmp_path / "m.pt")
    assert ckpttool.digest(path, state="module") == ckpttool.digest(model_alone)


def test_a_part_is_changed_inside_the_whole(tmp_path: Path) -> None:
    value = {"state_dict": prefixed({"module.w": torch.ones(1)}, "ema.") | {"model.w": torch.ones(2)}}
    with ckpttool.open(saved(value, tmp_path / "in.pt")) as checkpoint:
        new, _ = ckpttool.strip_prefix(checkpoint, state="ema")
        ckpttool.save(new, tmp_path / "out.pt")
        assert checkpoint.outside(checkpoint.state("ema")) == ("state_dict.model.w",)
    assert set(torch.load(tmp_path / "out.pt")["state_dict"]) == {"ema.w", "model.w"}


def test_a_prefix_that_no_key_has_is_refused(tmp_path: Path) -> None:
    with ckpttool.open(saved({"a.w": torch.ones(1)}, tmp_path / "in.pt")) as checkpoint:
        for where in ("b", "a.w.x", "!", "!b", "!a"):
            with pytest.raises(NoState):
                checkpoint.state(where)


@pytest.mark.parametrize("where", ["ema.shadow_params", "shadow_params"])
def test_a_list_of_tensors_is_named_by_the_model(where: str, tmp_path: Path) -> None:
    value: Any = shadow_params(AVERAGE)
    path = saved({"ema": value} if "." in where else value, tmp_path / "in.pt")
    model = SmallNet()
    with pytest.raises(Mismatch, match="2 missing") as caught:
        ckpttool.reload(path, model, state=where)
    assert "--allow-missing" in str(caught.value.hint)
    loaded = ckpttool.reload(path, model, state=where, allow_missing=["norm.running_*"])
    assert_parameters(model, AVERAGE)
    assert loaded.state == where
    assert loaded.covered.parameters == sum(p.numel() for p in model.parameters())
    assert loaded.covered.nbytes < loaded.covered.of_nbytes


def test_a_list_of_the_trainable_parameters_is_named_by_them(tmp_path: Path) -> None:
    average, model = used(3), SmallNet()
    for net in (average, model):
        net.conv.weight.requires_grad_(False)
    path = saved(shadow_params(average, trainable=True), tmp_path / "in.pt")
    may_be_missing = ["norm.running_*", "conv.weight"]
    loaded = ckpttool.reload(path, model, state="shadow_params", allow_missing=may_be_missing)
    assert "conv.weight" in loaded.kept
    assert torch.equal(model.head.weight, average.head.weight)


def test_a_list_that_is_not_the_model_s_parameters_is_refused(tmp_path: Path) -> None:
    path = saved(shadow_params(AVERAGE), tmp_path / "in.pt")
    with pytest.raises(Mismatch, match=r"at the place of 'conv.weight' has shape \[4, 3, 3, 3\], not \[5,"):
        ckpttool.reload(path, SmallNet(width=5), state="shadow_params")
    with pytest.raises(Mismatch, match="lists 6 tensors by position, and the model has 2 parameters"):
        ckpttool.reload(path, torch.nn.Linear(1, 1), state="shadow_params")


@pytest.mark.parametrize("outer", ["", "diffusion_model."])
def test_names_without_dots_get_them_from_the_model(outer: str, tmp_path: Path) -> None:
    value = prefixed(without_dots(AVERAGE, outer), "model_ema.") | prefixed(MODEL.state_dict(), "model.")
    path = saved({"state_dict": value}, tmp_path / "in.ckpt")
    model = SmallNet()
    may_be = {"allow_missing": ["norm.running_*"], "allow_unexpected": ["decay", "num_updates"]}
    ckpttool.reload(path, model, state="model_ema", **may_be)
    assert_parameters(model, AVERAGE)


def test_slim_writes_a_list_under_the_model_s_names(cli: Cli, tmp_path: Path) -> None:
    path = saved({"ema": shadow_params(AVERAGE), "epoch": 1}, tmp_path / "in.pt")
    out = tmp_path / "out.safetensors"
    ran = cli("slim", path, out, "--state", "ema.shadow_params", "--model", SPEC)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"named 6 tensors by {SPEC} -> ")
    assert "ema.decay" in ran.err and "epoch" in ran.err
    found = load_file(out)
    assert found.keys() == {name for name, _ in AVERAGE.named_parameters()}
    assert torch.equal(found["head.bias"], AVERAGE.head.bias)


def test_reload_says_how_much_of_the_model_is_covered(cli: Cli, tmp_path: Path) -> None:
    state = MODEL.state_dict() | {"extra.w": torch.ones(2)}
    del state["head.weight"]
    path = saved(state, tmp_path / "in.pt")
    words = ["reload", path, "--model", SPEC, "--allow-unexpected", "extra.*"]
    assert cli(*words).code == 1
    words += ["--allow-missing", "head.*"]
    ran = cli(*words)
    assert ran.code == 0, ran.err
    assert "loaded 8 of 9 tensors into" in ran.out
    assert "123 of its 135 parameters, 532 bytes of 580 bytes" in ran.out
    assert "kept as they are in the model: head.weight" in ran.err
    assert "ignored, as the model does not have them: extra.w" in ran.err
    data = cli(*words, "--json").json
    assert (data["missing"], data["unexpected"]) == (["head.weight"], ["extra.w"])
    assert data["parameters"] == {"loaded": 123, "of": 135}
    assert data["bytes"] == {"loaded": 532, "of": 580}


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    path = saved(MODEL.state_dict(), tmp_path / "in.pt")
    with pytest.raises(NothingToDo, match=r"matches 'x\.\*'"):
        ckpttool.reload(path, SmallNet(), allow_unexpected=["x.*"])
    with pytest.raises(NothingToDo, match=r"no name of the model matches 'x\.\*'"):
        ckpttool.reload(path, SmallNet(), allow_missing=["x.*"])
