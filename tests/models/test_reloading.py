"""Load into a plain model as strictly as torch does, averages too, or leave it unchanged and say why."""

from __future__ import annotations

import shlex
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool import reload
from ckpttool.core.tensors.values import live_tensors
from ckpttool.errors import Mismatch, NoState, NothingToDo, Refused
from tests.support.architectures import Tied
from tests.support.comparing import assert_same, prefixed, saved, values
from tests.support.running import Cli
from tests.support.small_net import SmallNet, used
from tests.support.trees import WIDTHS, numbers

# ---- Load into a plain model as strictly as torch does, or leave it unchanged and say which command helps


@pytest.fixture
def net() -> SmallNet:
    return used()


def fresh() -> SmallNet:
    torch.manual_seed(2)
    return SmallNet()


def legacy(value: Any, path: Path) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


FILES: dict[str, Any] = {
    "plain": lambda net, path: saved(net.state_dict(), path),
    "in a training checkpoint": lambda net, path: saved({"epoch": 1, "model": net.state_dict()}, path),
    "legacy": lambda net, path: legacy(net.state_dict(), path),
    "DDP": lambda net, path: saved(prefixed(net.state_dict(), "module."), path),
    "compiled": lambda net, path: saved(torch.compile(net, backend="eager").state_dict(), path),
    "DDP of compiled": lambda net, path: saved(prefixed(net.state_dict(), "module._orig_mod."), path),
    "wrapped twice": lambda net, path: saved(prefixed(net.state_dict(), "module.module."), path),
    "averaged": lambda net, path: saved(torch.optim.swa_utils.AveragedModel(net).state_dict(), path),
    "safetensors": lambda net, path: save_file(net.state_dict(), path) or path,
    "parameters": lambda net, path: saved(net.state_dict(keep_vars=True), path),
}


@pytest.mark.parametrize("what", FILES)
def test_every_kind_of_file_of_a_model_s_state_reloads_it(what: str, net: SmallNet, tmp_path: Path) -> None:
    model = fresh()
    loaded = reload(FILES[what](net, tmp_path / "f"), model)
    assert_same(net.state_dict(), model.state_dict())
    assert set(loaded.loaded) == set(net.state_dict())
    assert loaded.added == ()


def test_the_result_names_the_file_the_state_and_the_removed_prefix(net: SmallNet, tmp_path: Path) -> None:
    tree = {"epoch": 1, "state_dict": prefixed(net.state_dict(), "module."), "ema": net.state_dict()}
    path = saved(tree, tmp_path / "f.pt")
    loaded = reload(path, fresh())
    assert (loaded.path, loaded.format) == (str(path), "torch-zip")
    assert (loaded.state, loaded.prefix) == ("state_dict", "module.")
    assert reload(path, fresh(), state="ema").prefix == ""


def test_a_prefix_that_the_model_has_itself_is_kept(tmp_path: Path) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    original, model = Wrapper(), Wrapper()
    assert reload(saved(original.state_dict(), tmp_path / "f"), model).prefix == ""
    assert_same(original.state_dict(), model.state_dict())


def test_a_public_checkpoint_of_another_model_is_a_mismatch(resnet20: Path) -> None:
    with pytest.raises(Mismatch, match="missing"):
        reload(resnet20, fresh())


# What does not fit.


