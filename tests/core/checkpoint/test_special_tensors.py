"""Tensors that are not plain ones, and torch's own functions with odd arguments: shown, or refused."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.averaging.average import average
from ckpttool.core.checkpoint.selection import cast, select, slim
from ckpttool.core.checkpoint.special_tensors import special_tensor
from ckpttool.core.inert_pickle.values import Global, Record
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.diffing.compare import diff
from ckpttool.errors import CkptToolError, Damaged, Refused
from ckpttool.inspecting.summary import summarize
from ckpttool.inspecting.tables import tensor_rows
from ckpttool.verifying.verify import verify
from tests.ranks.shardings import save_pieces
from tests.support.comparing import opened, saved
from tests.support.crafting import call, dict_of, list_of, name, number, storage, text, torch_zip, tuple_of
from tests.support.crafting import tensor as dense
from tests.support.running import Cli
from tests.support.trees import IN_WORDS, KINDS, ROWS, save_kind, save_tagged, save_zero3

# ---- Tensors that are not plain ones are shown, compared and digested, and never dropped in silence ---


@pytest.fixture(scope="module")
def pieces(run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that two ranks saved, each its own."""
    folder = tmp_path_factory.mktemp("pieces")
    run_ranks(2, save_pieces, str(folder))
    return folder


def refused(cli: Cli, path: Path, out: Path, *words: str, command: str = "convert") -> str:
    """Run a command that is exit 3 and writes nothing; return what it says."""
    ran = cli(command, path, out, *words)
    assert ran.code == 3
    assert not out.exists()
    return ran.err


# Tensors that one file holds.


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_described_and_counted_with_the_state(kind: str, tmp_path: Path) -> None:
    checkpoint = ckpttool.open(save_kind(kind, tmp_path / "in.pt"))
    state = checkpoint.state()
    assert list(state.tensors) == ["plain"]
    assert {name: str(like) for name, like in state.likes.items()} == {"x": IN_WORDS[kind]}
    assert summarize(checkpoint).keys == 2


@pytest.mark.parametrize("kind", KINDS)
def test_safetensors_refuses_each_kind_by_name_with_the_way_out(kind: str, cli: Cli, tmp_path: Path) -> None:
    path = save_kind(kind, tmp_path / "in.pt")
    said = refused(cli, path, tmp_path / "out.safetensors")
    assert f"'x' ({IN_WORDS[kind]}) can't be held by safetensors" in said
    assert f"convert {path} out.pt; or leave them out: ckpttool convert" in said
    assert cli("convert", path, tmp_path / "out.safetensors", "--exclude", "x").code == 0
    assert list(load_file(tmp_path / "out.safetensors")) == ["plain"]


