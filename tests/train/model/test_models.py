"""The models that `--model` knows by name, gradient checkpoints, and compilation."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from ckpttool import batchnorm
from ckpttool.batchnorm import RunningStatistics
from ckpttool.errors import UsageFault
from ckpttool.models import factory
from tests.ranks import trainings
from train import evaluate, main
from train.config.sections import ModelConfig
from train.model import builtin as models
from train.model import wrapping
from train.model.builtin import resnet20, simple_cnn

OWN = """
from torch import nn

sized = lambda num_classes: nn.Linear(4, num_classes)
fixed = lambda: nn.Linear(4, 3)
other = lambda: 5

class Freezes(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self

half = lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout().eval())
whole = lambda: half().eval()
method = lambda: Freezes(nn.Linear(3, 2), nn.Dropout())

import threading

class Locked(nn.Module):
    def __init__(self, net=None):
        super().__init__()
        self.lock, self.net = threading.Lock(), net or nn.Linear(64, 10)
        self.parts = {"a": [threading.Lock()], "numbers": (number for number in range(3))}

    def forward(self, x):
        with self.lock:
            self.last = self.net(x.flatten(1))
            return self.last

def normed():
    norm = nn.utils.weight_norm(nn.Linear(64, 16))
    return Locked(nn.Sequential(norm, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)))

class Refusing(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")

class Answers(nn.Linear):
    def __init__(self, made):
        super().__init__(64, 10)
        self.made = made

    def forward(self, x):
        return self.made(super().forward(x.flatten(1)))

from collections import namedtuple
from types import SimpleNamespace
Output = namedtuple("Output", ["logits", "features"])
plain = lambda: Answers(lambda scores: scores)
mapping = lambda: Answers(lambda scores: {"features": scores[:, :2], "logits": scores})
named = lambda: Answers(lambda scores: Output(scores, scores[:, :2]))
an_object = lambda: Answers(lambda scores: SimpleNamespace(logits=scores))

refusing = lambda: nn.Sequential(nn.Flatten(), Refusing(64, 10))

def look(model, step, folder):
    print("looked", step)
"""


def test_resnet20_has_the_names_and_shapes_of_the_published_weights(resnet20):
    published = torch.load(resnet20, map_location="cpu", weights_only=True)["state_dict"]
    state = {name.removeprefix("module."): value for name, value in published.items()}
    model = models.resnet20()
    model.load_state_dict(state, strict=True)
    # The file is older than BatchNorm's counters, which torch then starts at zero.
    names = [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]
    assert names == list(state)


def test_resnet20_has_the_size_of_the_paper():
    parameters = sum(parameter.numel() for parameter in models.resnet20().parameters())
    assert parameters == 269_722
    assert models.resnet20(num_classes=7, channels=1)(torch.rand(2, 1, 32, 32)).shape == (2, 7)


def test_option_a_shortcuts_take_every_second_pixel_and_pad_channels_with_zeros():
    block, x = models.Block(16, 32, stride=2), torch.rand(1, 16, 6, 6)
    shortcut = block.shortcut(x)
    assert torch.equal(shortcut[:, 8:24], x[:, :, ::2, ::2])
    assert shortcut[:, :8].count_nonzero() == shortcut[:, 24:].count_nonzero() == 0
    assert models.Block(16, 16, stride=1).shortcut(x) is x


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 1, 1), (2, 5, 40), (3, 96, 64)])
def test_simple_cnn_adapts_to_the_images_and_classes(shape):
    model = models.build("simple-cnn", shape=shape, classes=7)
    assert model(torch.rand(2, *shape)).shape == (2, 7)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_simple_cnn_has_no_batchnorm_and_fits_the_digits_without_arguments():
    model = models.simple_cnn()
    assert not list(model.buffers())
    assert model(torch.rand(1, 1, 8, 8)).shape == (1, 10)


def test_torchvisions_models_and_a_users_factory_that_takes_it_get_the_number_of_classes(own):
    assert models.build("torchvision:resnet18", shape=(3, 32, 32), classes=7).fc.out_features == 7
    for name, outputs in (("sized", 7), ("sized(num_classes=2)", 2), ("fixed", 3)):
        made = models.build(f"{own}:{name}", shape=(4,), classes=7)
        assert made.out_features == outputs
    with pytest.raises(UsageFault, match=r"returned int, not a torch\.nn\.Module"):
        models.build(f"{own}:other", shape=(4,), classes=7)


def test_an_unknown_model_and_one_of_images_for_other_samples_are_refused():
    with pytest.raises(UsageFault, match="no such model") as fault:
        models.build("resnet99", shape=(3, 8, 8), classes=10)
    assert "simple-cnn" in fault.value.hint
    with pytest.raises(UsageFault, match="takes images"):
        models.build("simple-cnn", shape=(5,), classes=10)


# A model that is wholly in eval mode is one as from_pretrained returns it, and is to be trained.
@pytest.mark.parametrize(("factory", "dropout"), [("half", False), ("whole", True), ("method", False)])
def test_a_model_is_trained_in_the_modes_that_its_factory_gave(own, factory, dropout):
    made = models.build(f"{own}:{factory}", shape=(3,), classes=2)
    assert [module.training for module in made.modules()] == [True, True, dropout]


# ---- gradient checkpoints and compilation: which modules, and nothing else changes ---------------------


class Block(nn.Module):
    """A residual block with all that a second computation could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.average = nn.BatchNorm1d(6, momentum=None)
        self.spectral = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("passes", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        y = torch.dropout(self.inner(x), 0.3, self.training) * self.passes
        return x + self.average(self.spectral(y))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 3))


