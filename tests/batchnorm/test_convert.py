"""BatchNorm converted to SyncBatchNorm and back: in states, and in live layers."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import ckpttool
from ckpttool import batchnorm
from ckpttool.batchnorm import SyncBatchNorm, convert_states
from ckpttool.batchnorm.convert_states import Report
from ckpttool.errors import NothingToDo, Refused, UsageFault

# ---- BatchNorm in states: layers found, counters, versions and kinds, checked by loading into torch ---


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))
    layers |= {"flat": nn.Flatten(), "fc": nn.Linear(4 * 36, 6)}
    layers |= {"head": nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.LayerNorm(6))}
    model = nn.Sequential(layers)
    model(torch.randn(5, 3, 8, 8))
    return model


KINDS = {"bn": "BatchNorm2d", "head.0": "BatchNorm1d"}


def old_state(model: nn.Module | None = None) -> Any:
    """Return a state as torch 0.4.0 saved it: no counters, and layers of version 1."""
    state = (model or make_model()).state_dict()
    for name in [name for name in state if name.endswith("num_batches_tracked")]:
        del state[name]
    for entry in state._metadata.values():
        entry["version"] = 1
    return state


def convert(value: Any, folder: Path, to: Any = "sync", **options: Any) -> tuple[Any, Report]:
    """Save a value by torch, convert it and save it again; return what torch loads, and the report."""
    torch.save(value, folder / "in.pt")
    report = convert_file(folder / "in.pt", folder / "out.pt", to, **options)
    return torch.load(folder / "out.pt", weights_only=True), report


def convert_file(path: Path, out: Path, to: Any = "sync", **options: Any) -> Report:
    with ckpttool.open(path) as checkpoint:
        new, report = convert_states.convert(checkpoint, to, **options)
        assert ckpttool.save(new, out, force=True).left_out == ()
    return report


def recorded(path: Path) -> dict[str, str]:
    with ckpttool.open(path) as checkpoint:
        return convert_states.recorded_kinds(checkpoint, checkpoint.state())


# ---- counters and versions ------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["sync", "plain"])
def test_a_missing_counter_is_added_as_torch_adds_it_when_it_loads(to: str, tmp_path: Path) -> None:
    state, report = convert(old_state(), tmp_path, to)
    assert report.layers == ("bn", "head.0")
    assert report.added == ("bn.num_batches_tracked", "head.0.num_batches_tracked")
    assert report.versioned == report.layers
    assert {state._metadata[layer]["version"] for layer in report.layers} == {2}
    assert state._metadata["conv"]["version"] == 1
    expected = make_model()
    expected.load_state_dict(old_state())  # sets its counters as torch thinks right
    fresh = make_model()
    for layer in report.layers:
        fresh.get_submodule(layer).num_batches_tracked.zero_()
    fresh.load_state_dict(state, strict=True)
    assert list(state) == list(fresh.state_dict())  # in torch's own order
    for name, tensor in fresh.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, expected.state_dict()[name])
        else:
            assert tensor.dtype == torch.int64 and tensor.shape == () and tensor.item() == 0


def test_added_counters_share_no_memory(tmp_path: Path) -> None:
    state, report = convert(old_state(), tmp_path)
    assert len({state[name].untyped_storage().data_ptr() for name in report.added}) == 2


def test_an_existing_counter_is_kept_and_only_a_missing_one_added(tmp_path: Path) -> None:
    state = make_model().state_dict()
    state["bn.num_batches_tracked"].fill_(41)
    del state["head.0.num_batches_tracked"]
    after, report = convert(state, tmp_path)
    assert report.added == ("head.0.num_batches_tracked",)
    assert after["bn.num_batches_tracked"].item() == 41


def test_a_state_without_metadata_gets_a_counter_but_no_metadata(tmp_path: Path) -> None:
    state, report = convert(dict(old_state()), tmp_path)
    assert type(state) is dict
    assert report.versioned == ()
    make_model().load_state_dict(state, strict=True)


def test_all_other_tensors_and_entries_keep_their_bytes(tmp_path: Path) -> None:
    state = old_state()
    after, _ = convert({"model": state, "epoch": 3, "ema": {"w": torch.ones(2)}}, tmp_path)
    assert after["epoch"] == 3 and torch.equal(after["ema"]["w"], torch.ones(2))
    for name, tensor in state.items():
        assert torch.equal(after["model"][name], tensor)


def test_a_state_that_fits_both_leaves_nothing_to_do(tmp_path: Path) -> None:
    for to in ("sync", "plain"):
        with pytest.raises(NothingToDo, match="have the same keys") as caught:
            convert(make_model().state_dict(), tmp_path, to)
        assert ("--model" in str(caught.value.hint)) == (to == "sync")


def test_a_big_endian_file_gets_big_endian_counters(tmp_path: Path) -> None:
    convert(old_state(), tmp_path)
    with ckpttool.open(tmp_path / "out.pt") as checkpoint:
        storage = checkpoint.state().tensors["bn.running_mean"].storage
        storage.byteorder = "big"
        assert convert_states.zero(storage).storage.byteorder == "big"


# ---- kinds ------------------------------------------------------------------------------------------------


def test_kinds_are_recorded_where_torch_ignores_them_and_the_way_back_is_exact(tmp_path: Path) -> None:
    state = make_model().state_dict()
    before = copy.deepcopy(state)
    loaded, report = convert(state, tmp_path, kinds=KINDS)
    assert report.recorded == KINDS
    assert loaded._metadata["bn"] == {"version": 2, "kind": "BatchNorm2d"}
    make_model().load_state_dict(loaded, strict=True)
    nn.SyncBatchNorm.convert_sync_batchnorm(make_model()).load_state_dict(loaded, strict=True)
    returned, report = convert(loaded, tmp_path, "plain")
    assert report.restored == KINDS
    assert returned._metadata == before._metadata
    assert list(returned) == list(before)
    assert all(torch.equal(returned[name], before[name]) for name in before)


def test_there_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    torch.save(make_model().state_dict(), tmp_path / "torch.pt")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with ckpttool.open(tmp_path / "torch.pt") as checkpoint:
        ckpttool.save(checkpoint, tmp_path / "a" / "model.pt")
    convert_file(tmp_path / "torch.pt", tmp_path / "sync.pt", kinds=KINDS)
    convert_file(tmp_path / "sync.pt", tmp_path / "b" / "model.pt", "plain")
    assert (tmp_path / "a" / "model.pt").read_bytes() == (tmp_path / "b" / "model.pt").read_bytes()


def test_a_record_survives_further_changes_of_the_file(tmp_path: Path) -> None:
    plain = make_model().state_dict()
    ddp = OrderedDict((f"module.{name}", tensor) for name, tensor in plain.items())
    versions = ((f"module.{path}".rstrip("."), entry) for path, entry in plain._metadata.items())
    ddp._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    _, report = convert(ddp, tmp_path, kinds=KINDS)
    assert report.recorded == {f"module.{path}": kind for path, kind in KINDS.items()}
    with ckpttool.open(tmp_path / "out.pt") as checkpoint:
        ckpttool.save(ckpttool.strip_prefix(checkpoint)[0], tmp_path / "stripped.pt")
    assert recorded(tmp_path / "stripped.pt") == KINDS


def test_a_safetensors_file_records_kinds_in_its_header_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    before, sync, back = (tmp_path / f"{name}.safetensors" for name in ("in", "sync", "back"))
    save_file(make_model().state_dict(), before, {"format": "pt"})
    convert_file(before, sync, kinds=KINDS)
    with safe_open(sync, "pt") as file:
        assert set(file.keys()) == set(make_model().state_dict())
        text = '{"bn": "BatchNorm2d", "head.0": "BatchNorm1d"}'
        assert file.metadata() == {"format": "pt", "batchnorm.kinds": text}
    assert recorded(sync) == KINDS
    assert convert_file(sync, back, "plain").restored == KINDS
    assert back.read_bytes() == before.read_bytes()


def test_a_record_made_for_one_format_can_be_written_to_the_other(tmp_path: Path) -> None:
    save_file(make_model().state_dict(), tmp_path / "in.safetensors")
    convert_file(tmp_path / "in.safetensors", tmp_path / "a.pt", kinds=KINDS, as_text=False)
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert state._metadata == {path: {"kind": kind} for path, kind in KINDS.items()}
    make_model().load_state_dict(state, strict=True)
    assert not hasattr(convert(state, tmp_path, "plain")[0], "_metadata")


def test_a_plain_dict_becomes_an_ordered_dict_if_kinds_are_recorded(tmp_path: Path) -> None:
    state, _ = convert(dict(make_model().state_dict()), tmp_path, kinds=KINDS)
    assert type(state) is OrderedDict
    assert state._metadata == {path: {"kind": kind} for path, kind in KINDS.items()}


def test_recording_the_same_kinds_again_leaves_nothing_to_do(tmp_path: Path) -> None:
    state, _ = convert(make_model().state_dict(), tmp_path, kinds=KINDS)
    with pytest.raises(NothingToDo):
        convert(state, tmp_path, kinds=KINDS)


@pytest.mark.parametrize("text", ["nonsense", "[1]", '{"bn": "Dropout", "head.0": 3}', "[" * 100_000])
def test_other_text_in_the_place_of_a_record_is_ignored(text: str, tmp_path: Path) -> None:
    save_file(make_model().state_dict(), tmp_path / "in.safetensors", {"batchnorm.kinds": text})
    assert recorded(tmp_path / "in.safetensors") == {}


# ---- what is BatchNorm, and what is not -------------------------------------------------------------------


def test_a_model_that_is_a_single_layer_is_found(tmp_path: Path) -> None:
    _, report = convert(old_state(nn.BatchNorm1d(3)), tmp_path)
    assert report.layers == ("",)
    assert report.added == ("num_batches_tracked",)


def test_a_state_without_batchnorm_leaves_nothing_to_do(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.InstanceNorm1d(2, affine=True))
    with pytest.raises(NothingToDo, match="no BatchNorm") as caught:
        convert(model.state_dict(), tmp_path)
    assert "ckpttool inspect" in str(caught.value.hint)


ZEROS, ONES = torch.zeros(3), torch.ones(3)
FOREIGN = {
    "no variance": {"running_mean": ZEROS},
    "no mean": {"running_var": ZEROS},
    "two lengths": {"running_mean": ZEROS, "running_var": torch.zeros(4)},
    "a matrix": {"running_mean": torch.zeros(3, 3), "running_var": torch.zeros(3, 3)},
    "integers": {"running_mean": ZEROS.int(), "running_var": ZEROS.int()},
    "two types": {"running_mean": ZEROS, "running_var": ZEROS.double()},
    "another weight": {"running_mean": ZEROS, "running_var": ONES, "weight": torch.ones(1, 3, 1, 1)},
    "a count of samples": {"running_mean": ZEROS, "running_var": ONES, "count": torch.ones(())},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_layers_that_are_not_batchnorm_are_refused_by_name_and_can_be_excluded(
    kind: str, tmp_path: Path
) -> None:
    state = old_state()
    for name, tensor in FOREIGN[kind].items():
        state[f"layers.norm.{name}"] = tensor
    with pytest.raises(Refused, match=r"in.pt: 'layers.norm' is not BatchNorm: ") as caught:
        convert(state, tmp_path)
    assert caught.value.hint == "skip it: --exclude layers.norm"
    after, report = convert(state, tmp_path, exclude=["layers.*"])
    assert report.layers == ("bn", "head.0")
    assert "layers.norm.num_batches_tracked" not in after


def test_instancenorm_is_taken_for_batchnorm_without_a_model_and_refused_with_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.InstanceNorm2d(3, track_running_stats=True))
    _, report = convert(old_state(model), tmp_path)
    assert report.layers == ("0", "1")
    with pytest.raises(Refused, match="'1' is not a BatchNorm1d, 2d or 3d in the model"):
        convert(old_state(model), tmp_path, kinds={"0": "BatchNorm2d"})


@pytest.mark.parametrize("to", ["sync", "plain"])
def test_a_model_tells_instancenorm_from_batchnorm_in_both_directions(to: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True))
    with pytest.raises(Refused, match="'0' is not a BatchNorm1d, 2d or 3d in the model"):
        convert(old_state(model), tmp_path, to, kinds={})
    with pytest.raises(NothingToDo, match="no BatchNorm"):
        convert(old_state(model), tmp_path, to, kinds={}, exclude=["0"])


@pytest.mark.parametrize("affine", [True, False])
def test_layers_without_statistics_are_recorded_if_a_model_names_them(affine: bool, tmp_path: Path) -> None:
    """Otherwise a synchronised model built from the file could not be made plain again."""
    model = nn.Sequential(nn.BatchNorm3d(3), nn.BatchNorm1d(3, affine=affine, track_running_stats=False))
    kinds = {"0": "BatchNorm3d", "1": "BatchNorm1d"}
    before = copy.deepcopy(model.state_dict())
    state, report = convert(model.state_dict(), tmp_path, kinds=kinds)
    assert (report.layers, report.recorded) == (("0", "1"), kinds)
    back, report = convert(state, tmp_path, "plain")
    assert (report.layers, report.restored) == (("0", "1"), kinds)
    assert back._metadata == before._metadata  # type: ignore[attr-defined]
    alone = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).state_dict()
    _, report = convert(alone, tmp_path, kinds={"0": "BatchNorm1d"})
    assert report.recorded == {"0": "BatchNorm1d"}


def test_the_record_of_an_excluded_layer_stays(tmp_path: Path) -> None:
    state, _ = convert(make_model().state_dict(), tmp_path, kinds=KINDS)
    back, report = convert(state, tmp_path, "plain", exclude=["bn"])
    assert report.restored == {"head.0": "BatchNorm1d"}
    assert back._metadata["bn"]["kind"] == "BatchNorm2d"  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [{"to": "global"}, {"kinds": {"bn": "GroupNorm", "head.0": "BatchNorm1d"}}])
def test_unknown_targets_and_kinds_are_usage_errors(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageFault):
        convert(old_state(), tmp_path, **given)


def test_another_state_can_be_converted_by_its_path(tmp_path: Path) -> None:
    value = {"model": make_model().state_dict(), "ema": old_state()}
    after, _ = convert(value, tmp_path, state="ema")
    assert "bn.num_batches_tracked" in after["ema"]


def test_the_checkpoint_that_was_read_is_not_changed(tmp_path: Path) -> None:
    torch.save(old_state(), tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        before = checkpoint.state()
        kept = dict(before.tensors), copy.deepcopy(before.versions)
        convert_states.convert(checkpoint, "sync", kinds=KINDS)
        after = checkpoint.state()
        assert (after.tensors, after.versions) == kept


# ---- Live layers converted to synchronised ones and back: what stays, what changes, what is refused ---


PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Net(nn.Module):
    """Each kind of BatchNorm once; one in two places, one in a list that is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=None, eps=1e-3))
        self.three = nn.BatchNorm3d(2, affine=False)
        self.one = nn.BatchNorm1d(4, track_running_stats=False)
        self.again = self.two[1]
        self.kept = [self.one]
        self.other = nn.InstanceNorm2d(3, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.two(x))


