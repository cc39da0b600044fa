"""One digest for the same contents, in any format and layout, as docs/digest.md defines it."""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

import ckpttool
from ckpttool.core.files import threads
from ckpttool.core.files.digest import Pieces, digest, tensor_digests
from ckpttool.core.files.threads import NAME
from ckpttool.core.tensors import values as tensor_values
from tests.support.comparing import opened
from tests.support.crafting import dict_of, storage, tensor, torch_zip
from tests.support.running import ROOT

module = import_module("ckpttool.core.files.digest")
PAGE = (ROOT / "docs" / "digest.md").read_text()
(SNIPPET,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def defined(state: dict[str, torch.Tensor], piece: int = 2**24) -> str:
    """The digest as the page computes it, with pieces of another size if need be."""
    assert SNIPPET.count("2**24") == 2
    names: dict[str, Any] = {}
    exec(SNIPPET.replace("2**24", str(piece)), names)
    found = names["digest"](state)
    assert isinstance(found, str)
    return found


def of(value: Any, folder: Path, **given: Any) -> str:
    torch.save(value, folder / "in.pt", **given)
    return digest(ckpttool.open(folder / "in.pt").state().tensors)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.uint64, torch.uint32, torch.uint16, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
phases = torch.complex(base, -base)
STATES: dict[str, dict[str, torch.Tensor]] = {
    "every type": {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
    "shapes": {"a": base, "scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "one": torch.ones(1, 1, 1)},
    "views": {"t": base.t(), "row": base[1], "every other": base[:, ::2], "wide": base[0].expand(3, 6)},
    "lazy": {"conj": phases.conj(), "mh": phases.mH, "neg": (phases + 1).conj().imag},
    "special values": {"f": torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324])},
    "names": dict.fromkeys(["", "é", "z", "Z", "a.b", "a b", "\U0001f511", "10:a"], base),
    "names that are no Unicode": {"\udcff": base, "\ud800a": base + 1, "\U0001f511": base + 2},
    "nothing": {},
    "parameters": {"w": torch.nn.Parameter(base), "v": base.clone().requires_grad_()},
    "channels last": {"w": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)},
}  # fmt: skip


@pytest.mark.parametrize("what", STATES)
def test_the_digest_is_what_the_page_says(what: str, tmp_path: Path) -> None:
    assert of(STATES[what], tmp_path) == defined(STATES[what])