@pytest.mark.parametrize("to", ["torch-sharded", "safetensors-sharded", "dcp"])
def test_folders_of_plain_tensors_refuse_them_too(to: str, tmp_path: Path) -> None:
    checkpoint = ckpttool.open(save_kind("sparse COO", tmp_path / "in.pt"))
    with pytest.raises(Refused, match=r"'x' \(sparse COO .* can't be held by"):
        ckpttool.save(checkpoint, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", ["out.pt", "full.safetensors"])
def test_pt_and_full_keep_each_kind_as_it_is(kind: str, through: str, tmp_path: Path) -> None:
    checkpoint = ckpttool.open(save_kind(kind, tmp_path / "in.pt"))
    ckpttool.save(checkpoint, tmp_path / through, full=through.startswith("full") or None)
    ckpttool.save(ckpttool.open(tmp_path / through), tmp_path / "back.pt", full=False)
    back = ckpttool.open(tmp_path / "back.pt")
    assert str(back.state().likes["x"]) == IN_WORDS[kind]
    assert diff(checkpoint, back).same
    found, meant = (torch.load(tmp_path / name, weights_only=False)["x"] for name in ("back.pt", "in.pt"))
    assert (type(found), found.layout) == (type(meant), meant.layout)


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_of_a_kind_is_the_same_in_each_format(kind: str, cli: Cli, tmp_path: Path) -> None:
    path, less = save_kind(kind, tmp_path / "in.pt"), saved({"plain": ROWS}, tmp_path / "less.pt")
    if kind == "masked":  # of a class that is not known
        ran = cli("digest", path)
        assert ran.code == 3
        assert "'x' (MaskedTensor float32 [3, 4]) have no digest" in ran.err
        return
    ckpttool.save(ckpttool.open(path), tmp_path / "full.safetensors", full=True)
    assert ckpttool.digest(path) == ckpttool.digest(tmp_path / "full.safetensors") != ckpttool.digest(less)


def test_a_changed_value_or_setting_changes_the_digest_and_is_found(cli: Cli, tmp_path: Path) -> None:
    made = [(ROWS, 0.1), (ROWS * 2, 0.2), (ROWS + 1, 0.1)]  # another scale, and another value
    tensors = [torch.quantize_per_tensor(values, scale, 3, torch.qint8) for values, scale in made]
    trees = [{"model": {"x": tensor}, "epoch": 1} for tensor in tensors]
    first, *others = (saved(tree, tmp_path / f"{at}.pt") for at, tree in enumerate(trees))
    assert len({ckpttool.digest(path) for path in (first, *others)}) == 3
    for other in others:
        assert cli("diff", first, other).code == 1
        assert cli("diff", first, other, "--model-only").code == 1
        assert not verify(ckpttool.open(first), against=ckpttool.open(other), state="model").ok
    assert cli("diff", first, first, "--model-only").code == 0


def test_transforms_of_values_refuse_them(tmp_path: Path) -> None:
    checkpoint = ckpttool.open(save_kind("sparse COO", tmp_path / "in.pt"))
    with pytest.raises(Refused, match=r"'x' .* can't be cast"):
        cast(checkpoint, DTYPES["float16"])
    with pytest.raises(Refused, match=r"'x' .* can't be averaged"):
        average([checkpoint, checkpoint])


def test_renaming_and_slim_keep_them(tmp_path: Path) -> None:
    checkpoint = ckpttool.open(save_kind("sparse COO", tmp_path / "in.pt"))
    renamed, _ = ckpttool.add_prefix(checkpoint)
    ckpttool.save(slim(renamed), tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["module.x"].is_sparse


def test_inspect_lists_them_with_kind_and_shape(cli: Cli, tmp_path: Path) -> None:
    path = save_kind("sparse COO", tmp_path / "in.pt")
    found = cli("inspect", path, "--json").json
    rows = {row["name"]: row for row in found["tensors"]}
    assert set(rows) == {"plain", "x"}
    assert (rows["x"]["kind"], rows["x"]["dtype"], rows["x"]["shape"]) == ("sparse COO", "float32", [3, 3])
    assert "kind" not in rows["plain"]
    assert "1 float32 sparse COO" in cli("inspect", path).out
    assert "torch._utils._rebuild_sparse_tensor" not in [other["type"] for other in found["other"]]


def test_a_subclass_that_is_a_plain_tensor_is_converted(tmp_path: Path) -> None:
    checkpoint = ckpttool.open(save_tagged(tmp_path / "in.pt"))
    assert checkpoint.state().likes == {}
    ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["x"], ROWS)


def test_a_state_of_no_plain_tensor_is_a_state(cli: Cli, tmp_path: Path) -> None:
    checkpoint = opened({"model": {"x": torch.eye(3).to_sparse()}, "epoch": 1}, tmp_path)
    assert checkpoint.state().where == "model"
    assert cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors").code == 3


# Pieces of tensors that lie on several ranks.


def test_a_rank_s_file_is_shown_with_whole_and_local_shapes(pieces: Path, cli: Cli) -> None:
    checkpoint = ckpttool.open(pieces / "fsdp2-1.pt")
    described = str(checkpoint.state().likes["0.weight"])
    assert described == "DTensor float32 [7, 5], here [3, 5], Shard(0), rank 1 of 2"
    row = next(row for row in tensor_rows(checkpoint) if row.name == "0.weight")
    assert (row.shape, row.local_shape, row.nbytes) == ((7, 5), (3, 5), 60)
    summary = summarize(checkpoint)
    assert (summary.keys, summary.parameters) == (7, 7 * 5 + 7 + 7 + 7)
    shown = cli("inspect", pieces / "fsdp2-1.pt").out
    assert "4 tensors of which this file has a piece" in shown
    assert "here [3, 5]" in shown


@pytest.mark.parametrize("name", ["fsdp2-0.pt", "placed-1.pt", "sharded-0.pt"])
def test_a_rank_s_file_is_not_converted_as_a_whole(name: str, pieces: Path, cli: Cli, tmp_path: Path) -> None:
    said = refused(cli, pieces / name, tmp_path / "out.safetensors")
    assert "here [" in said
    assert "join the files of all ranks: ckpttool merge FOLDER" in said
    assert cli("convert", pieces / name, tmp_path / "out.pt").code == 0
    assert diff(ckpttool.open(pieces / name), ckpttool.open(tmp_path / "out.pt")).same


@pytest.mark.parametrize("name", ["fsdp2", "placed", "sharded"])
def test_files_of_two_ranks_differ_and_have_no_digest(name: str, pieces: Path, cli: Cli) -> None:
    zero, one = pieces / f"{name}-0.pt", pieces / f"{name}-1.pt"
    assert cli("digest", zero).code == 3
    assert cli("diff", zero, one).code == 1
    assert cli("diff", zero, one, "--model-only").code == 1
    assert cli("diff", zero, zero).code == 0


def test_a_dtensor_of_which_the_file_holds_everything_is_a_plain_tensor(pieces: Path, tmp_path: Path) -> None:
    checkpoint, _ = select(ckpttool.open(pieces / "placed-1.pt"), exclude=["cut"])
    ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["copied"], torch.arange(24.0).reshape(6, 4))
    halves, _ = cast(checkpoint, DTYPES["float16"])
    ckpttool.save(halves, tmp_path / "half.pt")
    assert torch.load(tmp_path / "half.pt")["copied"].dtype == torch.float16