def make_net() -> Net:
    torch.manual_seed(0)
    net = Net()
    net(torch.randn(2, 1, 5, 5))
    return net


def norms(net: nn.Module) -> list[nn.Module]:
    return [layer for layer in net.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def test_every_layer_becomes_synchronised_and_then_its_own_kind_again() -> None:
    net = make_net()
    kinds = [type(layer) for layer in norms(net)]
    assert batchnorm.to_sync(net) is net
    assert {type(layer) for layer in norms(net)} == {SyncBatchNorm}
    assert type(net.other) is nn.InstanceNorm2d
    assert batchnorm.to_plain(net) is net
    assert [type(layer) for layer in norms(net)] == kinds


def test_a_layer_that_is_the_module_itself_is_converted_too() -> None:
    layer = nn.BatchNorm2d(3)
    assert type(batchnorm.to_sync(layer)) is SyncBatchNorm
    assert type(batchnorm.to_plain(layer)) is nn.BatchNorm2d


def test_there_and_back_leaves_every_attribute_as_it_was() -> None:
    net = make_net()
    before = [dict(layer.__dict__) for layer in norms(net)]
    batchnorm.to_plain(batchnorm.to_sync(net))
    after = [dict(layer.__dict__) for layer in norms(net)]
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(new[name] is old[name] for name in old)


def test_parameters_and_buffers_stay_the_same_objects_so_an_optimizer_stays_right() -> None:
    net = make_net().half()
    net.two[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    held = [id(tensor) for tensor in (*net.parameters(), *net.buffers())]
    flags = [parameter.requires_grad for parameter in net.parameters()]
    for convert in (batchnorm.to_sync, batchnorm.to_plain):
        convert(net)
        assert [id(tensor) for tensor in (*net.parameters(), *net.buffers())] == held
        assert [parameter.requires_grad for parameter in net.parameters()] == flags
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float16}
        groups = optimizer.param_groups[0]["params"]
        assert [id(parameter) for parameter in groups] == [id(parameter) for parameter in net.parameters()]


def test_a_layer_in_several_places_stays_one_and_hooks_and_modes_stay() -> None:
    net = make_net()
    net.three.eval()
    called = []
    net.again.register_forward_hook(lambda module, inputs, output: called.append(module))
    layer = net.again
    batchnorm.to_sync(net)
    assert net.again is net.two[1] is layer
    assert net.kept[0] is net.one and type(net.kept[0]) is SyncBatchNorm
    assert (net.three.training, net.one.training) == (False, True)
    net(torch.randn(2, 1, 5, 5))
    assert called == [layer, layer]


def test_settings_stay_and_layers_that_are_synchronised_already() -> None:
    net = batchnorm.to_sync(batchnorm.to_sync(make_net()))
    assert type(batchnorm.to_plain(copy.deepcopy(net)).three) is nn.BatchNorm3d
    assert (net.again.momentum, net.again.eps) == (None, 1e-3)
    assert (net.three.affine, net.three.weight) == (False, None)
    assert (net.one.track_running_stats, net.one.running_mean) == (False, None)


def test_results_and_states_are_the_same_in_every_form() -> None:
    net, batch = make_net().eval(), torch.randn(2, 1, 5, 5)
    expected, state = net(batch), net.state_dict()
    for convert in (batchnorm.to_sync, batchnorm.to_plain):
        convert(net)
        assert torch.equal(net(batch), expected)
        assert list(net.state_dict()) == list(state)
        copy.deepcopy(net).load_state_dict(state, strict=True)


def test_a_pickled_layer_names_its_public_class_and_remembers_its_kind_as_a_copy_does() -> None:
    assert b"cckpttool.batchnorm\nSyncBatchNorm\n" in pickle.dumps(SyncBatchNorm(3), protocol=2)
    net = batchnorm.to_sync(make_net())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert isinstance(batchnorm.to_plain(other).two[1], nn.BatchNorm2d)


# ---- torch's own ------------------------------------------------------------------------------------------


def test_torchs_syncbatchnorm_becomes_the_kind_in_a_reference() -> None:
    trained = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    batchnorm.to_plain(trained, like=make_net())
    assert batchnorm.kinds_of(trained) == batchnorm.kinds_of(make_net())
    trained(torch.randn(2, 1, 5, 5))  # trains on a CPU again


def test_a_reference_need_not_be_wrapped_like_the_model() -> None:
    trained = nn.DataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(make_net()))
    batchnorm.to_plain(trained, like=make_net())
    assert type(trained.module.two[1]) is nn.BatchNorm2d
    trained = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    of_ddp = {f"module.{path}": kind for path, kind in batchnorm.kinds_of(make_net()).items()}
    assert type(batchnorm.to_plain(trained, kinds=of_ddp).three) is nn.BatchNorm3d