def line() -> nn.Module:
    return nn.Linear(1, 1)


def trained(model: nn.Module, inputs: list[torch.Tensor], statistics: Any = None) -> dict[str, torch.Tensor]:
    """Return the state and the gradients after two passes of two steps each."""
    torch.manual_seed(11)
    found = {}
    for step in range(2):
        model.zero_grad()
        for input in inputs:
            model(input).square().sum().backward()
        if statistics:
            statistics.end_step()
        plain = getattr(model, "module", model)
        for name, parameter in plain.named_parameters():
            found[f"gradient {step} of {name}"] = parameter.grad.clone()
    return {**found, **copy.deepcopy(plain.state_dict())}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# ---- gradient checkpoints -------------------------------------------------------------------------------


# What makes a model, and its blocks.
MODELS: dict[str, tuple[Any, list[str]]] = {
    "blocks": (net, ["1", "2"]),
    "stages": (resnet20, [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]),
    "sequences of layers": (simple_cnn, ["features", "classifier"]),
    "nested": (lambda: nn.Sequential(nn.Sequential(line()), nn.Sequential(net())), ["0", "1.0.1", "1.0.2"]),
    "lists": (lambda: nn.ModuleDict({"a": nn.ModuleList([Block(), line()])}), ["a.0"]),
    "layer": (line, []),
    "sequence": (lambda: nn.Sequential(line(), nn.ReLU()), []),
    "frozen": (lambda: nn.Sequential(Block().requires_grad_(False)), []),
}


@pytest.mark.parametrize("what", MODELS)
def test_blocks_are_found_and_a_model_without_any_is_refused(what):
    make, paths = MODELS[what]
    model = make()
    keys = list(model.state_dict())
    if paths:
        assert wrapping.checkpoint_blocks(model) == paths
        assert list(model.state_dict()) == keys
        return
    with pytest.raises(UsageFault, match=r"--grad-checkpoint: .* has no blocks"):
        wrapping.checkpoint_blocks(model)


def test_gradients_buffers_and_random_numbers_are_the_same_to_the_bit():
    inputs = [torch.rand(5, 6), torch.rand(7, 6)]
    plain, again = trainings.seeded(net), trainings.seeded(net)
    wrapping.checkpoint_blocks(again)
    assert same(trained(plain, inputs), trained(again, inputs))
    assert plain[1].passes.item() == again[1].passes.item() == 4


def test_a_pass_without_gradients_and_a_copy_of_the_model_work():
    model = trainings.seeded(net)
    wrapping.checkpoint_blocks(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        nn.init.zeros_(copied[1].inner[0].weight)
        assert not torch.equal(model.eval()(torch.ones(2, 6)), copied.eval()(torch.ones(2, 6)))


def test_two_backward_passes_of_one_graph_work():
    model = trainings.seeded(net)
    wrapping.checkpoint_blocks(model)
    output = model(torch.rand(5, 6)).sum()
    output.backward(retain_graph=True)
    before = copy.deepcopy(model.state_dict())
    output.backward()
    assert same(before, dict(model.state_dict()))
    assert model[1].average.track_running_stats


def over_ranks(rank: int, size: int, kind: str, checkpoints: bool) -> Any:
    model = trainings.seeded(net)
    if kind == "sync":
        batchnorm.to_sync(model)
    statistics = RunningStatistics(model) if kind == "pooled" else None
    if checkpoints:
        wrapping.checkpoint_blocks(model)
    torch.manual_seed(rank)
    inputs = [torch.rand(5 + rank, 6), torch.rand(3, 6)]
    return trained(DistributedDataParallel(model), inputs, statistics)


@pytest.mark.parametrize("kind", ["plain", "sync", "pooled"])
def test_statistics_over_ranks_are_updated_once(run_ranks, kind):
    plain, again = (run_ranks(2, over_ranks, kind, checkpoints) for checkpoints in (False, True))
    assert same(plain[0], again[0])
    assert same(plain[1], again[1])


# ---- compilation ----------------------------------------------------------------------------------------


def layers() -> nn.Module:
    inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 3)).double()


