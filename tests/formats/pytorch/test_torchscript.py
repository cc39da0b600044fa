"""TorchScript archives: their state equals what torch.jit.load returns, or a message says why there is
none."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.errors import CkptToolError, Unsupported
from ckpttool.tensors.to_torch import live_tensors
from tests.support.comparing import values
from tests.support.saved import refused


class Inner(nn.Module):
    """A hidden buffer is part of the state in TorchScript; a plain tensor is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("shown", torch.ones(3))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.plain = torch.arange(4.0)
        self.sizes = [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.plain + self.hidden.sum() + self.sizes[0]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.inner = Inner()
        self.again = self.inner
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.layers[2].weight = self.layers[0].weight
        self.half_precision = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.inner(x)) + self.again(x)


def scripted() -> torch.jit.ScriptModule:
    return torch.jit.script(Outer())


def traced() -> torch.jit.ScriptModule:
    return torch.jit.trace(Outer(), torch.ones(1, 3))


def traced_convolutions() -> torch.jit.ScriptModule:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).eval()
    return torch.jit.trace(net, torch.ones(1, 3, 4, 4))


@pytest.mark.parametrize("make", [scripted, traced, traced_convolutions])
def test_the_state_is_what_torch_loads(make: Callable[[], torch.jit.ScriptModule], tmp_path: Path) -> None:
    make().save(str(tmp_path / "model.pt"))
    checkpoint = ckpttool.open(tmp_path / "model.pt")
    wanted = torch.jit.load(tmp_path / "model.pt").state_dict()
    found = live_tensors(checkpoint.state().tensors)
    assert checkpoint.format == "torchscript"
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape)
        assert not tensor.requires_grad and values(tensor) == values(wanted[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripted") / "model.pt"
    scripted().save(str(path))
    return path


def test_the_converted_state_is_loaded_and_what_is_left_out_is_named(model: Path, tmp_path: Path) -> None:
    for output in ("state.pt", "state.safetensors"):
        saved = ckpttool.convert(model, tmp_path / output)
        assert saved.left_out == ("code", "inner.plain", "again.plain")
    state = torch.load(tmp_path / "state.pt")
    assert state["layers.0.weight"].data_ptr() == state["layers.2.weight"].data_ptr()  # tied, as they were
    del state["inner.hidden"], state["again.hidden"]
    Outer().load_state_dict(state, strict=True)


class Packed(nn.Module):
    """A module that packs its state in its own way, as quantised layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return self.weight, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        self.weight = state[0]
        self.training = state[1]


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w.dequantize()


REFUSED: dict[str, tuple[Callable[[], torch.jit.ScriptModule], str]] = {
    "frozen": (lambda: torch.jit.freeze(scripted().eval()), "whose weights have no names: it was frozen"),
    "code alone": (lambda: torch.jit.script(nn.ReLU()), "without weights"),
    "packed": (lambda: torch.jit.script(nn.Sequential(Packed())), "Packed packs its state in its own way"),
    "quantised": (lambda: torch.jit.script(Quantised()), "'w' is a quantised tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_that_can_not_be_read_is_refused_by_what_it_is(what: str, tmp_path: Path) -> None:
    make, said = REFUSED[what]
    try:
        make().save(str(tmp_path / "m.pt"))
    except (AttributeError, RuntimeError) as error:
        if what != "quantised":
            raise
        pytest.skip(f"this torch does not quantise: {error}")
    refusal = refused(tmp_path / "m.pt", said, Unsupported)
    assert what != "frozen" or "torch.jit.load" in str(refusal.hint)


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Rewrite an archive with changed records; a record for which `change` returns None is left out."""
    out = path.with_suffix(".changed")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            raw = change(info.filename, old.read(info))
            if raw is not None:
                new.writestr(info, raw)
    return out


def test_a_class_without_code_is_damage(model: Path) -> None:
    path = rewritten(model, lambda name, raw: None if "/linear" in name and name.endswith(".py") else raw)
    refused(path, "linear")


def test_every_tensor_is_a_buffer_in_archives_that_list_no_buffers(tmp_path: Path) -> None:
    torch.jit.script(nn.BatchNorm2d(3)).save(str(tmp_path / "norm.pt"))

    def old(name: str, raw: bytes) -> bytes:
        return b"\n".join(line for line in raw.split(b"\n") if b"__buffers__" not in line)

    path = rewritten(tmp_path / "norm.pt", lambda name, raw: old(name, raw) if name.endswith(".py") else raw)
    assert list(ckpttool.open(path).state().tensors) == [*nn.BatchNorm2d(3).state_dict()]


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"class ReLU(Module):", b"  __parameters__ = [" * 1000])
def test_arbitrary_source_text_is_parsed_or_refused(text: bytes, model: Path) -> None:
    path = rewritten(model, lambda name, raw: text if name.endswith(".py") else raw)
    refused(path, error=CkptToolError)


def test_no_code_of_the_archive_runs(model: Path) -> None:
    evil = b"raise SystemExit\n"
    path = rewritten(model, lambda name, raw: evil + raw if name.endswith(".py") else raw)
    assert ckpttool.open(path).state().tensors


def test_other_kinds_of_archives_are_named(model: Path, tmp_path: Path) -> None:
    for record, said in (
        ("m/model.json", "TorchScript archive of torch before 1.4"),
        ("m/.data/extern_modules", r"torch\.package"),
    ):
        with zipfile.ZipFile(tmp_path / "f", "w") as archive:
            archive.writestr(record, "x")
        refused(tmp_path / "f", said, Unsupported)