# What one rank wrote of a checkpoint of Hugging Face's.


@pytest.fixture
def piece(tmp_path: Path) -> Path:
    """Save what rank 1 of 2 writes of a tensor of 4 rows."""
    places = {"w": {"saved_offsets": [2, 0]}, "b": {"saved_offsets": [2]}}
    metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    path = tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2, 3), "b": torch.ones(2)}, path, metadata=metadata)
    return path


REFUSED = [
    *("convert IN o.pt", "convert IN o.safetensors", "convert IN o/", "convert IN o.pt --full", "digest IN"),
    *("convert IN o.safetensors --full", "slim IN o.pt", "add-prefix IN o.safetensors"),
    "convert IN o.pt --dtype bf16",
]


@pytest.mark.parametrize("command", REFUSED)
def test_one_rank_s_pieces_are_refused(command: str, piece: Path, cli: Cli, tmp_path: Path) -> None:
    words = command.replace("IN", str(piece)).replace(" o", f" {tmp_path}/o").split()
    ran = cli(*words)
    assert ran.code == 3
    assert "holds one rank's pieces of tensors (DCP_SHARDING_INFO)" in ran.err
    assert "hint: the whole is only in the files of all ranks" in ran.err
    assert list(tmp_path.iterdir()) == [piece]


def test_one_rank_s_pieces_can_be_inspected_and_verified_but_are_no_state(piece: Path, cli: Cli) -> None:
    page = cli("inspect", piece)
    assert page.code == 0
    assert "state       none: it holds one rank's pieces of tensors" in page.out
    assert cli("verify", piece).code == 0
    with pytest.raises(Refused, match="one rank's pieces"):
        ckpttool.open(piece).state()


# ZeRO-3.