def last_gradients(rank: int, size: int, sizes: list[int], compiled: bool, checkpoints: bool) -> Any:
    """Train without an update in batches of these sizes; return the keys and what the last batch gives."""
    torch.compiler.reset()
    model = trainings.seeded(layers)
    wrapping.wrap(ModelConfig(compile=compiled, grad_checkpoint=checkpoints), model)
    ddp = DistributedDataParallel(model)
    before = counters["stats"]["unique_graphs"]
    for number in sizes:
        torch.manual_seed(rank)
        ddp.zero_grad()
        with wrapping.not_compiled() if number == 1 else contextlib.nullcontext():
            model[1][1].training = number > 1
            ddp(torch.rand(number, 6).double()).square().sum().backward()
    assert (counters["stats"]["unique_graphs"] > before) == compiled
    assert model[1][1].num_batches_tracked.item() == sum(number > 1 for number in sizes)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    graphs = counters["stats"]["unique_graphs"]
    with wrapping.not_compiled(), torch.no_grad():
        model.eval()(torch.ones(3, 6).double())
    assert counters["stats"]["unique_graphs"] == graphs
    return list(ddp.state_dict()), gradients


@pytest.mark.long
@pytest.mark.parametrize("checkpoints", [False, True])
def test_compiled_training_has_the_keys_of_ddp_and_the_same_bits_after_other_batches(run_ranks, checkpoints):
    eager = run_ranks(1, last_gradients, [6], False, False)[0]
    straight = run_ranks(1, last_gradients, [1, 6, 2, 4, 6], True, checkpoints, timeout=100)[0]
    resumed = run_ranks(1, last_gradients, [1, 6], True, checkpoints, timeout=100)[0]
    assert eager[0] == straight[0]
    assert same(straight[1], resumed[1])
    for name, value in eager[1].items():
        torch.testing.assert_close(straight[1][name], value, rtol=1e-12, atol=1e-12)


class Broken(nn.BatchNorm1d):
    """A layer after which the compiler can't go on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x


def test_a_compiled_block_that_the_compiler_breaks_updates_its_statistics_once(monkeypatch):
    torch.compiler.reset()
    # Its graphs are run as they are: machine code would take seconds, and break at the same place.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Broken(2)))
    wrapping.wrap(ModelConfig(compile=True, grad_checkpoint=True), model)
    model(torch.rand(3, 2)).sum().backward()
    assert model[1][0].num_batches_tracked.item() == 1


# ---- models that can't be copied -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("flags", [["--batchnorm", "sync"], ["--accumulate", "2", "--optimizer", "adamw"]])
def test_a_model_with_a_lock_and_the_old_weight_norm_is_trained_and_scored(own, tmp_path, capsys, flags):
    given = ["--model", f"{own}:normed", "--data", "digits", "--max-steps", "3", "--out", f"{tmp_path}/run"]
    assert main.main([*given, *flags, "--every", "2steps", f"{own}:look"]) == 0
    assert "looked 2" in capsys.readouterr().out
    assert main.main([*given, *flags, "--max-steps", "4", "--resume", "auto"]) == 0
    assert evaluate.main([f"{tmp_path}/run/best.pt", *given[:4]]) == 0


def test_a_copy_shares_what_can_not_be_copied_and_nothing_else(own):
    model = factory.build(f"{own}:Locked")
    model(torch.ones(2, 64))
    copied = factory.copy_of(model)
    assert copied.lock is model.lock and copied.parts["a"][0] is model.parts["a"][0]
    assert copied.parts is not model.parts and copied.last.is_leaf
    copied.net.weight.data.zero_()
    assert model.net.weight.abs().sum() > 0 and not copied(torch.ones(2, 64)).isnan().any()


def test_a_model_that_refuses_to_be_copied_is_refused_in_one_line(own, tmp_path, capsys):
    assert main.main(["--model", f"{own}:refusing", "--out", f"{tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    assert "Sequential, can't be copied: RuntimeError: no copies" in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["mapping", "named", "an_object"])
def test_a_classifier_may_return_its_scores_as_logits(own, tmp_path, capsys, name):
    """As those of transformers do; the training and its score are those of the scores alone."""
    logs = []
    for each in ("plain", name):
        flags = ["--model", f"{own}:{each}", "--data", "digits", "--max-steps", "4", "--accumulate", "2"]
        assert main.main([*flags, "--out", f"{tmp_path}/{each}"]) == 0
        capsys.readouterr()
        assert evaluate.main([f"{tmp_path}/{each}/best.pt", *flags[:4], "--json"]) == 0
        logs.append(json.loads(capsys.readouterr().out) | {"checkpoint": ""})
    assert logs[0] == logs[1]
