"""A tensor's values as a numpy array, without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool.errors import Refused, Unreadable, Unsupported
from tests.support.tensor_kinds import PLAIN_DTYPES

ROWS = torch.arange(24.0).reshape(2, 3, 4)

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: ROWS,
    "a part": lambda: ROWS[1, 1:, ::2],
    "transposed": lambda: ROWS.permute(2, 0, 1),
    "expanded": lambda: ROWS[0, 0, :1].expand(5, 3, 1),
    "empty": lambda: ROWS[:0],
    "a number": lambda: torch.tensor(3.0),
    "a conjugate": lambda: torch.view_as_complex(ROWS[..., :2].contiguous()).conj(),
    "a negative": lambda: torch.view_as_complex(ROWS[..., :2].contiguous()).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_torch_s_values(layout: str, tmp_path: Path) -> None:
    meant = LAYOUTS[layout]()
    torch.save({"w": meant}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        found = checkpoint.state()["w"].numpy()
    assert found.flags.writeable and found.flags.c_contiguous
    assert torch.equal(torch.from_numpy(found), meant.resolve_conj().resolve_neg())


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_every_type_is_numpy_s_or_is_refused_with_the_way_out(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip("this torch has no such type")
    meant = torch.arange(1, 9, dtype=torch.uint8).repeat(4).view(kind)
    torch.save({"w": meant}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        tensor = checkpoint.state()["w"]
        try:
            found = tensor.numpy()
        except Unsupported as error:
            assert error.hint is not None and "state.load()" in error.hint
            return
    assert found.dtype.name == dtype
    assert found.tobytes() == meant.view(torch.uint8).numpy().tobytes()


def test_big_endian_values_are_swapped(tmp_path: Path) -> None:
    from tests.support.crafting import dict_of, storage, tensor, torch_zip

    raw = ROWS[0].numpy().astype(">f4").tobytes()
    path = torch_zip(
        tmp_path / "in.pt", dict_of({"w": tensor(storage(12), (3, 4), (4, 1))}), {"0": raw}, byteorder="big"
    )
    with ckpttool.open(path) as checkpoint:
        assert checkpoint.state()["w"].numpy().tolist() == ROWS[0].tolist()


def test_what_can_not_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 30), "v": torch.ones(2)}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        state = checkpoint.state()
        with pytest.raises(Refused, match="expands"):
            state["w"].numpy()
    with pytest.raises(Unreadable, match="closed"):
        state["v"].numpy()


def test_a_state_is_asked_by_name(tmp_path: Path) -> None:
    torch.save({"a": ROWS, "b": torch.ones(2), "epoch": 3}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        state = checkpoint.state()
        assert state["a"].shape == (2, 3, 4)
        assert ([*state], len(state), [*state.keys()]) == (["a", "b"], 2, ["a", "b"])
        assert {name: tensor.numel for name, tensor in state.items()} == {"a": 24, "b": 2}
        assert "a" in state and "epoch" not in state
        with pytest.raises(KeyError):
            state["epoch"]
        assert max(len(repr(shown)) for shown in (checkpoint, state, state["a"])) < 200


def test_an_empty_state_is_one(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        assert checkpoint.state() and len(checkpoint.state()) == 0


def test_a_traceback_ends_in_the_hint(tmp_path: Path) -> None:
    import traceback

    with pytest.raises(Unreadable) as caught:
        ckpttool.open(tmp_path / "nope.pt")
    lines = traceback.format_exception(caught.value)
    assert "\n  hint: " in lines[-1]
