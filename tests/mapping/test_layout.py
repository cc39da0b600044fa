"""Permuted axes, other shapes, further names and complex parts are what torch makes of the same tensors."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckpttool
from ckpttool.core.tensors import values as tensor_values
from ckpttool.errors import CkptToolError, Collision, NothingToDo, Refused, UsageFault
from ckpttool.mapping.layout import join_complex, permute, reshape, split_complex, tie
from tests.support.comparing import assert_same, loaded, opened, values
from tests.support.crafting import dict_of, storage, tensor, torch_zip
from tests.support.trees import numbers

BASE = torch.arange(24.0).reshape(2, 3, 4)

VIEWS: dict[str, torch.Tensor] = {
    "contiguous": BASE,
    "with an offset": torch.arange(40.0)[7:31].reshape(2, 3, 4),
    "transposed": BASE.transpose(0, 2).contiguous().transpose(0, 2),
    "with gaps": torch.arange(96.0).reshape(4, 6, 4)[::2, ::2],
    "expanded": torch.arange(4.0).expand(2, 3, 4),
    "conjugate": torch.complex(BASE, BASE + 1).conj(),
}


def _fp8(*shape: int) -> torch.Tensor:
    return torch.rand(shape).to(torch.float8_e4m3fn)


PACKED: dict[str, dict[str, torch.Tensor]] = {
    "fp8": {"m.weight": _fp8(64, 1), "m.weight_scale": torch.rand(64, 1)},
    "fp8 of Mistral": {"l.weight": _fp8(64, 64), "l.scale": torch.rand(1, 1)},
    "stacked fp8": {"e.gate_up_proj": _fp8(2, 64, 64), "e.gate_up_proj_scale_inv": torch.rand(2, 1, 1)},
    "MXFP4": {
        "e.up_blocks": torch.zeros(2, 32, 2, 16, dtype=torch.uint8),
        "e.up_scales": torch.full((2, 32, 2), 127, dtype=torch.uint8),
    },
    "GPTQ": {
        "l.qweight": torch.zeros(4, 32, dtype=torch.int32),
        "l.qzeros": torch.zeros(4, 4, dtype=torch.int32),
        "l.scales": torch.rand(4, 32).half(),
        "l.g_idx": torch.arange(32, dtype=torch.int32) // 8,
    },
    "MXFP4 that fits nothing": {
        "e.up_blocks": torch.zeros(2, 32, 2, 8, dtype=torch.uint8),
        "e.up_scales": torch.full((2, 32, 2), 127, dtype=torch.uint8),
    },
    "NF4 whose settings are no JSON": {
        "l.weight": torch.zeros(64, 1, dtype=torch.uint8),
        "l.weight.absmax": torch.rand(2),
        "l.weight.quant_map": torch.rand(16),
        "l.weight.quant_state.bitsandbytes__nf4": torch.zeros(8, dtype=torch.uint8),
    },
}
PACKED["GPTQ without settings"] = PACKED["GPTQ"]


@pytest.mark.parametrize(("scheme", "name"), [(scheme, name) for scheme in PACKED for name in PACKED[scheme]])
@pytest.mark.parametrize("change", [permute, reshape])
def test_codes_and_scales_are_not_laid_out_apart(scheme: str, name: str, change: Any, tmp_path: Path) -> None:
    if scheme == "GPTQ":
        section = {"quant_method": "gptq", "bits": 4, "group_size": 8}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    checkpoint = opened(PACKED[scheme] | {"other": torch.rand(8, 1)}, tmp_path)
    shape = PACKED[scheme][name].shape
    sizes = (*range(len(shape))[::-1],) if change is permute else shape[::-1]
    with pytest.raises(Refused, match=f"'{name}' is packed") as fault:
        change(checkpoint, [(name, sizes)])
    assert "--dequantize" in str(fault.value.hint)
    assert change(checkpoint, [("other", (1, 0) if change is permute else (1, 8))])[1] == ("other",)


@pytest.mark.parametrize("axes", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_axes_are_permuted_as_torch_permutes_them(view: str, axes: tuple[int, ...], tmp_path: Path) -> None:
    new, changed = permute(opened({"w": VIEWS[view], "b": BASE}, tmp_path), [("w", axes)])
    assert changed == ("w",)
    assert_same({"w": VIEWS[view].permute(axes), "b": BASE}, loaded(new, tmp_path))
    if view != "conjugate":
        ckpttool.save(new, tmp_path / "out.safetensors")
        assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], VIEWS[view].permute(axes))


@given(st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=False))
def test_any_shape_with_the_same_number_of_elements_matches_torch(sizes: list[int], random: Any) -> None:
    tensor = torch.arange(math.prod(sizes)).reshape(sizes)
    shape = [*sizes, *[1] * random.randint(0, 2)]
    random.shuffle(shape)
    if len(shape) > 1:
        shape[:2] = [shape[0] * shape[1]]
    with tempfile.TemporaryDirectory() as folder:
        new, _ = reshape(opened({"w": tensor}, Path(folder)), [("w", tuple(shape))])
        assert_same({"w": tensor.reshape(shape)}, loaded(new, Path(folder)))


@pytest.mark.parametrize("view", [view for view in VIEWS if view not in ("contiguous", "with an offset")])
def test_only_axes_of_size_1_may_change_in_a_strided_view(view: str, tmp_path: Path) -> None:
    found = opened({"w": VIEWS[view]}, tmp_path)
    if view == "conjugate":  # contiguous in memory
        new, _ = reshape(found, [("w", (6, 4))])
        assert torch.equal(loaded(new, tmp_path)["w"], VIEWS[view].reshape(6, 4))
        return
    new, _ = reshape(found, [("w", (2, 1, 3, 4, 1))])
    assert torch.equal(loaded(new, tmp_path)["w"], VIEWS[view].reshape(2, 1, 3, 4, 1))
    with pytest.raises(UsageFault, match="'w' is a strided view and can't be viewed as 4,6") as fault:
        reshape(found, [("w", (4, 6))])
    assert fault.value.hint and "contiguous" in fault.value.hint
    ckpttool.save(found, tmp_path / "copy.safetensors")  # as the hint says
    new, _ = reshape(ckpttool.open(tmp_path / "copy.safetensors"), [("w", (4, 6))])
    assert torch.equal(loaded(new, tmp_path)["w"], VIEWS[view].reshape(4, 6))


def test_rules_are_applied_in_order_to_every_matching_key(tmp_path: Path) -> None:
    state = {f"h.{i}.c_attn.weight": BASE[i] for i in range(2)} | {"h.0.bias": BASE[0, 0]}
    rules = [("*.weight", (1, 0)), ("h.1.*", (1, 0))]
    new, changed = permute(opened(state, tmp_path), rules)
    assert changed == ("h.0.c_attn.weight", "h.1.c_attn.weight")
    found = loaded(new, tmp_path)
    assert torch.equal(found["h.0.c_attn.weight"], BASE[0].T)
    assert torch.equal(found["h.1.c_attn.weight"], BASE[1])


def test_everything_else_stays(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    tree = {"epoch": 3, "model": net.state_dict(), "args": [1, {"x": BASE}]}
    new, _ = permute(opened(tree, tmp_path), [("0.weight", (1, 0))])
    found = loaded(new, tmp_path)
    state = OrderedDict(tree["model"])  # type: ignore[call-overload]
    state._metadata = net.state_dict()._metadata  # type: ignore[attr-defined]
    state["0.weight"] = state["0.weight"].T
    assert_same(tree | {"model": state}, found)
    assert found["model"]._metadata == net.state_dict()._metadata


def test_tied_tensors_stay_tied_when_both_change(tmp_path: Path) -> None:
    new, _ = permute(opened({"a": BASE, "b": BASE, "c": BASE}, tmp_path), [("[ab]", (1, 0, 2))])
    found = loaded(new, tmp_path)
    assert len({tensor.data_ptr() for tensor in found.values()}) == 1
    assert found["a"].shape == found["b"].shape == (3, 2, 4) and torch.equal(found["c"], BASE)


@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_a_lost_tie_is_restored_and_the_model_loads(output: str, tmp_path: Path) -> None:
    state = {"embed.weight": torch.rand(5, 3), "norm": torch.rand(3)}
    new = tie(opened({"model": state, "epoch": 1}, tmp_path), [("head.weight", "embed.weight")])
    saved = ckpttool.save(new, tmp_path / output)
    assert saved.tied == (("head.weight",) if output == "out.safetensors" else ())
    found = ckpttool.open(tmp_path / output).state().load()
    assert set(found) == {*state, "head.weight"}
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert torch.equal(found["embed.weight"], state["embed.weight"])
    assert (tmp_path / output).stat().st_size < 4000


REFUSED: dict[str, tuple[Any, type[CkptToolError], str]] = {
    "an axis twice": (lambda c: permute(c, [("w", (0, 0, 1))]), UsageFault, "a permutation of the 3 axes of"),
    "an axis too few": (lambda c: permute(c, [("w", (1, 0))]), UsageFault, "1,0 is not a permutation"),
    "an axis too far": (lambda c: permute(c, [("w", (0, 1, 3))]), UsageFault, "0,1,3 is not a permutation"),
    "elements lost": (lambda c: reshape(c, [("w", (2, 3))]), UsageFault, "'w' has 24 elements, and 2,3 6"),
    "elements gained": (lambda c: reshape(c, [("w", (2**70,))]), UsageFault, "'w' has 24 elements"),
    "no key": (lambda c: permute(c, [("x*", (0,))]), NothingToDo, "no tensor's key matches 'x\\*'"),
    "no tensor": (lambda c: reshape(c, [("n", (1,))]), NothingToDo, "no tensor's key matches 'n'"),
    "more axes than torch has": (lambda c: reshape(c, [("w", (1,) * 65)]), UsageFault, "65 axes"),
    "no such name": (lambda c: tie(c, [("v", "x")]), NothingToDo, "no tensor is named 'x'"),
    "a name taken": (lambda c: tie(c, [("w", "b")]), Collision, "'w' would be another name of 'b'"),
    "a name taken by what is no tensor": (lambda c: tie(c, [("n", "b")]), Collision, "already exists"),
    "a name twice": (lambda c: tie(c, [("v", "b"), ("v", "w")]), Collision, "already exists"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_layouts_are_refused_by_name(what: str, tmp_path: Path) -> None:
    change, error, said = REFUSED[what]
    with pytest.raises(error, match=said) as fault:
        change(opened({"w": BASE, "b": BASE[0], "n": 3}, tmp_path))
    if error is not Collision and said != "65 axes":
        assert "in.pt" in fault.value.message


def test_only_the_named_state_is_changed(tmp_path: Path) -> None:
    checkpoint = opened({"model": {"w": BASE}, "ema": {"w": BASE + 1}}, tmp_path)
    new, _ = permute(checkpoint, [("w", (2, 0, 1))], state="ema")
    assert_same({"model": {"w": BASE}, "ema": {"w": (BASE + 1).permute(2, 0, 1)}}, loaded(new, tmp_path))


def test_a_parameter_of_two_names_stays_one_parameter(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(BASE.clone())
    tree = {"a": parameter, "b": parameter, "w": torch.nn.Parameter(BASE), "c": BASE}
    found = loaded(permute(opened(tree, tmp_path), [("[abw]", (2, 1, 0))])[0], tmp_path)
    assert found["a"] is found["b"]
    for name in "aw":
        assert isinstance(found[name], torch.nn.Parameter)
        assert torch.equal(found[name], BASE.permute(2, 1, 0))


# Complex tensors, split into real and imaginary parts, and joined again.

pytestmark = pytest.mark.filterwarnings("ignore:.*ComplexHalf")
OF_ANY_WIDTH = pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)


def complex_numbers(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return numbers(*shape, dtype=torch.complex64).to(dtype)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = complex_numbers(4, 6, dtype=dtype)
    return {
        "base": base,
        "tied": base,
        "turned": base.t(),
        "row": base[1],
        "column": base[:, 3],
        "corner": base[1:3, 2:5],
        "scalar": base[2, 3],
        "of its own": torch.tensor(1 - 2j, dtype=dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "empty view": base[4:],
        "one row": base[:1],
        "expanded": complex_numbers(1, 3, dtype=dtype).expand(4, 3),
        "conjugate": base.conj(),
        "conjugate transposed": base.mH,
        "conjugate scalar": base[1, 1].conj(),
    }


@OF_ANY_WIDTH
def test_complex_tensors_are_split_into_their_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    state = layouts(dtype)
    new, names = split_complex(opened({**state, "plain": numbers(2)}, tmp_path))
    found = loaded(new, tmp_path)
    assert names == tuple(state)
    assert list(found) == [*(f"{key}.{part}" for key in state for part in ("real", "imag")), "plain"]
    for key, whole in state.items():
        resolved = whole.resolve_conj()
        for part, wanted in (("real", resolved.real), ("imag", resolved.imag)):
            assert found[f"{key}.{part}"].dtype == wanted.dtype
            assert found[f"{key}.{part}"].shape == wanted.shape
            assert values(found[f"{key}.{part}"]) == values(wanted), (key, part)


@OF_ANY_WIDTH
def test_splitting_and_joining_restores_a_pt_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Views, ties and conjugates survive; two names of one tensor object become two objects."""
    state = {**layouts(dtype), "plain": numbers(2)}
    state["tied"] = state["base"].view(4, 6)
    split, _ = split_complex(opened(state, tmp_path))
    ckpttool.save(split, tmp_path / "split.pt")
    joined, names = join_complex(ckpttool.open(tmp_path / "split.pt"))
    assert names == tuple(key for key in state if key != "plain")
    assert_same(state, loaded(joined, tmp_path))


