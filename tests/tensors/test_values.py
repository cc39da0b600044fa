"""The values of tensors, as a stream of bytes and as numpy arrays, against torch's of the same file."""

from __future__ import annotations

import os
import tempfile
import traceback
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

import ckpttool
from ckpttool.errors import Damaged, Refused, Unreadable, Unsupported
from ckpttool.tensors import to_torch
from ckpttool.tensors import values as tensor_values
from ckpttool.tensors.ref import TensorRef
from ckpttool.tensors.values import require_bounded, stream, without_repeats
from tests.support.comparing import values
from tests.support.layouts import LAYOUTS, LAZY, WIDTHS, big_endian, numbers, strided
from tests.support.saved import opened
from tests.support.tensor_kinds import PLAIN_DTYPES


def stored(tensor: torch.Tensor, folder: Path) -> TensorRef:
    """The tensor as this library sees it in a file of torch's."""
    return opened({"t": tensor}, folder).state().tensors["t"]


def streamed(ref: TensorRef) -> bytes:
    return b"".join(bytes(piece) for piece in stream(ref))


PLAIN = {"contiguous": numbers(2, 3, 4), "empty": numbers(2, 3)[:0], "a number": torch.tensor(3.0)}
ALL_LAYOUTS = PLAIN | LAYOUTS | LAZY


