"""BatchNorm on several ranks against one process with all samples: the layer, and running statistics."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ckpttool import batchnorm
from ckpttool.batchnorm import SyncBatchNorm
from ckpttool.batchnorm.sync_batchnorm import moments, update_running
from tests.support.running import error_of

# ---- SyncBatchNorm on the CPU: ranks with a divided batch equal plain BatchNorm in one process --------


KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d, features": (nn.BatchNorm1d, (3,)),
    "1d, sequences": (nn.BatchNorm1d, (3, 5)),
    "2d": (nn.BatchNorm2d, (3, 4, 5)),
    "3d": (nn.BatchNorm3d, (3, 2, 3, 2)),
}


class Setting(NamedTuple):
    """One layer, the form of its input, and each rank's number of samples."""

    kind: str = "2d"
    shares: tuple[int, ...] = (3, 5)
    momentum: float | None = 0.1
    affine: bool = True
    tracked: bool = True
    dtype: torch.dtype = torch.float64
    channels_last: bool = False
    offset: float = 0.0
    mixed: bool = False


class Outcome(NamedTuple):
    """The result of one step: output and gradients of this rank's samples, and the layer's buffers."""

    output: Any
    to_input: Any
    to_weight: Any
    to_bias: Any
    buffers: Any


def make_layer(setting: Setting) -> nn.Module:
    plain, shape = KINDS[setting.kind]
    torch.manual_seed(1)
    given = {"momentum": setting.momentum, "affine": setting.affine, "track_running_stats": setting.tracked}
    layer = plain(shape[0], **given).to(torch.float32 if setting.mixed else setting.dtype)
    if setting.affine:
        nn.init.uniform_(layer.weight, -2, 2)
        nn.init.uniform_(layer.bias, -2, 2)
    return layer


def make_batch(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch, and the coefficients of a loss that is linear in the output."""
    generator = torch.Generator().manual_seed(2)
    shape = (sum(setting.shares), *KINDS[setting.kind][1])
    values = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    batch, coefficients = (values[0] * 3 + setting.offset).to(setting.dtype), values[1].to(setting.dtype)
    if setting.channels_last:
        batch = batch.contiguous(memory_format=torch.channels_last)
    return batch, coefficients


def share_of(setting: Setting, rank: int) -> slice:
    """Return the place of a rank's samples in the whole batch."""
    begin = sum(setting.shares[:rank])
    return slice(begin, begin + setting.shares[rank])


def step(layer: nn.Module, batch: torch.Tensor, coefficients: torch.Tensor) -> Outcome:
    """Run two steps, so that running averages have a past, and return the outcome of the second."""
    for _ in range(2):
        layer.zero_grad()
        input = batch.detach().clone().requires_grad_()
        output = layer(input)
        (output * coefficients).sum().backward()
    gradients = [None if p is None else p.grad for p in (layer.weight, layer.bias)]
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return Outcome(output.detach(), input.grad, *gradients, buffers)


def run_rank(rank: int, world_size: int, setting: Setting) -> Outcome:
    layer = batchnorm.to_sync(make_layer(setting))
    assert type(layer) is SyncBatchNorm
    batch, coefficients = make_batch(setting)
    own = share_of(setting, rank)
    return step(layer, batch[own], coefficients[own])


def check(
    run_ranks: Any, setting: Setting, tolerance: float = 1e-10, *, case: Any = run_rank, arguments: Any = ()
) -> list[Outcome]:
    batch, coefficients = make_batch(setting)
    whole = step(make_layer(setting), batch, coefficients)
    ranks = run_ranks(len(setting.shares), case, setting, *arguments)

    def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)

    assert close(torch.cat([rank.output for rank in ranks]), whole.output)
    assert close(torch.cat([rank.to_input for rank in ranks]), whole.to_input)
    if setting.affine:
        assert close(sum(rank.to_weight for rank in ranks), whole.to_weight)
        assert close(sum(rank.to_bias for rank in ranks), whole.to_bias)
    for rank in ranks:
        assert rank.buffers.keys() == whole.buffers.keys()
        for name, buffer in whole.buffers.items():
            assert close(rank.buffers[name], buffer), name
            assert torch.equal(rank.buffers[name], ranks[0].buffers[name]), "ranks must agree to the bit"
    return list(ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [(8,), (3, 5), (1, 6, 2), (4, 1, 2, 3)], ids=str)