def test_placeholders_of_zero_3_are_not_taken_for_parameters(cli: Cli, tmp_path: Path) -> None:
    path = save_zero3(tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    likes = ckpttool.open(path).state().likes
    placeholder = "ZeRO-3 placeholder float32"
    wanted = {"fc.weight": f"{placeholder} [4, 3], here [0]", "fc.bias": f"{placeholder} [4], here [0]"}
    assert {name: str(like) for name, like in likes.items()} == wanted
    assert summarize(ckpttool.open(path)).parameters == 4 * 3 + 4
    for command in (["convert"], ["slim"], ["convert", "--dtype", "bf16"]):
        said = refused(cli, path, tmp_path / "out.safetensors", *command[1:], command=command[0])
        assert "ckpttool merge" in said
    assert cli("digest", path).code == 3


def test_placeholders_are_known_under_new_names(cli: Cli, tmp_path: Path) -> None:
    path = save_zero3(tmp_path / "in.pt")
    assert cli("add-prefix", path, tmp_path / "out.safetensors").code == 3
    assert cli("add-prefix", path, tmp_path / "out.pt").code == 0
    assert cli("convert", tmp_path / "out.pt", tmp_path / "out.safetensors").code == 3


def test_whole_parameters_beside_their_shapes_are_converted(cli: Cli, tmp_path: Path) -> None:
    """The stages below 3 write the whole parameters, and the shapes too."""
    module = {"fc.weight": torch.ones(4, 3), "mask": torch.empty(0)}
    torch.save({"module": module, "param_shapes": [{"fc.weight": torch.Size([4, 3])}]}, tmp_path / "in.pt")
    assert cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors").code == 0
    assert set(load_file(tmp_path / "out.safetensors")) == {"fc.weight", "mask"}


# Hostile descriptions.


def rebuilt(function: str, *args: object) -> Record:
    module, _, name = function.rpartition(".")
    return Record("reduce", Global(module, name), args)


UTILS, TYPED = "torch._utils._rebuild_", "torch._tensor._rebuild_from_type_v2"
WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
DTENSOR = Global("torch.distributed.tensor", "DTensor")
MALFORMED = [
    *(rebuilt(f"{UTILS}sparse_tensor"), rebuilt(f"{UTILS}sparse_tensor", 1, 2)),
    *(rebuilt(f"{UTILS}qtensor", 1, 2, 3, 4, 5, 6, 7), rebuilt(f"{UTILS}nested_tensor", None)),
    rebuilt(f"{UTILS}meta_tensor_no_storage", {}, (-1,), (), False),
    rebuilt(f"{UTILS}meta_tensor_no_storage", Global("torch", "float32"), (2**62,) * 60),
    rebuilt(TYPED, {}, {}, {}, {}),
    rebuilt(TYPED, WRAPPER, DTENSOR, (1, 2, (3,)), (None, {"_local_tensor": 1, "_spec": []})),
]


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: str(value.callable))
def test_malformed_descriptions_are_tensors_of_which_nothing_is_known(value: Record) -> None:
    found = special_tensor(value)
    assert found is not None
    assert not found.known or found.shape is None


def test_descriptions_inside_descriptions_end(tmp_path: Path) -> None:
    value: object = None
    for _ in range(10_000):
        value = rebuilt("torch._utils._rebuild_parameter", value, True, {})
    assert special_tensor(value) is None


@pytest.mark.parametrize("kind", ["sparse COO", "quantised", "nested"])
def test_loading_refuses_each_kind_by_name(kind: str, tmp_path: Path) -> None:
    path = save_kind(kind, tmp_path / "in.pt")
    with pytest.raises(Refused, match=r"'x' \(.* can't be loaded as plain tensors"):
        ckpttool.open(path).state().load()
    model = torch.nn.Module()
    model.register_buffer("x", torch.zeros(2, 2))
    model.register_buffer("plain", torch.zeros(2))
    with pytest.raises(Refused, match=r"'x' \(.* can't be loaded into a model"):
        ckpttool.reload(path, model)


# ---- Calls of torch's own functions with odd arguments: read as torch reads them, or the file is refused


EMPTY = call(name("collections", "OrderedDict"))
TRUE, FALSE, NONE = b"\x88", b"\x89", b"N"
V2 = name("torch._utils", "_rebuild_tensor_v2")
GET_LAYOUT, CALLS = name("torch.serialization", "_get_layout"), ("COO", "CSR", "CSC", "BSR", "BSC")
LAYOUTS = {kind: call(GET_LAYOUT, text(f"torch.sparse_{kind.lower()}")) for kind in CALLS}
COO = LAYOUTS["COO"]
BLOCKS = {"CSR": (1, 1), "CSC": (1, 1), "BSR": (1, 2), "BSC": (2, 1)}