@pytest.mark.parametrize("piece", [1, 7, 64, 95, 96, 97, 1000])
@pytest.mark.parametrize("chunk", [16, tensor_values.CHUNK])
def test_pieces_are_as_the_page_says(piece: int, chunk: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    state = {**STATES["shapes"], **STATES["views"], **STATES["lazy"]}
    assert of(state, tmp_path) == defined(state, piece)


def test_a_tensor_of_several_pieces_has_the_digest_of_the_page(tmp_path: Path) -> None:
    long = torch.arange(9_000_001, dtype=torch.int32)
    turned = long[:9_000_000].view(3000, 3000).t()
    state = {"a": torch.ones(3), "long": long, "turned": turned, "z": long[5:7]}
    assert of(state, tmp_path) == defined(state)


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("read", [1, 100, 1 << 20])
def test_threads_do_not_change_the_digest(workers: int, read: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(threads, "cores", lambda most: workers)
    monkeypatch.setattr(threads, "BUFFER", read)
    monkeypatch.setattr(threads, "MANY", 3)
    monkeypatch.setattr(threads, "GROUP", 200)
    monkeypatch.setattr(module, "PIECE", 50)
    state = {f"{i}": torch.arange(i).to(DTYPES[i % len(DTYPES)]) for i in range(40)} | {"t": base.t()}
    assert of(state, tmp_path) == defined(state, 50)


def test_progress_adds_up_to_the_bytes_hashed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    state = {**STATES["shapes"], **STATES["views"]}
    moved: list[int] = []
    digest(opened(state, tmp_path).state().tensors, moved.append)
    assert sum(moved) == sum(each.nbytes for each in state.values())


# The same for the same contents.


CONTENTS = {"w": base, "n": torch.tensor(7), "b": torch.tensor([True, False]), "tied": base}
CONTENTS |= {"h": torch.ones(3, dtype=torch.bfloat16)}


SAVED: dict[str, dict[str, Any]] = {
    "as it is": CONTENTS,
    "in another order": dict(reversed(CONTENTS.items())),
    "inside a training checkpoint": {"epoch": 3, "model": CONTENTS, "optimizer": {}},
    "as views": {name: torch.stack([each, each])[1] for name, each in CONTENTS.items()},
    "turned": {**CONTENTS, "w": base.t().contiguous().t()},
    "as parameters": {**CONTENTS, "w": torch.nn.Parameter(base)},
    "ties untied": {**CONTENTS, "tied": base.clone()},
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("way", SAVED)
def test_the_digest_does_not_depend_on_how_torch_saved(way: str, zipped: bool, tmp_path: Path) -> None:
    assert of(SAVED[way], tmp_path, _use_new_zipfile_serialization=zipped) == defined(CONTENTS)


def test_big_endian_values_are_the_same_values(tmp_path: Path) -> None:
    numbers = np.array([1.5, -2.0, 3e10, np.nan])
    pairs = storage(2, kind="ComplexFloatStorage", key="1")
    body = dict_of({"w": tensor(storage()), "z": tensor(pairs, (2,))})
    for order, sign in (("little", "<"), ("big", ">")):
        raw = {"0": numbers.astype(f"{sign}f4").tobytes(), "1": np.array([1 + 2j, 3j], f"{sign}c8").tobytes()}
        torch_zip(tmp_path / order, body, raw, byteorder=order)
    little, big = (digest(ckpttool.open(tmp_path / order).state().tensors) for order in ("little", "big"))
    assert little == big


# Another one for other contents.


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "a name": lambda s: s.update(v=s.pop("w")),
    "a tensor more": lambda s: s.update(x=torch.ones(1)),
    "an empty tensor more": lambda s: s.update(x=torch.empty(0)),
    "a tensor less": lambda s: s.pop("n"),
    "a shape": lambda s: s.update(w=s["w"].reshape(6, 4)),
    "a shape of ones": lambda s: s.update(w=s["w"][None]),
    "a scalar to a row of one": lambda s: s.update(n=s["n"].reshape(1)),
    "a type": lambda s: s.update(n=s["n"].to(torch.int32)),
    "a type of the same bits": lambda s: s.update(w=s["w"].view(torch.int32)),
    "the last bit of the last value": lambda s: s["w"].view(torch.int32)[3, 5].bitwise_xor_(1),
    "the sign of zero": lambda s: s["w"][0, 0].mul_(-1),
    "two values exchanged": lambda s: s.update(w=s["w"].flip(0)),
    "two tensors exchanged": lambda s: s.update(w=s["m"], m=s["w"]),
    "the bits of a NaN": lambda s: s["nan"].view(torch.int32).add_(1),
    "the sign of a NaN": lambda s: s["nan"].neg_(),
    "a truth": lambda s: s["b"].logical_not_(),
    "an empty shape": lambda s: s.update(e=torch.empty(3, 0)),
    "an empty type": lambda s: s.update(e=s["e"].int()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_contents_changes_the_digest(change: str, tmp_path: Path) -> None:
    def state() -> dict[str, torch.Tensor]:
        made = {"w": base.clone(), "m": base + 1, "n": torch.tensor(7), "b": torch.tensor([True, False])}
        return {**made, "nan": torch.tensor([float("nan")]), "e": torch.empty(0, 3)}

    changed = state()
    CHANGES[change](changed)
    assert of(changed, tmp_path) != of(state(), tmp_path)
    assert of(changed, tmp_path) == defined(changed)


CONTENT = st.tuples(st.sampled_from(DTYPES), st.integers(0, 20))


@given(st.dictionaries(st.text(max_size=4), CONTENT, max_size=5), st.integers(1, 50))
def test_any_state_has_the_digest_of_the_page(wanted: dict[str, Any], piece: int) -> None:
    state = {name: torch.arange(count).to(dtype) for name, (dtype, count) in wanted.items()}
    with tempfile.TemporaryDirectory() as folder, MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        if state:
            assert of(state, Path(folder)) == defined(state, piece)


def test_digests_of_tensors_come_in_the_order_of_names_as_bytes(tmp_path: Path) -> None:
    state = {name: torch.full((2,), i) for i, name in enumerate(["b", "a", "Z", "é", "10", "9"])}
    found = [name for name, _ in tensor_digests(opened(state, tmp_path).state().tensors)]
    assert found == sorted(state, key=str.encode)


def test_a_reader_that_stops_early_ends_the_work(tmp_path: Path) -> None:
    checkpoint = opened({f"{i:04}": torch.ones(1 << 16) for i in range(40)}, tmp_path)
    digests = tensor_digests(checkpoint.state().tensors)
    assert next(digests)[0] == "0000"
    digests.close()  # type: ignore[attr-defined]
    assert not [each for each in threading.enumerate() if each.name == NAME]


def test_bytes_that_pass_by_give_the_digest_once_each_piece_came_in_order(
    monkeypatch: MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE", 8)
    values = torch.arange(20, dtype=torch.uint8)
    raw, pieces = memoryview(values.numpy().tobytes()), Pieces(20)
    for start, end in ((8, 16), (18, 20), (4, 8), (16, 18), (0, 4)):
        pieces.see(start, raw[start:end])
    assert [*pieces.missing()] == [(0, 8), (16, 4)]
    pieces.see(4, raw[4:20])  # goes on with the first piece, and leaves a whole one
    assert [*pieces.missing()] == []
    assert pieces.digest() == digest_of_values(values, 8)


def test_a_piece_that_two_threads_read_half_is_missing(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 8)
    raw, pieces = bytes(range(8)), Pieces(8)
    pieces.see(0, raw[:4])
    other = threading.Thread(target=pieces.see, args=(4, raw[4:]))
    other.start()
    other.join()
    assert [*pieces.missing()] == [(0, 8)]


def test_nothing_has_the_digest_of_no_pieces() -> None:
    assert [*Pieces(0).missing()] == []
    assert Pieces(0).digest() == digest_of_values(torch.zeros(0, dtype=torch.uint8), 8)


def digest_of_values(values: torch.Tensor, piece: int) -> str:
    """Return the digest of a tensor, as point 2 of the page has it."""
    raw = values.numpy().tobytes()
    parts = [hashlib.sha256(raw[at : at + piece]).digest() for at in range(0, len(raw), piece)]
    return hashlib.sha256(b"".join(parts)).hexdigest()
