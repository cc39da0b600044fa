"""Sets, bytes and objects with keyword arguments: the same in every protocol, format and command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.analysis.compare import diff
from ckpttool.analysis.verify import verify
from tests.support.comparing import compared
from tests.support.running import Ran

PROTOCOLS = [2, 3, 4, 5]
PLAIN: dict[str, Any] = {
    "w": torch.ones(1),
    "set": {1, "a", (2, b"x")},
    "frozenset": frozenset("xyz"),
    "bytes": [b"\xff\0", b"", {b"key": 1}],
    "bytearray": [bytearray(b"\xfe"), bytearray()],
}


class Keywords:
    def __new__(cls, **given: Any) -> Keywords:
        made = object.__new__(cls)
        made.__dict__.update(given)
        return made

    def __getnewargs_ex__(self) -> Any:
        return (), {"t": torch.ones(2)}


def tensors_inside() -> dict[str, Any]:
    return {
        "w": torch.zeros(1),
        "s": {torch.full((n,), float(n)) for n in range(1, 20)},
        "f": frozenset(torch.full((n,), -float(n)) for n in range(1, 20)),
        "k": Keywords(),
    }


def there_and_back(value: Any, folder: Path, protocol: int) -> tuple[Path, list[Path]]:
    """Save a file, and convert it to `.pt`, to safetensors with everything, and that to `.pt` again."""
    source = folder / "in.pt"
    torch.save(value, source, pickle_protocol=protocol)
    outputs = [folder / "out.pt", folder / "flat.safetensors", folder / "back.pt"]
    for start, end in zip([source, source, outputs[1]], outputs, strict=True):
        ckpttool.save(ckpttool.open(start), end, full=end.suffix != ".pt", verify=True)
    return source, outputs


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [PLAIN, tensors_inside()], ids=["plain", "tensors inside"])
def test_outputs_hold_the_same_values(value: Any, protocol: int, tmp_path: Path) -> None:
    source, outputs = there_and_back(value, tmp_path, protocol)
    for output in outputs:
        assert diff(ckpttool.open(source), ckpttool.open(output)).same
        assert verify(ckpttool.open(source), against=ckpttool.open(output)).ok


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_torch_loads_the_outputs(protocol: int, tmp_path: Path) -> None:
    _, (out, _, back) = there_and_back(PLAIN, tmp_path, protocol)
    for path in (out, back):
        again = torch.load(path, weights_only=False)
        assert again == PLAIN
        assert [type(value) for value in again.values()] == [type(value) for value in PLAIN.values()]


@pytest.mark.parametrize("protocol", [4, 5])
def test_tensors_in_sets_and_in_keyword_arguments_are_loaded_again(protocol: int, tmp_path: Path) -> None:
    _, (out, _, back) = there_and_back(tensors_inside(), tmp_path, protocol)
    for path in (out, back):
        again = torch.load(path, weights_only=False)
        assert sorted(len(tensor) for tensor in again["s"]) == list(range(1, 20))
        assert sorted(tensor[0].item() for tensor in again["f"]) == list(range(-19, 0))
        assert again["k"].t.tolist() == [1, 1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sets_and_byte_arrays_load_as_weights_only(protocol: int, tmp_path: Path) -> None:
    """torch's weights_only reader takes sets and byte arrays as calls alone, not as opcodes."""
    value = {"w": 1, "s": {1, 2, "a"}, "b": bytearray() if protocol > 2 else bytearray(b"ab")}
    _, (out, _, back) = there_and_back(value, tmp_path, protocol)
    assert torch.load(out, weights_only=True) == torch.load(back, weights_only=True) == value


@pytest.mark.parametrize("protocol", [2, 3, 5])
def test_files_of_two_protocols_compare_as_the_same(protocol: int, tmp_path: Path) -> None:
    for name, each in (("a.pt", 4), ("b.pt", protocol)):
        torch.save(PLAIN, tmp_path / name, pickle_protocol=each)
    assert diff(ckpttool.open(tmp_path / "a.pt"), ckpttool.open(tmp_path / "b.pt")).same


def test_sets_compare_equal_in_any_order(tmp_path: Path) -> None:
    numbers = [2**20 * i for i in range(9)]  # these collide, so that a set keeps their order of adding
    a, b = dict.fromkeys(numbers), dict.fromkeys(reversed(numbers))
    one, other = {"w": torch.ones(1), "s": set(a)}, {"w": torch.ones(1), "s": set(b)}
    assert list(one["s"]) != list(other["s"])  # type: ignore[call-overload]
    assert compared(tmp_path, one, other).same


@pytest.mark.parametrize(
    ("a", "b", "changes"),
    [
        ({1, 2}, {1, 3}, [("s.1", "2", "3")]),
        ({1}, {True}, [("s.0", "1", "True")]),
        ({0.0}, {-0.0}, [("s.0", "0.0", "-0.0")]),
    ],
)
def test_diff_names_elements_of_sets_that_differ(a: Any, b: Any, changes: Any, tmp_path: Path) -> None:
    found = compared(tmp_path, {"w": torch.ones(1), "s": a}, {"w": torch.ones(1), "s": b})
    assert [(each.name, each.a, each.b) for each in found.changed] == changes


def test_diff_names_an_additional_element(tmp_path: Path) -> None:
    found = compared(tmp_path, {"w": torch.ones(1), "s": {1, 2}}, {"w": torch.ones(1), "s": {1, 2, 3}})
    assert (found.only_a, found.only_b, found.changed) == ((), ("s.2",), ())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_inspect_shows_plain_type_names(protocol: int, cli: Callable[..., Ran], tmp_path: Path) -> None:
    torch.save(PLAIN, tmp_path / "in.pt", pickle_protocol=protocol)
    page = cli("inspect", tmp_path / "in.pt").out
    assert "builtin" not in page and "_codecs" not in page
    assert "set" in page and "frozenset" in page


@pytest.mark.parametrize("protocol", [2, 4])
def test_dcp_holds_plain_python_values(protocol: int, tmp_path: Path) -> None:
    value = {**PLAIN, "inside": [{torch.ones(2)}]}
    torch.save(value, tmp_path / "in.pt", pickle_protocol=protocol)
    ckpttool.save(ckpttool.open(tmp_path / "in.pt"), tmp_path / "dcp", to="dcp")
    assert diff(ckpttool.open(tmp_path / "in.pt"), ckpttool.open(tmp_path / "dcp")).same
    assert not any(b"inert_pickle" in file.read_bytes() for file in (tmp_path / "dcp").iterdir())