def plain(*, shape: bytes = tuple_of(number(4)), grad: bytes = FALSE, hooks: bytes = EMPTY) -> bytes:
    return call(V2, storage(), number(0), shape, tuple_of(number(1)), grad, hooks)


def made_of(hooks: bytes) -> bytes:
    return tuple_of(storage(), number(0), tuple_of(number(4)), tuple_of(number(1)), FALSE, hooks)


def integers(key: str, *shape: int, kind: str = "LongStorage") -> bytes:
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * shape[axis + 1]
    count = stride[0] * shape[0]
    return dense(storage(count, kind=kind, key=key), shape, tuple(stride))


parameter = partial(call, name("torch._utils", "_rebuild_parameter"))
with_state = partial(call, name("torch._utils", "_rebuild_parameter_with_state"))
typed = partial(call, name("torch._tensor", "_rebuild_from_type_v2"))
meta = partial(call, name("torch._utils", "_rebuild_meta_tensor_no_storage"), name("torch", "float32"))


def sparse(layout: bytes, *data: bytes) -> bytes:
    return call(name("torch._utils", "_rebuild_sparse_tensor"), layout, tuple_of(*data))


def coo(key: str, size: int = 4, *coalesced: bytes, nnz: int = 2) -> bytes:
    values = dense(storage(4), (nnz,))
    return sparse(COO, integers(key, 1, nnz), values, tuple_of(number(size)), *coalesced)


def compressed(
    kind: str,
    starts: str,
    plain: str,
    *,
    lines: int = 2,
    across: int = 2,
    values: tuple[int, ...] | None = None,
    block: tuple[int, ...] = (),
    more: tuple[int, ...] = (),
    rest: int = 0,
) -> bytes:
    """A matrix of `lines` compressed rows or columns (of blocks), each `across` long, and two values."""
    of_kind = BLOCKS[kind]
    sizes = (lines, across) if kind.endswith("SR") else (across, lines)
    size = (*(n * b + rest for n, b in zip(sizes, of_kind, strict=True)), *more)
    shape = values or (2, *(block or (of_kind if kind[0] == "B" else ())))
    stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    indices = integers(starts, 3), integers(plain, 2)
    data = dense(storage(4), shape, tuple(stride))
    return sparse(LAYOUTS[kind], *indices, data, tuple_of(*map(number, size)))


# Each kind has the same faults, in its rows or columns, of elements or blocks.
COMPRESSED = {
    f"{kind}{fault}": compressed(kind, starts, plain, **options)
    for kind in BLOCKS
    for fault, (starts, plain, options) in {
        "": ("rows", "columns", {}),
        " in one row": ("rows of one", "none", {}),
        ", sorted in one row": ("rows of one", "up", {"across": 4}),
        ", not sorted in one row": ("rows of one", "columns", {}),
        ", one column twice in one row": ("rows of one", "same column", {}),
        ", one column twice in two rows": ("rows", "same column", {}),
        ", rows that end early": ("rows that end early", "columns", {}),
        ", rows from 1": ("rows from 1", "columns", {}),
        ", rows that go back": ("rows back", "columns", {}),
        ", a column past the end": ("rows", "column past", {}),
        ", a column past the end of a wide one": ("rows", "up", {"across": 3}),
        ", the last column of a wide one": ("rows", "up", {"across": 4}),
        ", a column below 0": ("rows", "below", {"across": 3}),
        " of more rows": ("rows", "columns", {"lines": 3}),
        " of fewer rows": ("rows", "columns", {"lines": 1}),
        " of one value": ("rows", "columns", {"values": (1, *(BLOCKS[kind] if kind[0] == "B" else ()))}),
        " of blocks of four": ("rows", "columns", {"values": (1, 2, 2)}),
        " of other blocks": ("rows", "columns", {"block": BLOCKS[kind][::-1]}),
        " of values without blocks": ("rows", "columns", {"values": (2,)}),
        " of blocks that do not fit": ("rows", "columns", {"rest": 1}),
        " with an axis of values": ("rows", "columns", {"values": (2, *BLOCKS[kind], 1), "more": (1,)}),
    }.items()
}