def mismatch(path: Path, model: torch.nn.Module, **given: Any) -> Mismatch:
    """Return the error of a reload that must leave the model unchanged."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(Mismatch) as raised:
        reload(path, model, **given)
    assert_same(before, dict(model.state_dict()))
    assert raised.value.exit_code == 1
    return raised.value


def test_missing_and_unexpected_names_are_listed(net: SmallNet, tmp_path: Path) -> None:
    state = net.state_dict()
    state["extra.weight"] = state.pop("head.weight")
    wrong = mismatch(saved(state, tmp_path / "f.pt"), fresh())
    assert (wrong.missing, wrong.unexpected) == (("head.weight",), ("extra.weight",))
    assert "1 missing (head.weight); 1 unexpected (extra.weight)" in str(wrong)


def test_long_lists_of_names_are_shortened(tmp_path: Path) -> None:
    wrong = mismatch(saved({f"layer{i}": torch.ones(1) for i in range(40)}, tmp_path / "f.pt"), fresh())
    assert len(wrong.unexpected) == 40
    assert "layer0, layer1, layer2, and 37 more" in str(wrong)


def test_other_sizes_are_reported_with_how_to_build_the_model(net: SmallNet, tmp_path: Path) -> None:
    wrong = mismatch(saved(net.state_dict(), tmp_path / "f.pt"), SmallNet(classes=5))
    assert wrong.mismatched == (("head.weight", "[3, 4]", "[5, 4]"), ("head.bias", "[3]", "[5]"))
    assert "head.weight [3, 4] in the file, [5, 4] in the model" in str(wrong)
    assert "num_classes" in str(wrong.hint)


def test_complex_values_for_real_parameters_are_a_mismatch(tmp_path: Path) -> None:
    """torch copies them with a warning, without their imaginary part."""
    state = {"weight": torch.ones(1, 1, dtype=torch.complex64), "bias": torch.ones(1)}
    wrong = mismatch(saved(state, tmp_path / "f.pt"), torch.nn.Linear(1, 1))
    assert wrong.mismatched == (("weight", "complex64", "float32"),)
    assert "outputs" not in str(wrong.hint)


def test_a_number_where_a_tensor_belongs_is_missing(tmp_path: Path) -> None:
    path = saved({"weight": torch.ones(1, 1), "bias": 0.5}, tmp_path / "f.pt")
    assert mismatch(path, torch.nn.Linear(1, 1)).missing == ("bias",)


def weight_normed() -> torch.nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))


def test_names_that_a_module_translates_itself_are_loaded(tmp_path: Path) -> None:
    """Weight norm was kept as weight_g and weight_v before torch 2.0."""
    original, model = weight_normed(), weight_normed()
    old = {
        "bias": original.bias,
        "weight_g": original.parametrizations.weight.original0,  # type: ignore[union-attr]
        "weight_v": original.parametrizations.weight.original1,  # type: ignore[union-attr]
    }
    reload(saved({f"module.{key}": value for key, value in old.items()}, tmp_path / "f.pt"), model)
    assert_same(original.state_dict(), model.state_dict())


def test_a_model_with_translations_is_still_loaded_strictly(tmp_path: Path) -> None:
    wrong = mismatch(saved({"weight_g": torch.ones(2, 1)}, tmp_path / "f.pt"), weight_normed())
    assert "bias" in wrong.missing


class Stubborn(torch.nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        rest[3].append("the module says no")


def test_a_module_s_own_refusal_is_in_the_message(tmp_path: Path) -> None:
    wrong = mismatch(saved(torch.nn.Linear(1, 1).state_dict(), tmp_path / "f.pt"), Stubborn(1, 1))
    assert "the module says no" in str(wrong)
    assert "\n" not in str(wrong)


def test_no_state_and_no_such_state_are_errors(net: SmallNet, tmp_path: Path) -> None:
    with pytest.raises(NoState):
        reload(saved({"epoch": 1}, tmp_path / "f.pt"), net)
    with pytest.raises(NoState):
        reload(saved({"model": net.state_dict()}, tmp_path / "f.pt"), net, state="ema")


# What would help.


def assert_reloads(path: Path, net: SmallNet) -> None:
    model = fresh()
    reload(path, model)
    assert_same(net.state_dict(), model.state_dict())


def pasted(hint: str | None, cli: Cli) -> Path:
    """Run a hint as a person would paste it; return its output file."""
    command = shlex.split(str(hint))
    assert command[0] == "ckpttool"
    ran = cli(*command[1:])
    assert ran.code == 0, ran.err
    return Path(command[3])


NAMED = [("backbone.", "f.pt"), ("my.net.", "a space.pt"), ("x'y.", "it's.pt"), ("model.", "f.safetensors")]


@pytest.mark.parametrize(("prefix", "name"), NAMED)
def test_the_command_for_a_prefix_works(prefix: str, name: str, net: Any, cli: Cli, tmp_path: Path) -> None:
    path, save = tmp_path / name, save_file if name.endswith("safetensors") else torch.save
    save(prefixed(net.state_dict(), prefix), path)
    assert_reloads(pasted(mismatch(path, fresh()).hint, cli), net)


def test_the_command_for_a_prefix_too_few_works(net: SmallNet, cli: Cli, tmp_path: Path) -> None:
    wrapper = torch.nn.Module()
    wrapper.backbone = fresh()
    wrong = mismatch(saved(net.state_dict(), tmp_path / "f.pt"), wrapper)
    reload(pasted(wrong.hint, cli), wrapper)
    assert_same(net.state_dict(), wrapper.backbone.state_dict())


def test_the_command_for_a_compiled_part_works(net: SmallNet, cli: Cli, tmp_path: Path) -> None:
    state = OrderedDict((key.replace("conv.", "conv._orig_mod."), v) for key, v in net.state_dict().items())
    wrong = mismatch(saved(state, tmp_path / "f.pt"), fresh())
    assert "--anywhere" in str(wrong.hint)
    assert_reloads(pasted(wrong.hint, cli), net)


def test_another_state_that_fits_is_hinted_at(net: SmallNet, tmp_path: Path) -> None:
    tree = {"model": {"x": torch.ones(1)}, "teacher": net.state_dict()}
    wrong = mismatch(saved(tree, tmp_path / "f.pt"), fresh())
    assert str(wrong.hint) == f"ckpttool slim {tmp_path}/f.pt {tmp_path}/f.mended.pt --state teacher"
    reload(tmp_path / "f.pt", fresh(), state="teacher")


def test_several_commands_are_one_hint(net: SmallNet, cli: Cli, tmp_path: Path) -> None:
    state = prefixed(net.state_dict(), "backbone.")
    state["backbone.head.weight"] = state["backbone.head.weight"].t().contiguous()
    wrong = mismatch(saved(state, tmp_path / "f.pt"), fresh())
    commands = str(wrong.hint).split(" && ")
    assert len(commands) == 2
    for command in commands:
        made = pasted(command, cli)
    assert_reloads(made, net)


def test_a_command_that_alone_would_not_help_is_no_hint(net: SmallNet, tmp_path: Path) -> None:
    """The prefix is stripped while loading; what keeps the state from loading is its size."""
    path = saved(prefixed(net.state_dict(), "module."), tmp_path / "f.pt")
    wrong = mismatch(path, SmallNet(classes=5))
    assert "strip-prefix" not in str(wrong.hint)
    assert "'head' has 3 outputs in the file and 5 in the model" in str(wrong.hint)


def test_the_hint_is_inspect_where_no_command_helps(tmp_path: Path) -> None:
    wrong = mismatch(saved({"x": torch.ones(1)}, tmp_path / "f.pt"), fresh())
    assert str(wrong.hint) == f"ckpttool inspect {tmp_path}/f.pt"


# What torch itself makes good.


def test_batchnorm_s_counter_may_be_missing_as_before_torch_0_4_1(net: SmallNet, tmp_path: Path) -> None:
    state = {key: value for key, value in net.state_dict().items() if "num_batches" not in key}
    model = fresh()
    loaded = reload(saved(state, tmp_path / "f.pt"), model)
    assert loaded.added == ("norm.num_batches_tracked",)
    assert values(model.norm.running_mean) == values(net.norm.running_mean)


def test_a_counter_may_be_missing_only_in_an_old_batchnorm(net: SmallNet, tmp_path: Path) -> None:
    state = net.state_dict()
    del state["norm.num_batches_tracked"]
    assert mismatch(saved(state, tmp_path / "f.pt"), fresh()).missing == ("norm.num_batches_tracked",)
    model = torch.nn.Module()
    for name in ("num_batches_tracked", "other"):
        model.register_buffer(name, torch.tensor(3))
    path = saved({"other": torch.tensor(1)}, tmp_path / "f.pt")
    assert mismatch(path, model).missing == ("num_batches_tracked",)


def test_versions_of_modules_reach_the_model_under_its_own_paths(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Versioned(torch.nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            seen[prefix] = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    original = torch.nn.Module()
    original.module = torch.nn.Sequential(Versioned(1, 1))
    reload(saved(original.state_dict(), tmp_path / "f.pt"), torch.nn.Sequential(Versioned(1, 1)))
    assert seen == {"0.": 7}


class WithExtra(torch.nn.Linear):
    def __init__(self, extra: Any = None) -> None:
        super().__init__(1, 1)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", ["text", 5, None, torch.arange(3), {"a": [1, (2.5, None)]}], ids=str)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_plain_extra_state_reaches_the_model(prefix: str, extra: Any, tmp_path: Path) -> None:
    model = WithExtra("before")
    reload(saved(prefixed(WithExtra(extra).state_dict(), prefix), tmp_path / "f.pt"), model)
    assert_same(extra, model.extra)


def test_extra_state_with_an_object_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(WithExtra({"a": [Path("code")]}).state_dict(), tmp_path / "f.pt")
    model = WithExtra("before")
    with pytest.raises(Refused, match="'_extra_state' is or holds an object"):
        reload(path, model)
    assert model.extra == "before"


def test_a_lazy_parameter_takes_its_shape_from_the_file(tmp_path: Path) -> None:
    original, model = torch.nn.Linear(3, 2), torch.nn.LazyLinear(2)
    reload(saved(original.state_dict(), tmp_path / "f.pt"), model)
    assert_same(dict(original.state_dict()), dict(model.state_dict()))


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    original, model = Tied(), Tied()
    reload(saved(original.state_dict(), tmp_path / "f.pt"), model)
    assert model.out.weight is model.embed.weight
    assert_same(original.state_dict(), model.state_dict())


def test_two_tensors_for_one_that_the_model_ties_are_refused(cli: Cli, tmp_path: Path) -> None:
    """torch's load_state_dict keeps the last, without a word."""
    state = Tied().state_dict()
    path = saved({**state, "out.weight": state["out.weight"] + 1}, tmp_path / "f.pt")
    with pytest.raises(Mismatch, match=r"'embed\.weight' and 'out\.weight' are one tensor in the model"):
        reload(path, Tied())
    reference = saved(Tied().state_dict(), tmp_path / "like.pt")
    ran = cli("doctor", path, "--like", reference, "--json")
    assert (ran.code, [problem["kind"] for problem in ran.json["problems"]]) == (1, ["tied"])
    equal = saved({**state, "out.weight": state["out.weight"].clone()}, tmp_path / "equal.pt")
    reload(equal, Tied())


