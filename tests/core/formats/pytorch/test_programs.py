"""TorchScript archives and exported programs: the state that torch loads, or a message says why not."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.core.tensors.values import live_tensors
from ckpttool.errors import CkptToolError, Unsupported
from tests.support.comparing import refused, values
from tests.support.running import Cli

# ---- TorchScript archives: their state equals what torch.jit.load returns, or a message says why there is
# none.


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


# ---- Exported programs (.pt2): the state dict of what torch.export and AOTInductor write; the code is named


class Net(torch.nn.Module):
    """A model with a tie, a view, half a type, and constants that are not in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.tied = self.fc.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("rows", torch.arange(6.0).half().reshape(2, 3).t()[1:])
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x)) + x @ self.tied + self.rows.sum() + self.hidden.sum()


def exported() -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(Net().eval(), (torch.ones(2, 4),))


@pytest.fixture(scope="module")
def program() -> Any:
    return exported()


@pytest.fixture(scope="module")
def package(program: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "m.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path)
    return path


def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(path: Path, contents: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, raw in contents.items():
            archive.writestr(name, raw)
    return path


def saved(value: object) -> bytes:
    torch.save(value, raw := io.BytesIO())
    return raw.getvalue()


def test_the_state_dict_is_the_programs_own(package: Path, program: Any, tmp_path: Path, cli: Cli) -> None:
    found = ckpttool.open(package)
    state = found.state()
    assert (found.format, state.where) == ("torch-export", "")
    assert [*state.tensors] == [*program.state_dict]
    for name, tensor in program.state_dict.items():
        mine = state.tensors[name]
        assert (mine.shape, mine.stride) == (tuple(tensor.shape), tensor.stride())
        assert mine.numpy().tobytes() == values(tensor)
    assert state.tensors["tied"].storage is state.tensors["fc.weight"].storage
    assert found.unread == ("constant 'hidden'", "code", "sample inputs")
    assert cli("convert", package, tmp_path / "out.pt", "--verify").code == 0
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert Net().load_state_dict(loaded)
    assert loaded["tied"].data_ptr() == loaded["fc.weight"].data_ptr()


def test_a_compressed_package_is_read(package: Path, tmp_path: Path, cli: Cli) -> None:
    path = zipped(tmp_path / "c.pt2", records(package), zipfile.ZIP_DEFLATED)
    assert cli("diff", package, path).code == 0


def test_several_models_are_named(package: Path, tmp_path: Path) -> None:
    contents = records(package)
    config = contents["m/data/weights/model_weights_config.json"]
    path = zipped(tmp_path / "two.pt2", contents | {"m/data/weights/other_weights_config.json": config})
    found = ckpttool.open(path)
    assert [*found.tree] == ["model", "other"] and found.other_states(("model",)) == ["other"]
    assert [*found.state("other").tensors] == [*found.tree["model"]]


def test_a_flipped_bit_is_found(package: Path, program: Any, tmp_path: Path, cli: Cli) -> None:
    raw = bytearray(package.read_bytes())
    raw[raw.index(values(program.state_dict["fc.bias"]))] ^= 1
    (tmp_path / "bad.pt2").write_bytes(raw)
    assert cli("verify", tmp_path / "bad.pt2").code == 1
    assert cli("convert", tmp_path / "bad.pt2", tmp_path / "out.pt").code == 3


STATE = {"a.weight": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int64)}
CODE = {"p/models/model.json": b"{}", "p/archive_format": b"pt2", "p/archive_version": b"0"}
OLD = {
    "serialized_exported_program.json": b"{}",
    "serialized_state_dict.pt": saved(STATE),
    "serialized_constants.pt": saved({}),
    "version": b"8.8",
}
LEGACY = CODE | {"p/data/weights/model.pt": saved(STATE), "p/data/constants/model.pt": saved({})}


@pytest.mark.parametrize("contents", [OLD, LEGACY], ids=["torch before 2.7", "torch 2.7"])
def test_a_package_of_an_older_torch_is_read(contents: dict[str, bytes], tmp_path: Path) -> None:
    found = ckpttool.open(zipped(tmp_path / "old.pt2", contents))
    assert {name: each.numpy().tobytes() for name, each in found.state().tensors.items()} == {
        name: values(each) for name, each in STATE.items()
    }
    assert {"code", "constants"} <= {*found.unread}


COMPILED = {
    "p/data/aotinductor/model/x.so": b"\x7fELF",
    "p/data/weights/weight_0": saved(torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))),
    "p/archive_format": b"pt2",
}
VIEWS = {"w": ["weight_0", [3, 4], [4, 1], 0], "part": ["weight_0", [3, 2], [1, 4], 1]}
CONFIG = "p/data/aotinductor/model/weights_config.json"