def test_ranks_with_a_divided_batch_equal_one_process_with_the_whole(run_ranks, kind, shares):
    check(run_ranks, Setting(kind, shares))


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ranks without samples take part": [{"shares": shares} for shares in ((0, 5), (4, 0, 3), (0, 2, 0, 1))],
    "one sample on each rank is a batch": [{"kind": "1d, features", "shares": (1, 1)}],
    "momentum keeps its meaning": [{"momentum": None}, {"momentum": 1.0}],
    "affine and tracked keep their meaning": [{"affine": False}, {"tracked": False}],
}


@pytest.mark.parametrize("what", SETTINGS)
def test_in_every_setting_ranks_equal_one_process(run_ranks, what):
    for change in SETTINGS[what]:
        check(run_ranks, Setting(**change))


def test_a_channels_last_input_gives_channels_last_outputs_and_gradients(run_ranks):
    for rank in check(run_ranks, Setting(channels_last=True)):
        assert rank.output.is_contiguous(memory_format=torch.channels_last)
        assert rank.to_input.is_contiguous(memory_format=torch.channels_last)


def test_a_mean_of_a_million_costs_no_digits_in_float64(run_ranks):
    """From sums of squares the variance, 9 next to 10^12, would be wrong in the fourth digit."""
    setting = Setting(offset=1e6)
    batch, _ = make_batch(setting)
    expected = batch.var(dim=(0, 2, 3), correction=1)
    for rank in check(run_ranks, setting, 1e-8):
        kept = (rank.buffers["running_var"] - 0.81) / 0.19  # after two steps of momentum 0.1
        assert torch.allclose(kept, expected, rtol=1e-9)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_moments_have_all_digits_of_float32_in_every_memory_format(memory_format):
    """torch's kernel sums channels-last values in float32, and its mean is wrong in the sixth digit."""
    torch.manual_seed(0)
    batch = (torch.randn(32, 4, 32, 32) + 1000).contiguous(memory_format=memory_format)
    count, mean, deviations = moments(batch)
    assert count.tolist() == [32 * 32 * 32] * 4
    assert torch.allclose(mean, batch.double().mean((0, 2, 3)), rtol=1e-7)
    assert torch.allclose(deviations / count, batch.double().var((0, 2, 3), correction=0), rtol=2e-7)


TOLERANCES = [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]


@pytest.mark.parametrize("dtype, tolerance", TOLERANCES, ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["", "float32 layers"])
def test_narrower_types_compute_in_float32(run_ranks, dtype, tolerance, mixed):
    """Under autocast, layers in float32 get narrow inputs."""
    check(run_ranks, Setting(dtype=dtype, mixed=mixed), tolerance)


def run_absent(rank: int, world_size: int) -> Any:
    """Pass something through on the last rank that must not count."""
    setting = Setting()
    layer = batchnorm.to_sync(make_layer(setting))
    batch, coefficients = make_batch(setting)
    if rank == world_size - 1:
        layer.absent = True
        batch, coefficients = torch.full_like(batch, 1e9), torch.full_like(batch, float("nan"))
    return step(layer, batch, coefficients)


def test_what_an_absent_rank_passes_through_does_not_count(run_ranks):
    batch, coefficients = make_batch(Setting())
    whole = step(make_layer(Setting()), batch, coefficients)
    present, absent = run_ranks(2, run_absent)
    assert torch.allclose(present.to_input, whole.to_input, rtol=1e-10, atol=1e-10)
    for name, buffer in whole.buffers.items():
        assert torch.allclose(absent.buffers[name], buffer, rtol=1e-10)
    for gradient in (absent.to_input, absent.to_weight, absent.to_bias):
        assert not gradient.any()
    assert torch.isfinite(absent.output).all()