def test_values_are_converted_to_the_model_s_own_type(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2).double()
    original = torch.nn.Linear(2, 2).half()
    reload(saved(original.state_dict(), tmp_path / "f.pt"), model)
    assert model.weight.dtype is torch.float64
    assert torch.equal(model.weight, original.weight.double())


def test_neither_the_file_nor_the_model_is_changed_with_the_other(net: SmallNet, tmp_path: Path) -> None:
    path = saved(net.state_dict(), tmp_path / "f.pt")
    before, model, other = path.read_bytes(), fresh(), fresh()
    reload(path, model)
    reload(path, other)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    assert path.read_bytes() == before
    path.write_bytes(b"")
    assert_same(net.state_dict(), other.state_dict())


# Live tensors.


def live(path: Path) -> dict[str, torch.Tensor]:
    return live_tensors(ckpttool.open(path).state().tensors)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_loaded_tensors_of_every_dtype_are_right_at_odd_addresses(dtype: torch.dtype, tmp_path: Path) -> None:
    """In the legacy format a storage may begin anywhere."""
    odd = torch.ones(3, dtype=torch.uint8)
    state = {"a": odd, "t": numbers(3, 4, dtype=dtype).t(), "e": torch.empty(0, 3)}
    for name, found in live(legacy(state, tmp_path / "f")).items():
        assert values(found) == values(state[name])