def quantised(
    *params: bytes, kind: str = "QInt8Storage", grad: bytes = FALSE, scheme: str = "per_tensor_affine"
) -> bytes:
    given = tuple_of(name("torch", scheme), *params)
    where = storage(4, kind=kind, key="q")
    size, stride = tuple_of(number(2)), tuple_of(number(1))
    return call(name("torch._utils", "_rebuild_qtensor"), where, number(0), size, stride, given, grad, EMPTY)


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def by_channel(count: int, axis: int) -> bytes:
    scales, zeros = list_of(*[real(0.1)] * count), list_of(*[number(0)] * count)
    return quantised(scales, zeros, number(axis), scheme="per_channel_affine")


INTEGERS = {"none": (0, 0), "up": (1, 3), "twice": (3, 3), "down": (3, 1), "past": (0, 4), "below": (-1, 2)}
INTEGERS |= {"columns": (1, 0), "same column": (1, 1), "column past": (0, 2), "rows of one": (0, 2, 2)}
INTEGERS |= {"rows": (0, 1, 2), "rows that end early": (0, 1, 1), "rows from 1": (1, 1, 2)}
INTEGERS |= {"rows back": (0, 2, 1)}
STORAGES = {"0": torch.arange(4.0), "q": torch.arange(4, dtype=torch.int8)}
STORAGES |= {key: torch.tensor(values) for key, values in INTEGERS.items()}