def test_torchs_layers_become_ours_on_a_cpu() -> None:
    group = object()
    net = nn.Sequential(nn.SyncBatchNorm(3, process_group=group))
    layer, weight = net[0], net[0].weight
    batchnorm.to_sync(net)
    assert type(net[0]) is SyncBatchNorm
    assert net[0] is layer and net[0].weight is weight and net[0].process_group is group
    net(torch.randn(2, 3, 4, 4)).sum().backward()
    with pytest.raises(UsageFault, match="nothing says"):
        batchnorm.to_plain(net)


def test_an_unknown_kind_is_refused_by_name_and_nothing_is_changed() -> None:
    trained = batchnorm.to_sync(nn.Sequential(nn.BatchNorm1d(2)))
    trained.append(nn.SyncBatchNorm(2))
    with pytest.raises(UsageFault, match="'1' is a SyncBatchNorm") as caught:
        batchnorm.to_plain(trained)
    assert "like=" in str(caught.value.hint)
    assert type(trained[0]) is SyncBatchNorm


def test_a_checkpoint_of_a_synchronised_model_records_the_kinds(tmp_path: Path) -> None:
    """Live -> state dict -> file -> live, without a reference."""
    torch.save({"model": batchnorm.to_sync(make_net()).state_dict()}, tmp_path / "last.pt")
    with ckpttool.open(tmp_path / "last.pt") as checkpoint:
        kinds = convert_states.recorded_kinds(checkpoint, checkpoint.state())
        convert_states.convert(checkpoint, "plain")
    assert kinds == batchnorm.kinds_of(make_net())
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    net.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True)["model"], strict=True)
    assert type(batchnorm.to_plain(net, kinds=kinds).three) is nn.BatchNorm3d


