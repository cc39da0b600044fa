"""Exported programs (.pt2): the state dict of what torch.export and AOTInductor write; the code is named."""

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

import ckpttool
from ckpttool.errors import Unsupported
from tests.support.comparing import values
from tests.support.running import Cli
from tests.support.saved import refused


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