TWO, LONGS = dense(storage(4), (2,)), storage(2, kind="LongStorage", key="up")
CASES = {
    "a tensor": plain(), "hooks": plain(hooks=dict_of({"a": number(1)})),
    "hooks that are a list": plain(hooks=list_of(number(1))),
    "hooks of a typed tensor": typed(V2, name("torch", "Tensor"), made_of(list_of(NONE)), dict_of({})),
    "a size in a list": plain(shape=list_of(number(4))),
    "gradients of integers": call(V2, LONGS, number(0), *[tuple_of(number(1))] * 2, TRUE, EMPTY),
    "a Parameter": parameter(plain(), TRUE, EMPTY),
    "a Parameter around a str": parameter(text("x"), TRUE, EMPTY),
    "a Parameter around a number": parameter(number(3), FALSE, EMPTY),
    "a Parameter around nothing": parameter(NONE, FALSE, EMPTY),
    "a Parameter around a list": parameter(list_of(plain()), FALSE, EMPTY),
    "a Parameter without hooks": parameter(plain(), TRUE),
    "a Parameter with hooks": parameter(plain(), TRUE, list_of(number(1))),
    "a Parameter that may need gradients": parameter(plain(), number(1), EMPTY),
    "a Parameter of integers with gradients": parameter(integers("up", 2), TRUE, EMPTY),
    "a Parameter of integers": parameter(integers("up", 2), FALSE, EMPTY),
    "a Parameter with a state too many": parameter(plain(), TRUE, EMPTY, dict_of({})),
    "a Parameter with attributes": with_state(plain(), TRUE, EMPTY, dict_of({"note": text("x")})),
    "a Parameter whose attributes are text": with_state(plain(), TRUE, EMPTY, text("x")),
    "a Parameter whose attributes are three": with_state(plain(), TRUE, EMPTY, tuple_of(*[dict_of({})] * 3)),
    "a Parameter that is changed": parameter(plain(), TRUE, EMPTY) + dict_of({"note": text("x")}) + b"b",
    "a Parameter that gets another storage": parameter(plain(), TRUE, EMPTY)
    + tuple_of(storage(2, kind="LongStorage", key="up"), number(0), tuple_of(number(2)), tuple_of(number(1)))
    + b"b",
    "a typed tensor": typed(V2, name("torch", "Tensor"), made_of(EMPTY), dict_of({})),
    "a typed tensor of three parts": typed(V2, name("torch", "Tensor"), tuple_of(storage())),
    "a typed tensor of nothing": typed(V2, name("torch", "Tensor"), tuple_of(), dict_of({})),
    "a typed sparse tensor of nothing": typed(
        name("torch._utils", "_rebuild_sparse_tensor"), name("torch", "Tensor"), tuple_of(COO), dict_of({})
    ),
    "COO": coo("up"), "COO, coalesced": coo("up", 4, TRUE), "COO, coalesced by nothing": coo("up", 4, NONE),
    "COO, coalesced by a number": coo("up", 4, number(1)), "COO, one index twice": coo("twice"),
    "COO, one index twice, coalesced": coo("twice", 4, TRUE), "COO, out of order": coo("down"),
    "COO, out of order, coalesced": coo("down", 4, TRUE), "COO, past the end": coo("past"),
    "COO, below 0": coo("below"),
    "COO of other sizes": sparse(COO, integers("up", 1, 2), dense(storage(4), (3,)), tuple_of(number(4))),
    "COO of other axes": sparse(COO, integers("up", 1, 2), TWO, tuple_of(number(4), number(4))),
    "COO whose indices are a list": sparse(COO, integers("up", 2), TWO, tuple_of(number(4))),
    "COO whose size is text": sparse(COO, integers("up", 1, 2), dense(storage(4), (2,)), text("x")),
    "COO of two parts": sparse(COO, integers("up", 1, 2), dense(storage(4), (2,))),
    "COO with an axis of values": sparse(
        COO, integers("up", 1, 2), dense(storage(4), (2, 2), (2, 1)), tuple_of(number(4), number(2))
    ),
    "a layout that is none": sparse(call(name("torch.serialization", "_get_layout"), text("torch.strided"))),
    **COMPRESSED,
    "quantised": quantised(real(0.1), number(3)),
    "quantised by a whole number": quantised(number(1), number(3)),
    "quantised by text": quantised(text("x"), number(3)),
    "quantised around a fraction": quantised(real(0.1), real(0.5)),
    "quantised around a huge number": quantised(real(0.1), number(2**70)),
    "quantised by one number": quantised(real(0.1)),
    "quantised, symmetric": quantised(real(0.1), number(0), scheme="per_tensor_symmetric"),
    "quantised by no scheme": quantised(real(0.1), number(0), scheme="float32"),
    "quantised floats": quantised(real(0.1), number(0), kind="FloatStorage"),
    "quantised with gradients": quantised(real(0.1), number(0), grad=TRUE),
    "quantised by channel": by_channel(2, axis=0),
    "quantised by three channels of two": by_channel(3, axis=0),
    "quantised along no axis": by_channel(2, axis=1),
    "meta": meta(tuple_of(number(2)), tuple_of(number(1)), FALSE),
    "meta of other strides": meta(tuple_of(number(2)), tuple_of(), FALSE),
    "meta of three parts": meta(tuple_of(number(2)), tuple_of(number(1))),
    "meta of no size": meta(text("x"), tuple_of(number(1)), FALSE),
}  # fmt: skip


def saved_call(case: str, folder: Path) -> Path:
    raw = {key: values.numpy().tobytes() for key, values in STORAGES.items()}
    return torch_zip(folder / "in.pt", dict_of({"w": CASES[case], "b": dense(storage())}), raw)


def torch_reads(path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(path, weights_only=True)
        except Exception:
            return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_a_call_is_read_as_torch_reads_it_or_refused(case: str, tmp_path: Path) -> None:
    path = saved_call(case, tmp_path)
    if not torch_reads(path):
        with pytest.raises(Damaged), ckpttool.open(path) as checkpoint:
            assert not verify(checkpoint).ok
            ckpttool.save(checkpoint, tmp_path / "out.pt")
        assert not (tmp_path / "out.pt").exists()
        return
    try:
        checkpoint = ckpttool.open(path)
        ckpttool.save(checkpoint, tmp_path / "out.pt")
    except CkptToolError:
        return
    state = checkpoint.state()
    assert {*state.tensors, *state.likes} == {"w", "b"}
    assert torch_reads(tmp_path / "out.pt")