def test_kinds_are_given_for_every_place_of_a_layer() -> None:
    kinds = {"two.1": "BatchNorm2d", "again": "BatchNorm2d", "three": "BatchNorm3d", "one": "BatchNorm1d"}
    net = make_net()
    assert batchnorm.kinds_of(net) == kinds == batchnorm.kinds_of(batchnorm.to_sync(net))


def test_a_part_of_the_model_called_module_is_no_wrapper() -> None:
    net = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "module": nn.ModuleDict({"norm": nn.BatchNorm2d(2)})})
    assert batchnorm.kinds_of(net) == {"norm": "BatchNorm1d", "module.norm": "BatchNorm2d"}


# ---- what is not converted --------------------------------------------------------------------------------


class Mine(nn.BatchNorm2d):
    pass


def with_own_forward() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    layer.forward = torch.compile(layer.forward, backend="eager")  # type: ignore[method-assign]
    return layer


class MineSync(nn.SyncBatchNorm):
    pass


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "is a .*Mine": lambda: Mine(3),
    "has no parameters yet": lambda: nn.LazyBatchNorm2d(),
    "is scripted": lambda: torch.jit.script(nn.BatchNorm2d(3)),
    "is a .*ParametrizedBatchNorm2d": lambda: nn.utils.parametrizations.spectral_norm(nn.BatchNorm2d(3)),
    "has its own forward": with_own_forward,
}