def test_the_weights_beside_a_compiled_library_are_read(tmp_path: Path) -> None:
    found = ckpttool.open(zipped(tmp_path / "c.pt2", COMPILED | {CONFIG: json.dumps(VIEWS).encode()}))
    tensors, whole = found.state().tensors, torch.arange(12.0)
    assert tensors["w"].numpy().tobytes() == values(whole)
    assert tensors["part"].numpy().tobytes() == values(whole.as_strided((3, 2), (1, 4), 1))
    assert tensors["part"].storage is tensors["w"].storage and found.unread == ("code",)


def test_weights_inside_a_compiled_library_are_named_as_such(tmp_path: Path) -> None:
    refused(zipped(tmp_path / "c.pt2", COMPILED), "whose weights are inside its library", Unsupported)


def test_a_package_without_weights_is_named(tmp_path: Path) -> None:
    refused(zipped(tmp_path / "c.pt2", CODE), "a package of torch.export without weights", Unsupported)


def meta(**changes: Any) -> dict[str, Any]:
    sizes, strides = [{"as_int": 2}, {"as_int": 2}], [{"as_int": 2}, {"as_int": 1}]
    tensor = {"dtype": 7, "sizes": sizes, "strides": strides, "storage_offset": {"as_int": 0}, "layout": 7}
    tensor |= {"requires_grad": False, "device": {"type": "cpu", "index": None}}
    return {"path_name": "weight_0", "is_param": False, "use_pickle": False, "tensor_meta": tensor | changes}


def of_tensor(described: object) -> dict[str, bytes]:
    config = {"config": {"w": described}}
    return {
        "p/data/weights/weight_0": bytes(16),
        "p/data/weights/model_weights_config.json": json.dumps(config).encode(),
    }


def config(raw: bytes) -> dict[str, bytes]:
    return {**of_tensor(meta()), "p/data/weights/model_weights_config.json": raw}


BROKEN: dict[str, tuple[dict[str, bytes], str]] = {
    "a missing record": (of_tensor(meta() | {"path_name": "x"}), "record 'data/weights/x' is missing"),
    "a record outside": (of_tensor(meta() | {"path_name": "../../../x"}), "is missing"),
    "a shape beyond the bytes": (of_tensor(meta(sizes=[{"as_int": 9}] * 2)), "reaches past its storage"),
    "a negative size": (of_tensor(meta(sizes=[{"as_int": -2}] * 2)), "malformed size, stride or offset"),
    "a size of no number": (of_tensor(meta(sizes=[{"as_expr": "s0"}] * 2)), "malformed size"),
    "an offset of 2^80": (of_tensor(meta(storage_offset={"as_int": 2**80})), "malformed size"),
    "axes too many": (of_tensor(meta(sizes=[{"as_int": 1}] * 99, strides=[{"as_int": 1}] * 99)), "99 axes"),
    "an unknown type": (of_tensor(meta(dtype=99)), "in a way that is not known"),
    "a sparse layout": (of_tensor(meta(layout=1)), "in a way that is not known"),
    "no device": (of_tensor(meta(device={"type": "../x"})), "which is no device"),
    "no description": (of_tensor([]), "in a way that is not known"),
    "no list": (config(b"{}"), "lists no tensors"),
    "no JSON": (config(b"[" * 100_000), "is not JSON"),
    "no pickle": (of_tensor(meta() | {"use_pickle": True}), "is cut short: the zip directory"),
    "a view beyond the bytes": (
        COMPILED | {CONFIG: json.dumps({"w": ["weight_0", [99], [1], 0]}).encode()},
        "reaches past its storage",
    ),
    "a view of no form": (COMPILED | {CONFIG: b'{"w": ["weight_0"]}'}, "in a way that is not known"),
    "a byte order of no kind": (of_tensor(meta()) | {"p/byteorder": b"odd"}, "has the byte order"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_package_that_breaks_a_rule_is_refused(what: str, tmp_path: Path) -> None:
    contents, said = BROKEN[what]
    refused(zipped(tmp_path / "b.pt2", contents), said)


def test_the_honest_form_of_these_is_read(tmp_path: Path) -> None:
    """Proves that the test above can fail."""
    found = ckpttool.open(zipped(tmp_path / "b.pt2", of_tensor(meta())))
    assert found.state().tensors["w"].shape == (2, 2)


def test_a_pickled_tensor_is_kept_inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
            return open, ("CANARY", "w")

    monkeypatch.chdir(tmp_path)
    contents = of_tensor(meta() | {"use_pickle": True}) | {"p/data/weights/weight_0": saved(Trap())}
    found = ckpttool.open(zipped(tmp_path / "b.pt2", contents))
    assert {str(name) for name in found.names} and not (tmp_path / "CANARY").exists()