def test_loaded_tensors_share_what_the_file_shares_and_never_write_to_it(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    path = saved({"a": weight, "b": weight[2:]}, tmp_path / "f")
    before = path.read_bytes()
    found = live(path)
    found["a"][2] = 100
    assert found["b"][0] == 100
    assert path.read_bytes() == before


def test_a_type_that_this_torch_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved({"t": torch.ones(2, dtype=torch.uint16)}, tmp_path / "f")
    monkeypatch.delattr(torch, "uint16")
    with pytest.raises(ckpttool.CkptToolError, match="has no type uint16, which 't' has"):
        live(path)


# ---- what may be missing -------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_what_may_be_missing_keeps_the_model_s_values(assign: bool, net: SmallNet, tmp_path: Path) -> None:
    state = {name: value for name, value in net.state_dict().items() if name != "norm.running_mean"}
    path, model = saved(prefixed(state, "module."), tmp_path / "f"), SmallNet(classes=7)
    own = {name: values(value) for name, value in model.state_dict().items()}
    loaded = reload(path, model, allow_missing=["head.*", "*.running_mean", "conv.*"], assign=assign)
    assert loaded.kept == ("norm.running_mean", "head.weight", "head.bias")
    assert set(loaded.loaded) == set(own) - set(loaded.kept)
    for name, value in model.state_dict().items():
        assert values(value) == (own[name] if name in loaded.kept else values(net.state_dict()[name]))


def test_what_may_be_missing_does_not_cover_other_names(net: SmallNet, tmp_path: Path) -> None:
    model = SmallNet(width=5, classes=7)
    with pytest.raises(Mismatch) as caught:
        reload(saved(net.state_dict(), tmp_path / "f"), model, allow_missing=["head.*"])
    assert {name.partition(".")[0] for name, *_ in caught.value.mismatched} == {"conv", "norm"}


# ---- Averages of a model, in the forms in which training programs save them, load into the plain model


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


@pytest.mark.parametrize("where", ["ema_", "state_dict.ema_"])
def test_the_average_that_mmcv_keeps_beside_the_model_is_named_by_its_prefix(
    where: str, cli: Cli, tmp_path: Path
) -> None:
    buffers = {f"ema_{name.replace('.', '_')}": p.detach() for name, p in AVERAGE.named_parameters()}
    path = saved({"state_dict": {**MODEL.state_dict(), **buffers}, "meta": {}}, tmp_path / "in.pth")
    model = SmallNet()
    loaded = ckpttool.reload(path, model, state=where, allow_missing=["norm.running_*"])
    assert_parameters(model, AVERAGE)
    assert loaded.state == "state_dict.ema_" or loaded.state == where
    ran = cli("slim", path, tmp_path / "ema.pt", "--state", where, "--model", SPEC)
    assert ran.code == 0, ran.err
    assert torch.equal(torch.load(tmp_path / "ema.pt")["head.bias"], AVERAGE.head.bias)
    ckpttool.reload(path, model, state="!ema_")
    assert_parameters(model, MODEL)
    with pytest.raises(Mismatch):  # the model's own names are there: its average never takes their place
        ckpttool.reload(path, model)


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