@pytest.mark.parametrize("said", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_layers_that_only_derive_from_batchnorm_are_refused_by_name_or_kept(said: str) -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), REFUSED[said]())
    with pytest.raises(UsageFault, match=f"'1' {said}"):
        batchnorm.to_sync(net)
    assert type(net[0]) is nn.BatchNorm2d, "nothing was changed"
    kept = type(net[1])
    batchnorm.to_sync(net, subclasses="keep")
    assert (type(net[0]), type(net[1])) == (SyncBatchNorm, kept)


def test_a_class_derived_from_syncbatchnorm_is_not_made_plain() -> None:
    with pytest.raises(UsageFault, match="MineSync"):
        batchnorm.to_plain(nn.Sequential(MineSync(3)), like=nn.Sequential(nn.BatchNorm2d(3)))


# ---- wrapped modules --------------------------------------------------------------------------------------


def test_layers_inside_a_compiled_module_are_converted() -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)))
    net[0] = torch.compile(net[0], backend="eager")
    batch = torch.randn(2, 1, 5, 5)
    net.eval()
    expected = net(batch)
    batchnorm.to_sync(net)
    assert type(net[0]._orig_mod[1]) is SyncBatchNorm
    assert torch.allclose(net(batch), expected, atol=1e-6)
    assert batchnorm.kinds_of(net) == {"0.1": "BatchNorm2d"}
    batchnorm.to_plain(net)
    assert torch.allclose(net(batch), expected, atol=1e-6)


def test_layers_inside_a_graph_module_are_converted() -> None:
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)))
    batchnorm.to_sync(net)
    assert net(torch.randn(2, 1, 5, 5)).shape == (2, 3, 3, 3)
    assert type(net.get_submodule("1")) is SyncBatchNorm


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_layer_becomes_torchs_own() -> None:
    net = batchnorm.to_sync(make_net().cuda())
    assert type(net.again) is nn.SyncBatchNorm
    assert type(batchnorm.to_plain(net).again) is nn.BatchNorm2d