@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 16])
@OF_ANY_WIDTH
def test_parts_that_went_through_safetensors_are_joined_by_value(
    dtype: torch.dtype, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    monkeypatch.setattr("ckpttool.mapping.layout.CHUNK", chunk)
    state = layouts(dtype)
    split, _ = split_complex(opened(state, tmp_path))
    ckpttool.save(split, tmp_path / "split.safetensors")
    joined, _ = join_complex(ckpttool.open(tmp_path / "split.safetensors"))
    found = loaded(joined, tmp_path)
    assert sorted(found) == sorted(state)
    for key, whole in state.items():
        assert (found[key].dtype, found[key].shape) == (dtype, whole.shape)
        assert values(found[key]) == values(whole), key
    assert found["base"].data_ptr() == found["tied"].data_ptr()


def test_parts_written_by_torch_are_joined_as_torch_joins_them(tmp_path: Path) -> None:
    parts = {"a.imag": numbers(6).view(2, 3).t(), "a.real": -numbers(6).view(3, 2), "b": numbers(1)}
    joined, names = join_complex(opened(parts, tmp_path))
    found = loaded(joined, tmp_path)
    assert names == ("a",)
    assert torch.equal(found["a"], torch.complex(parts["a.real"], parts["a.imag"].contiguous()))
    assert list(found) == ["a", "b"]
    parts = {"a.real": numbers(2).requires_grad_(), "a.imag": numbers(2).requires_grad_()}
    assert loaded(join_complex(opened(parts, tmp_path))[0], tmp_path)["a"].requires_grad


def test_parts_expanded_beyond_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    parts = {f"a.{part}": torch.zeros(1).expand(1 << 20, 1 << 20) for part in ("real", "imag")}
    checkpoint = opened(parts, tmp_path)
    with pytest.raises(Refused, match="'a' is a view that expands 4 bytes"):
        join_complex(checkpoint)


def test_adjacent_parts_that_are_not_halves_of_one_number_are_joined_by_value(tmp_path: Path) -> None:
    base = numbers(12)
    parts = {
        "odd start.real": base[1::2],
        "odd start.imag": torch.cat([base[2::2], base[:1]]),
        "odd.real": base[1:10:2],
        "odd.imag": base[2:11:2],
        "rows.real": base[0:4],
        "rows.imag": base[1:5],
        "swapped.imag": base[0::2],
        "swapped.real": base[1::2],
        "one.real": base[4:5],
        "one.imag": base[5:6],
    }
    for key, whole in loaded(join_complex(opened(parts, tmp_path))[0], tmp_path).items():
        assert torch.equal(whole, torch.complex(parts[f"{key}.real"], parts[f"{key}.imag"])), key


TAKEN = r"'a' would be split into 'a\.imag', which already exists"
TWO, PAIR, NO_PAIR = numbers(2), {"a.real": numbers(2), "a.imag": numbers(2)}, "no pair of tensors"
NOT_CHANGED: dict[str, tuple[Any, dict[str, torch.Tensor], type[CkptToolError], str]] = {
    "no partner": (join_complex, {"a.real": TWO, "b": TWO}, NothingToDo, NO_PAIR),
    "other shape": (join_complex, {"a.real": TWO, "a.imag": numbers(3)}, NothingToDo, NO_PAIR),
    "other type": (join_complex, {"a.real": TWO, "a.imag": TWO.double()}, NothingToDo, NO_PAIR),
    "integers": (join_complex, {key: torch.arange(2) for key in PAIR}, NothingToDo, NO_PAIR),
    "no such complex type": (join_complex, {key: TWO.bfloat16() for key in PAIR}, NothingToDo, NO_PAIR),
    "no name": (join_complex, {"real": TWO, "imag": TWO}, NothingToDo, NO_PAIR),
    "a name taken": (
        join_complex,
        PAIR | {"a": TWO},
        Collision,
        r"'a\.real' and 'a\.imag' would be joined into 'a'",
    ),
    "nothing complex": (split_complex, {"w": TWO}, NothingToDo, "no tensor is complex"),
    "a part's name taken": (split_complex, {"a": 1j * TWO, "a.imag": TWO}, Collision, TAKEN),
    "a part's name taken before": (split_complex, {"a.imag": TWO, "a": 1j * TWO}, Collision, TAKEN),
}


@pytest.mark.parametrize("case", NOT_CHANGED)
def test_what_can_not_be_split_or_joined_is_refused(case: str, tmp_path: Path) -> None:
    change, state, error, said = NOT_CHANGED[case]
    with pytest.raises(error, match=said):
        change(opened(state, tmp_path))


def test_big_endian_complex_numbers_are_split_and_joined_by_value(tmp_path: Path) -> None:
    pairs = np.array([1 + 2j, -3.5 + 4j], ">c8")
    body = dict_of({"z": tensor(storage(2, kind="ComplexFloatStorage"), (2,)), "n": tensor(storage(key="1"))})
    other = np.array([1, 2, 3, 4], ">f4").tobytes()
    torch_zip(tmp_path / "in.pt", body, {"0": pairs.tobytes(), "1": other}, byteorder="big")
    split, _ = split_complex(ckpttool.open(tmp_path / "in.pt"))
    ckpttool.save(split, tmp_path / "split.safetensors")
    assert load_file(tmp_path / "split.safetensors")["z.imag"].tolist() == [2, 4]
    for again in (split, ckpttool.open(tmp_path / "split.safetensors")):
        joined, _ = join_complex(again)
        assert loaded(joined, tmp_path)["z"].tolist() == [1 + 2j, -3.5 + 4j]


def test_big_endian_parts_are_joined_beside_other_big_endian_tensors(tmp_path: Path) -> None:
    raw = {key: np.array([key, 2, 3, 4], ">f4").tobytes() for key in (1.0, 5.0, 9.0)}
    body = dict_of({name: tensor(storage(key=str(i))) for i, name in enumerate(("z.real", "z.imag", "n"))})
    files = {str(i): each for i, each in enumerate(raw.values())}
    torch_zip(tmp_path / "in.pt", body, files, byteorder="big")
    joined, _ = join_complex(ckpttool.open(tmp_path / "in.pt"))
    found = loaded(joined, tmp_path)
    assert found["z"].tolist() == [1 + 5j, 2 + 2j, 3 + 3j, 4 + 4j]
    assert found["n"].tolist() == [9, 2, 3, 4]


@pytest.mark.parametrize("layout", ["rows", "turned"])
def test_any_range_of_joined_numbers_equals_that_range_of_the_whole(layout: str, tmp_path: Path) -> None:
    parts = {"a.real": numbers(40).reshape(5, 8), "a.imag": -numbers(40).reshape(5, 8)}
    state = parts if layout == "rows" else {name: part.t() for name, part in parts.items()}
    joined, _ = join_complex(opened(state, tmp_path))
    (whole,) = joined.state().tensors.values()
    data, size = whole.storage.data, whole.dtype.itemsize
    everything = data.read()
    for first in range(0, 40 * size, size):
        for end in range(first, 40 * size + 1, size):
            assert data.part(first, end - first).read() == everything[first:end]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=3), st.integers(0, 9), st.booleans()
)
def test_any_complex_view_survives_split_and_join(axes: Any, offset: int, conjugate: bool) -> None:
    seen = complex_numbers(60).as_strided([size for size, _ in axes], [stride for _, stride in axes], offset)
    seen = seen.conj() if conjugate else seen
    with tempfile.TemporaryDirectory() as folder:
        split, _ = split_complex(opened({"z": seen}, Path(folder)))
        ckpttool.save(split, Path(folder) / "split.pt")
        joined, _ = join_complex(ckpttool.open(Path(folder) / "split.pt"))
        assert_same({"z": seen}, loaded(joined, Path(folder)))