def refuse(rank: int, world_size: int, shapes: list[tuple[int, int]]) -> tuple[str, str]:
    layer = batchnorm.to_sync(nn.BatchNorm1d(2))
    return error_of(lambda: layer(torch.ones(shapes[rank])))


def test_one_value_a_channel_over_all_ranks_is_refused_on_all_of_them(run_ranks):
    for kind, said in run_ranks(2, refuse, [(1, 2), (0, 2)]):
        assert kind == "ValueError" and "more than 1 value per channel on all ranks" in said


def test_a_wrong_number_of_channels_is_refused_before_anything_is_sent(run_ranks):
    """Each rank finds its own input wrong: messages of two sizes in one collective would abort a rank."""
    for kind, said in run_ranks(2, refuse, [(4, 3), (4, 4)]):
        assert kind == "ValueError" and "expected 2 channels" in said


def normalise_positions(rank: int, world_size: int) -> Any:
    layer = batchnorm.to_sync(nn.BatchNorm1d(2, momentum=1.0)).double()
    own = torch.randn(3, 2, 4 + rank, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    layer(own)
    return own.transpose(0, 1).reshape(2, -1), layer.running_mean, layer.running_var


def test_ranks_may_have_different_numbers_of_positions(run_ranks):
    answers = run_ranks(2, normalise_positions)
    values = torch.cat([own for own, _, _ in answers], dim=1)
    for _, mean, variance in answers:
        assert torch.allclose(mean, values.mean(1), rtol=1e-12)
        assert torch.allclose(variance, values.var(1), rtol=1e-12)


def run_compiled(rank: int, world_size: int, setting: Setting, when: str) -> Outcome:
    """Compile a layer after it was converted, or before, as a plain layer."""
    layer = make_layer(setting)
    batch, coefficients = make_batch(setting)
    if when == "before":
        compiled = torch.compile(layer.eval(), backend="eager")
        compiled(batch)
        batchnorm.to_sync(compiled.train())
    else:
        compiled = torch.compile(batchnorm.to_sync(layer), backend="eager")
    own = share_of(setting, rank)
    outcome = step(compiled, batch[own], coefficients[own])
    return outcome._replace(
        buffers={name.removeprefix("_orig_mod."): b for name, b in outcome.buffers.items()}
    )


@pytest.mark.long
def test_a_compiled_layer_trains_over_all_ranks(fresh_ranks):
    """In ranks of its own: the first torch.compile of a process imports torch's compilers, which takes half a
    minute on a busy machine. In ranks that had run hundreds of cases, with gloo's threads of each, it was
    seen to end in SIGSEGV once in four sessions; in 150 cases in fresh ranks it was not."""
    for when in ("before", "after"):
        check(partial(fresh_ranks, timeout=100.0), Setting(), case=run_compiled, arguments=(when,))


def run_beside(rank: int, world_size: int, setting: Setting, theirs: Any, device: str) -> list[Outcome]:
    """Run our layer and another on one device."""
    batch, coefficients = (one.to(device) for one in make_batch(setting))
    own = share_of(setting, rank)
    layers = [convert(make_layer(setting)).to(device) for convert in (batchnorm.to_sync, theirs)]
    assert type(layers[0]) is SyncBatchNorm
    return [on_the_cpu(step(layer, batch[own], coefficients[own])) for layer in layers]


def on_the_cpu(outcome: Outcome) -> Outcome:
    *tensors, buffers = outcome
    moved = [None if tensor is None else tensor.cpu() for tensor in tensors]
    return Outcome(*moved, {name: buffer.cpu() for name, buffer in buffers.items()})


NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TORCHS = nn.SyncBatchNorm.convert_sync_batchnorm


@pytest.mark.parametrize(
    "theirs, device",  # ours shows that this test works where the other is skipped
    [(batchnorm.to_sync, "cpu"), pytest.param(TORCHS, "cuda", marks=NEEDS_A_GPU)],
    ids=["ours", "torch's"],
)
@pytest.mark.parametrize(
    "change", [{}, {"shares": (0, 5)}, {"momentum": None}, {"affine": False}, {"tracked": False}], ids=str
)
def test_on_a_gpu_it_does_the_same_as_torchs_own(run_ranks, theirs, device, change):
    """Two ranks share one GPU, which gloo allows and NCCL does not."""
    for ours, other in run_ranks(2, run_beside, Setting(**change), theirs, device, timeout=90):
        for one, two in zip(ours[:-1], other[:-1], strict=True):
            assert (one is None) == (two is None)
            assert one is None or torch.allclose(one, two, rtol=1e-10, atol=1e-10)
        assert ours.buffers.keys() == other.buffers.keys()
        for name, buffer in ours.buffers.items():
            assert torch.allclose(buffer, other.buffers[name], rtol=1e-10), name


# ---- the gradient itself ----------------------------------------------------------------------------------


def synchronised(rank: int, channels: int, dtype: torch.dtype = torch.float64) -> Any:
    """Return a function of input, weight and bias: the layer on rank 0, for which the others are absent."""
    layer = batchnorm.to_sync(nn.BatchNorm2d(channels, track_running_stats=False)).to(dtype)
    layer.absent = rank > 0

    def normalise(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(layer, {"weight": w, "bias": b}, x)
        if not rank:
            return output
        # Pass gradcheck here too: a rank that stopped early would leave rank 0 waiting.
        return 0 * output + plain(x, w, b)

    return normalise


def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(x, None, None, w, b, training=True, eps=1e-5)


def check_gradient(rank: int, world_size: int) -> bool:
    torch.manual_seed(3)
    shapes = (4, 3, 2, 1), (3,), (3,)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return torch.autograd.gradcheck(synchronised(rank, 3), tensors, raise_exception=False)


def test_the_gradient_passes_gradcheck(run_ranks):
    assert run_ranks(2, check_gradient) == [True, True]


STRIDES: dict[str, Any] = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "expanded": lambda x: x[:, :, :1].expand_as(x),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


def normalise_strided(
    rank: int, world_size: int, of_input: str, of_gradient: str, dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """Return output and gradients of our layer and of plain BatchNorm."""
    torch.manual_seed(6)
    both = of_input, of_gradient
    input, gradient = (STRIDES[name](torch.randn(3, 4, 5, 6, dtype=dtype)) for name in both)
    weight, bias = torch.randn(2, 4, dtype=dtype).unbind()
    answers = []
    for normalise in (synchronised(rank, 4, dtype), plain):
        leaves = [tensor.detach().requires_grad_() for tensor in (input, weight, bias)]
        output = normalise(*leaves)
        output.backward(gradient)
        answers.append([output.detach(), *(leaf.grad for leaf in leaves)])
    return answers


@pytest.mark.parametrize("of_input", STRIDES)
@pytest.mark.parametrize("of_gradient", STRIDES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_strides_of_the_input_and_of_the_gradient_do_not_matter(
    run_ranks, of_input, of_gradient, dtype, tolerance
):
    answers = run_ranks(2, normalise_strided, of_input, of_gradient, dtype)[0]
    for ours, theirs in zip(*answers, strict=True):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def loss_of_all_ranks(rank: int, world_size: int, moved: tuple[int, int, float] | None) -> Any:
    """Return the sum of all ranks' losses, not linear in the output; one input value is moved on one rank."""
    torch.manual_seed(10 + rank)
    input = torch.randn(2 + rank, 2, 3, dtype=torch.float64)
    if moved is not None and moved[0] == rank:
        input.view(-1)[moved[1]] += moved[2]
    input.requires_grad_()
    torch.manual_seed(4)
    layer = batchnorm.to_sync(nn.BatchNorm1d(2)).double()
    nn.init.uniform_(layer.weight)
    loss = (layer(input) ** 3).sum() + layer(input).sin().sum()
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return total.item(), input.grad


def test_the_gradient_is_that_of_the_sum_of_all_ranks_losses(run_ranks):
    analytic = run_ranks(2, loss_of_all_ranks, None)
    for rank in range(2):
        for index in range(0, 12, 5):
            up, down = (run_ranks(2, loss_of_all_ranks, (rank, index, by))[0][0] for by in (1e-6, -1e-6))
            assert (up - down) / 2e-6 == pytest.approx(analytic[rank][1].view(-1)[index].item(), abs=1e-7)


def derive_twice(rank: int, world_size: int) -> tuple[str, str]:
    input = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    output = batchnorm.to_sync(nn.BatchNorm1d(2)).double()(input)
    (first,) = torch.autograd.grad(output.pow(2).sum(), input, create_graph=True)
    return error_of(first.sum().backward)


def test_a_second_derivative_is_refused_rather_than_wrong(run_ranks):
    for kind, said in run_ranks(2, derive_twice):
        assert kind == "RuntimeError" and "once_differentiable" in said


# ---- a single process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracked", [True, False])
def test_alone_and_in_evaluation_it_is_plain_batchnorm_to_the_bit(kind, momentum, tracked):
    setting = Setting(kind, momentum=momentum, tracked=tracked, dtype=torch.float32)
    plain, ours = make_layer(setting), batchnorm.to_sync(make_layer(setting))
    batch, coefficients = make_batch(setting)
    for one, other in zip(step(plain, batch, coefficients), step(ours, batch, coefficients), strict=True):
        if isinstance(one, dict):
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        else:
            assert torch.equal(one, other)
    assert torch.equal(plain.eval()(batch), ours.eval()(batch))


def test_inputs_of_another_dimension_are_refused_as_by_the_plain_layer():
    layer = batchnorm.to_sync(nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="at least 2D"):
        SyncBatchNorm(3)(torch.zeros(3))


def test_an_average_without_a_counter_does_not_change_as_in_torch():
    plain, ours = (kind(3, momentum=None) for kind in (nn.BatchNorm1d, SyncBatchNorm))
    for layer in (plain, ours):
        layer.num_batches_tracked = None
    plain(torch.randn(7, 3))
    update_running(ours, torch.ones(3), torch.ones(3), 7.0)
    assert torch.equal(ours.running_mean, plain.running_mean)


def test_running_statistics_follow_torchs_formula():
    plain, ours = nn.BatchNorm1d(3).double(), SyncBatchNorm(3).double()
    batch = torch.randn(7, 3, dtype=torch.float64)
    plain(batch)
    update_running(ours, batch.mean(0), batch.var(0, correction=0), 7.0)
    for name, buffer in plain.named_buffers():
        assert torch.allclose(dict(ours.named_buffers())[name], buffer, rtol=1e-12)


# ---- Running statistics over all ranks in a loop of the user's own, against one process with all samples


STEPS, SAMPLES = 5, 8


def batches() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(STEPS, SAMPLES, 3, 4, generator=generator, dtype=torch.float64) * 3 + 100


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class Shared(nn.Module):
    """One layer under two names, and one that is used on some ranks and in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(3)
        self.sometimes = nn.BatchNorm1d(3, momentum=0.5)

    def forward(self, x: torch.Tensor, often: bool = True) -> torch.Tensor:
        if often:
            self.sometimes(x)
        return self.second(self.first(x)[:, :, :2] + x[:, :, :2])


def run_shared(rank: int, world_size: int, sizes: list[int]) -> Any:
    model = Shared().double()
    statistics = batchnorm.RunningStatistics(model)
    for step, batch in enumerate(batches()):
        own = batch.split(sizes)[rank]
        if len(own):
            model(own, often=(step + rank) % 2 == 0)
        statistics.end_step()
    return list(statistics.layers), buffers(model)


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [3, 5], [0, 6, 2]], ids=str)
def test_a_layer_that_only_some_ranks_use_in_a_step_has_their_samples(run_ranks: Any, sizes: Any) -> None:
    layer = nn.BatchNorm1d(3, momentum=0.5).double()
    for step, batch in enumerate(batches()):
        parts = [part for rank, part in enumerate(batch.split(sizes)) if (step + rank) % 2 == 0]
        if sum(map(len, parts)):
            layer(torch.cat(parts))
    answers = run_ranks(len(sizes), run_shared, sizes)
    for paths, found in answers:
        assert paths == ["first", "sometimes"]
        for name, expected in buffers(layer).items():
            assert torch.allclose(found[f"sometimes.{name}"], expected, rtol=1e-12), name
        assert all(torch.equal(found[name], other) for name, other in answers[0][1].items())
        assert found["first.num_batches_tracked"].item() == 2 * STEPS


def run_switched(rank: int, world_size: int) -> Any:
    """Freeze the layer from the third step on, in which it normalises by its statistics."""
    layer = nn.BatchNorm1d(3).double()
    statistics, outputs = batchnorm.RunningStatistics(layer), []
    for step, batch in enumerate(batches()):
        layer.train(step < 2)
        output = layer(batch.chunk(world_size)[rank])
        statistics.end_step()
        if step >= 2:
            outputs.append(output.detach())
    return outputs, buffers(layer)


def test_a_layer_that_is_frozen_later_normalises_by_all_ranks_samples(run_ranks: Any) -> None:
    layer, expected = nn.BatchNorm1d(3).double(), []
    for step, batch in enumerate(batches()):
        layer.train(step < 2)
        expected.append(layer(batch))
    answers = run_ranks(2, run_switched)
    for step in range(3):
        found = torch.cat([outputs[step] for outputs, _ in answers])
        assert torch.allclose(found, expected[step + 2], rtol=1e-10)
    for name, buffer in layer.named_buffers():
        assert torch.allclose(answers[1][1][name], buffer, rtol=1e-12)


def run_narrow(rank: int, world_size: int, dtype: torch.dtype) -> Any:
    layer = nn.BatchNorm1d(3)
    statistics = batchnorm.RunningStatistics(layer)
    for batch in batches():
        layer(batch.chunk(world_size)[rank].to(dtype))
        statistics.end_step()
    return buffers(layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_inputs_as_under_autocast_keep_statistics_in_float32(run_ranks: Any, dtype: Any) -> None:
    layer = nn.BatchNorm1d(3)
    for batch in batches():
        layer(batch.to(dtype))
    for found in run_ranks(2, run_narrow, dtype):
        assert torch.allclose(found["running_mean"], layer.running_mean, rtol=1e-5)
        assert torch.allclose(found["running_var"], layer.running_var, rtol=1e-3)


def run_refused(rank: int, world_size: int) -> tuple[str, str]:
    layer = nn.BatchNorm1d(3)
    batchnorm.RunningStatistics(layer)
    return error_of(lambda: layer(torch.zeros(2, 4 + rank)))


def test_an_input_that_does_not_fit_is_refused_by_the_layer_itself(run_ranks: Any) -> None:
    for kind, said in run_ranks(2, run_refused):
        assert kind in ("ValueError", "RuntimeError") and "should contain" in said


def test_in_one_process_nothing_is_different_to_the_bit() -> None:
    plain, ours = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    statistics = batchnorm.RunningStatistics(ours)
    for batch in batches():
        plain(batch)
        ours(batch)
        statistics.end_step()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(ours.named_buffers())[name]), name


def test_synchronised_layers_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), batchnorm.SyncBatchNorm(2), nn.SyncBatchNorm(2))
    assert list(batchnorm.RunningStatistics(model).layers) == ["0"]