@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 16, 48, 256])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_values_of_every_layout_are_right(layout: str, chunk: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    meant = ALL_LAYOUTS[layout]
    ref = stored(meant, tmp_path)
    assert streamed(ref) == values(meant)
    assert (ref.conj, ref.neg) == (meant.is_conj(), meant.is_neg())
    assert not (layout in LAZY and ref.is_plain)
    found = ref.numpy()
    assert found.flags.writeable and found.flags.c_contiguous
    assert torch.equal(torch.from_numpy(found), meant.resolve_conj().resolve_neg())
    live = to_torch.live_tensors({"t": ref})["t"]
    assert (live.dtype, live.shape, values(live)) == (meant.dtype, meant.shape, values(meant))


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_every_width_is_gathered(dtype: torch.dtype, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", 64)
    tensor = numbers(6, 5, dtype=dtype).t()
    assert streamed(stored(tensor, tmp_path)) == values(tensor)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_every_type_is_numpy_s_or_is_refused_with_the_way_out(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip("this torch has no such type")
    meant = torch.arange(1, 9, dtype=torch.uint8).repeat(4).view(kind)
    tensor = stored(meant, tmp_path)
    try:
        found = tensor.numpy()
    except Unsupported as error:
        assert error.hint is not None and "state.load()" in error.hint
        return
    assert found.dtype.name == dtype
    assert found.tobytes() == meant.view(torch.uint8).numpy().tobytes()


def test_a_large_tensor_comes_in_pieces(tmp_path: Path) -> None:
    tensor = numbers(1300, 1000).t()
    pieces = [bytes(piece) for piece in stream(stored(tensor, tmp_path))]
    assert len(pieces) > 1 and max(map(len, pieces)) <= tensor_values.CHUNK
    assert b"".join(pieces) == values(tensor)


def test_a_file_that_shrinks_while_a_view_of_it_is_gathered_is_damaged(tmp_path: Path) -> None:
    tensor = stored(numbers(1300, 1000).t(), tmp_path)
    os.truncate(tensor.storage.data.path, 4096)
    with pytest.raises(Damaged, match="became shorter"):
        list(stream(tensor))


views = strided(ranks=(1, 4), least=1, stride=20)


@given(views, st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]))
def test_any_view_is_read_as_torch_reads_it(view: tuple[Any, ...], dtype: torch.dtype) -> None:
    tensor = numbers(300, dtype=dtype).as_strided(*view)
    with tempfile.TemporaryDirectory() as folder:
        assert streamed(stored(tensor, Path(folder))) == values(tensor)


def test_a_small_storage_expanded_by_stride_0_is_refused_by_name(tmp_path: Path) -> None:
    ref = stored(torch.zeros(1).expand(1 << 20, 1 << 20), tmp_path)
    with pytest.raises(Refused, match=r"'t' is a view that expands 4 bytes to 4398046511104") as refusal:
        require_bounded("t", ref, hint="do this")
    assert refusal.value.hint == "do this"
    require_bounded("t", ref, most=1 << 42)


REPEATED = [((3, 4), (0, 1)), ((2, 0), (0, 1)), ((4,), (1,)), ((5, 2), (0, 0))]


@pytest.mark.parametrize(("shape", "stride"), REPEATED)
def test_repeats_of_stride_0_are_removed(shape: Any, stride: Any, tmp_path: Path) -> None:
    whole = torch.arange(4.0).as_strided(shape, stride)
    once, repeats = without_repeats(stored(whole, tmp_path))
    assert once.numel * repeats == whole.numel()
    assert set(streamed(once)) == set(values(whole))


def test_memory_stays_flat_while_a_strided_tensor_is_read(tmp_path: Path) -> None:
    ref = stored(numbers(6, 4 << 20).t(), tmp_path)  # 96 MiB
    tracemalloc.start()
    for _ in stream(ref):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


BIG_ENDIAN = [
    *(numbers(7, dtype=kind) for kind in (torch.float64, torch.int16, torch.bfloat16, torch.complex64)),
    *(numbers(3, 4, dtype=torch.complex128).t(), numbers(4, 5).t(), numbers(7, dtype=torch.uint8)),
    *(numbers(3, 4), numbers(5, dtype=torch.complex64).conj()),
]


@pytest.mark.parametrize("tensor", BIG_ENDIAN, ids=lambda t: f"{t.dtype} {tuple(t.shape)}")
def test_a_big_endian_file_has_torch_s_values(tensor: torch.Tensor, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", 32)
    path = big_endian(tensor, tmp_path / "big.pt")
    theirs = torch.load(path)["t"]
    assert values(theirs) == values(tensor), "the file is not what this test thinks"
    ref = ckpttool.open(path).state().tensors["t"]
    assert streamed(ref) == values(to_torch.live_tensors({"t": ref})["t"]) == values(tensor)
    if tensor.dtype != torch.bfloat16:
        assert torch.equal(torch.from_numpy(ref.numpy()), tensor.resolve_conj())


def test_loading_values_that_must_be_made_takes_little_more_than_their_own_memory(tmp_path: Path) -> None:
    with ckpttool.open(big_endian(torch.zeros(1 << 21), tmp_path / "big.pt")) as checkpoint:
        tensors = [tensor for _, tensor in checkpoint.tensors()]
        tracemalloc.start()
        loaded = [to_torch.loaded_tensor("w", tensor) for tensor in tensors]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert loaded[0].nbytes == 1 << 23
    assert peak < (1 << 23) + (4 << 20)


# A state and its tensors, as a person asks for them.


def test_what_can_not_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    with opened({"w": torch.ones(1).expand(1 << 30), "v": torch.ones(2)}, tmp_path) as checkpoint:
        state = checkpoint.state()
        with pytest.raises(Refused, match="expands"):
            state["w"].numpy()
    with pytest.raises(Unreadable, match="closed"):
        state["v"].numpy()


def test_a_state_is_asked_by_name_and_may_be_empty(tmp_path: Path) -> None:
    with opened({"a": numbers(2, 3, 4), "b": torch.ones(2), "epoch": 3}, tmp_path) as checkpoint:
        state = checkpoint.state()
        assert state["a"].shape == (2, 3, 4)
        assert ([*state], len(state), [*state.keys()]) == (["a", "b"], 2, ["a", "b"])
        assert {name: tensor.numel for name, tensor in state.items()} == {"a": 24, "b": 2}
        assert "a" in state and "epoch" not in state
        with pytest.raises(KeyError):
            state["epoch"]
        assert max(len(repr(shown)) for shown in (checkpoint, state, state["a"])) < 200
    with opened({}, tmp_path) as checkpoint:
        assert checkpoint.state() and len(checkpoint.state()) == 0


def test_a_traceback_ends_in_the_hint(tmp_path: Path) -> None:
    with pytest.raises(Unreadable) as caught:
        ckpttool.open(tmp_path / "nope.pt")
    assert "\n  hint: " in traceback.format_exception(caught.value)[-1]
