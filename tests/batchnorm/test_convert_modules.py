"""Live layers converted to synchronised ones and back: what stays, what changes, what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import batchnorm
from ckpttool.batchnorm import SyncBatchNorm, convert_states
from ckpttool.errors import UsageFault

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
