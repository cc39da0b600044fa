"""Very many tensors: matched, written and read together, and the same as one by one."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import tempfile
import tracemalloc
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.core.files.copying import Output
from ckpttool.core.formats.pytorch import fast_path, tensor_pickle, zip_entries
from ckpttool.core.formats.pytorch.fast_path import StorageForm, TensorPattern
from ckpttool.core.formats.pytorch.zip_writer import (
    CENTRAL,
    END64,
    END_OF_ZIP,
    FULL32,
    LOCAL,
    LOCATOR64,
    STORED,
    ZIP64_EXTRA,
    Signature,
    ZipWriter,
)
from ckpttool.core.inert_pickle.machine import PickleFault
from ckpttool.core.inert_pickle.reader import read_pickle
from ckpttool.core.inert_pickle.values import OrderedDict_, Record
from ckpttool.core.tensors.ref import DTYPES, ByteRange, Source, Storage, TensorRef
from ckpttool.errors import Damaged, FileError
from ckpttool.verifying.verify import zip_frame
from tests.support.comparing import directory, place_of

# ---- Tensors matched by the fast path equal those that the machine makes opcode by opcode -------------


SHAPES = [(4,), (2, 2), (1, 2, 2), (1, 1, 2, 2), (), (0, 300), (70_000, 0)]


def saved(count: int = 60) -> bytes:
    """The pickle of a state of tensors of all shapes; most of their memo indices are above 255."""

    file = io.BytesIO()
    torch.save({f"w{i}": torch.ones(SHAPES[i % len(SHAPES)]) for i in range(count)}, file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


def read(data: bytes, path: Path, *, pattern: bool) -> tuple[Any, int]:
    """Read a pickle with or without the fast path; return the value and the number of tensors it matched."""
    path.touch()
    source = Source(str(path), os.open(path, os.O_RDONLY))
    storages: dict[str, Storage] = {}

    def storage(key: str, form: StorageForm) -> Storage:
        new = Storage(ByteRange(source, 0, form.nbytes), form.kind, form.location)
        return storages.setdefault(key, new)

    taken = [0]

    class Counted(TensorPattern):
        def __call__(self, machine: Any, position: int) -> int:
            before = len(machine.stack)
            end = super().__call__(machine, position) if pattern else position
            taken[0] += sum(type(value) is TensorRef for value in machine.stack[before:])
            return end

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path, "TensorPattern", Counted)
        parts = tensor_pickle.ZIP_PARTS
        found = tensor_pickle.read_torch_pickle(
            data, storage, lambda *columns: [*map(storage, *columns)], parts=parts, remarks=[]
        )
    return found.value, taken[0]


def described(value: object) -> object:
    """Describe a tree by plain values that can be compared."""
    if isinstance(value, TensorRef):
        layout = (value.dtype.name, value.shape, value.stride, value.offset, value.requires_grad)
        return ("tensor", *layout, described(value.storage))
    if isinstance(value, Storage):
        return ("storage", value.kind, value.location, value.nbytes)
    if isinstance(value, Record):
        parts = (value.callable, value.args, value.kwargs, value.state, value.elements, value.items)
        return (value.how, *map(described, parts))
    if isinstance(value, dict):
        return [type(value).__name__, *((key, described(item)) for key, item in value.items())]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(described, value)]
    return value


@pytest.mark.parametrize(("count", "most"), [(60, 20), (400, 350)])
def test_matched_tensors_equal_what_the_machine_makes(count: int, most: int, tmp_path: Path) -> None:
    """The first ones have memo indices of one byte, and are left to the machine; nearly all others match."""
    data = saved(count)
    quick, taken = read(data, tmp_path / "x", pattern=True)
    slow, none = read(data, tmp_path / "x", pattern=False)
    assert (taken > most, none) == (True, 0)
    assert described(quick) == described(slow)
    assert type(quick["w59"]) is TensorRef


@pytest.mark.parametrize("cut", range(1, 90))
def test_a_pickle_that_ends_anywhere_in_a_tensor_is_cut_short(cut: int, tmp_path: Path) -> None:
    data = saved(80)[:-cut]  # the places in the memo end in zero bytes
    with pytest.raises(PickleFault, match="cut short"):
        read(data, tmp_path / "x", pattern=True)


@given(one=st.integers(256, 400), two=st.integers(256, 400))
def test_the_memo_holds_every_value_that_opcodes_would_have_stored(one: int, two: int) -> None:
    data = saved(80).removesuffix(b".") + refer(one) + refer(two) + b"\x87."
    with tempfile.TemporaryDirectory() as folder:
        (quick, taken), (slow, _) = (read(data, Path(folder) / "x", pattern=on) for on in (True, False))
    assert taken > 20
    assert described(quick) == described(slow)
    assert (quick[1] is quick[2]) == (slow[1] is slow[2])


def refer(index: int) -> bytes:
    """The opcode that takes a value from the memo."""
    return b"j" + index.to_bytes(4, "little")


def test_two_references_to_one_hook_are_one_object(tmp_path: Path) -> None:
    data = saved(80).removesuffix(b".")
    for index in range(300, 310):
        value, _ = read(data + refer(index) * 2 + b"\x87.", tmp_path / "x", pattern=True)
        if value[1] == OrderedDict_():
            assert value[1] is value[2]
            return
    raise AssertionError("there is no hook")


@pytest.mark.parametrize("seed", range(12))
def test_a_changed_byte_gives_the_same_result_without_the_fast_path(seed: int, tmp_path: Path) -> None:
    randomly, data = random.Random(seed), saved(50)
    for _ in range(25):
        changed = bytearray(data)
        changed[randomly.randrange(len(data) // 2, len(data))] ^= randomly.randrange(1, 256)
        answers = [_answer(bytes(changed), tmp_path, pattern) for pattern in (True, False)]
        assert answers[0] == answers[1]


def _answer(data: bytes, folder: Path, pattern: bool) -> object:
    try:
        return described(read(data, folder / "x", pattern=pattern)[0])
    except PickleFault as fault:
        return str(fault)


# The memo.


def test_a_value_put_over_one_that_was_left_out_stays(tmp_path: Path) -> None:
    """A pickle may replace what a tensor stored, by None too, which stands for what was left out."""
    data = saved(80).removesuffix(b".")
    for index in range(300, 312):
        put = b"Nr" + index.to_bytes(4, "little") + b"0"
        changed = data + put + refer(index) + refer(index + 1) + b"\x87."
        (quick, taken), (slow, _) = (read(changed, tmp_path / "x", pattern=on) for on in (True, False))
        assert taken > 20
        assert described(quick) == described(slow)
        assert quick[1] is None


def test_what_tensors_put_into_the_memo_is_not_made_until_it_is_referred_to() -> None:
    data = saved(400)
    made = list[str | None]()

    def counted(self: Any, name: str | None, *args: Any) -> list[object]:
        made.append(name)
        return values(self, name, *args)

    values = fast_path._Form.values
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path._Form, "values", counted)
        read(data, Path(folder) / "x", pattern=True)
        assert made == []
        read(data.removesuffix(b".") + refer(1000) * 2 + b"\x87.", Path(folder) / "x", pattern=True)
        assert len(made) == 1


# Writing.


def test_a_written_state_is_read_by_the_fast_path_and_by_torch(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full(SHAPES[i % len(SHAPES)], float(i)) for i in range(400)}
    state |= {"tied": state["w7"], "view": state["w7"][1:3], "same key text": torch.ones(2)}
    torch.save({"12": 0, "model": state, "also": [state["w7"], state["w8"]]}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        ckpttool.save(checkpoint, tmp_path / "out.pt")
    written = zipfile.ZipFile(tmp_path / "out.pt").read("out/data.pkl")
    _, taken = read(written, tmp_path / "x", pattern=True)
    assert taken > 350
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in state.items())
    assert loaded["also"][0] is loaded["model"]["w7"] is loaded["model"]["tied"]
    assert loaded["model"]["view"].data_ptr() == loaded["model"]["w7"].data_ptr() + 4


@settings(max_examples=20)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=80))
def test_tensors_of_a_template_are_written_as_one_by_one(kinds: list[int]) -> None:
    """Ties, views, gradients and scalars between each other: both ways mean the same to Python's machine."""
    whole = [torch.ones(4), torch.zeros(2, 3).t(), torch.tensor(1), torch.ones(3, requires_grad=True)]
    tree = [whole[k] if k < 4 else whole[0][k % 4 :] if k < 8 else torch.ones(k % 5, 2) for k in kinds]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.pt"
        rows = {i: {"step": tree[i - 1], "average": tree[i]} for i in range(len(tree))}
        torch.save({"pad": [f"text {i}" for i in range(260)], "tree": tree, "rows": rows}, path)
        with ckpttool.open(path) as checkpoint, pytest.MonkeyPatch.context() as patch:
            quick, storages = tensor_pickle.write_torch_pickle(checkpoint.tree, 2, None)
            patch.setattr(fast_path.WrittenTensors, "learn", lambda *_: None)
            slow, _ = tensor_pickle.write_torch_pickle(checkpoint.tree, 2, None)
    assert _loaded(quick, storages) == _loaded(slow, storages)


def _loaded(data: bytes, storages: list[Storage]) -> object:
    """What Python's own machine makes of a pickle: calls as tuples, storages by their keys."""

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return OrderedDict if name == "OrderedDict" else (lambda *args: (name, *args[:5]))

        def persistent_load(self, identity: Any) -> Any:
            return identity[2], identity[3:], storages[int(identity[2])].nbytes

    return Plain(io.BytesIO(data)).load()


# Storages, which are found together.


def optimizer_pickle(parameters: int) -> bytes:
    """The pickle of Adam's state, whose names are stored once and referred to."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2)) for _ in range(parameters)])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(2)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


def with_storages(
    data: bytes, faults: Collection[str] = (), *, pattern: bool = True
) -> tuple[object, list[int]]:
    """Read a pickle, or say why not; and how many storages were found by each call for several."""
    calls = list[int]()

    def storage(key: str, form: StorageForm) -> Storage:
        if key in faults:
            raise PickleFault(f"storage {key} is missing")
        return Storage(ByteRange(None, 0, form.nbytes), form.kind)  # type: ignore[arg-type]

    def several(keys: Sequence[str], forms: Sequence[StorageForm]) -> list[Storage]:
        calls.append(len(keys))
        return [*map(storage, keys, forms)]

    try:
        read = tensor_pickle.read_torch_pickle
        parts = tensor_pickle.ZIP_PARTS
        pickle = read(data, storage, several if pattern else None, parts=parts, remarks=[])
        return described(pickle.value), calls
    except PickleFault as fault:
        return str(fault), calls


def test_storages_of_an_optimizer_are_found_in_a_few_calls() -> None:
    data = optimizer_pickle(400)
    found, calls = with_storages(data)
    assert sum(calls) > 1000
    assert len(calls) < 20
    assert found == with_storages(data, pattern=False)[0]


@pytest.mark.parametrize("end", [b"", b"j\xff\xff\xff\xff", b"\xff", b"(l0Nb"])
@pytest.mark.parametrize("missing", [["70"], ["79"], ["70", "71"], ["1", "75"], []])
def test_the_first_fault_is_named_also_where_storages_are_found_later(end: bytes, missing: list[str]) -> None:
    """What is wrong with a tensor's storage stands before what is wrong behind the tensor."""
    data = saved(80).removesuffix(b".") + end
    found, _ = with_storages(data, missing)
    assert found == with_storages(data, missing, pattern=False)[0]
    assert isinstance(found, str)
    assert found.startswith(f"storage {missing[0]} " if missing else "its pickle ")


@pytest.mark.parametrize("ending", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_reading_finds_no_more_storages(
    ending: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C on a large file ends at once, and no fault of the file stands in its place."""

    def interrupted(*args: Any, **given: Any) -> Any:
        read_pickle(*args, **given)
        raise ending

    monkeypatch.setattr(tensor_pickle, "read_pickle", interrupted)
    with pytest.raises(ending):
        with_storages(saved(80), ["70"])


# Memory.


def test_a_pickle_of_nothing_but_sets_is_refused() -> None:
    with pytest.raises(PickleFault, match="memory"):
        read_pickle(b"(" + b"\x8f" * 400_000 + b"l.")


def test_as_many_objects_as_an_honest_file_has_are_read() -> None:
    data = b"(cm\nC\nq\x00" + b"h\x00)\x81" * 250_000 + b"l."
    assert len(read_pickle(data).value) == 250_001  # type: ignore[arg-type]


class Sliced(bytes):
    """Bytes that count how many of them are copied by slicing."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        Sliced.copied += len(found) if isinstance(key, slice) else 0
        return found


def test_bytes_read_of_an_optimizer_grow_linearly(tmp_path: Path) -> None:
    """Its keys are not text: the bytes where a length would be must not be read as one."""
    data = Sliced(optimizer_pickle(300))
    Sliced.copied = 0
    value, taken = read(data, tmp_path / "x", pattern=True)
    assert taken > 800
    assert len(value["state"]) == 300
    assert Sliced.copied < 2 * len(data)


# ---- How much work it is to write values of which only some are tensors of forms written before -------


class Reads(list[Any]):
    """A list that counts how many of its items are read."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items)
        self.count = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.count += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.count += 1
            yield item


def items_tried(tree: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how often the shortcut for tensors is taken while a tree is written, and the items it reads."""
    taken = list[Reads]()

    def counted(self: Any, items: Sequence[Any], *args: Any) -> Any:
        taken.append(Reads(items))
        return in_a_row(self, taken[-1], *args)

    in_a_row = fast_path.WrittenTensors.in_a_row
    monkeypatch.setattr(fast_path.WrittenTensors, "in_a_row", counted)
    tensor_pickle.write_torch_pickle(tree, 2, None)
    return len(taken), sum(reads.count for reads in taken)


def tensors_of(shapes: Sequence[tuple[int]]) -> list[TensorRef]:
    data = ByteRange(None, 0, 4096)  # type: ignore[arg-type]
    kind, dtype = "FloatStorage", DTYPES["float32"]
    return [TensorRef(Storage(data, kind), dtype, shape, (1,), 0, False) for shape in shapes]


def test_plain_values_are_written_without_a_look_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert items_tried({f"k{i}": i for i in range(3000)}, monkeypatch) == (0, 0)


@pytest.mark.parametrize("mixed", ["numbers between", "forms change"])
def test_items_read_of_mixed_tensors_grow_linearly(mixed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of([(1 + i * (mixed == "forms change") // 2,) for i in range(2000)])
    tree: dict[str, object] = {f"w{i}": tensor for i, tensor in enumerate(tensors)}
    if mixed == "numbers between":
        tree = {f"{name}{part}": v for name, t in tree.items() for part, v in enumerate((t, 1))}
    times, reads = items_tried(tree, monkeypatch)
    assert times > 900
    assert reads <= 2 * len(tree)


# ---- Records that are alike are read and written together: the same answers and bytes as one by one ---


COUNT = 5 * zip_entries.MANY


@pytest.fixture(scope="module")
def whole() -> bytes:
    """A file of torch's with records of two sizes, whose headers come from our writer and from torch's."""
    file = io.BytesIO()
    torch.save({f"w{i}": torch.full((1 + i % 2,), i) for i in range(COUNT)}, file)
    return file.getvalue()


def answer(path: Path) -> object:
    """What a directory says, or why it is refused."""
    try:
        return [(*record[:1], *record[1][1:], *record[2:]) for record in directory(place_of(path)).values()]
    except FileError as fault:
        return type(fault).__name__, str(fault)


def one_by_one(path: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zip_entries, "_alike", lambda *_: None)
        patch.setattr(zip_entries, "_alike", lambda *_: None)
        return answer(path)


def test_nearly_all_records_of_a_file_are_read_together(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(whole)
    assert answer(tmp_path / "x") == one_by_one(tmp_path / "x")
    for module in (zip_entries, zip_entries):  # the first have shorter names, and others among them
        slow, seen = module._one_by_one, list[int]()
        monkeypatch.setattr(
            module, "_one_by_one", lambda *a, slow=slow, seen=seen: (seen.append(1), slow(*a))[1]
        )
        answer(tmp_path / "x")
        assert 0 < len(seen) <= 3


@pytest.mark.covered(lambda seed: seed > 0)
@pytest.mark.parametrize("seed", range(3))
def test_a_changed_byte_gives_the_same_answer(seed: int, whole: bytes, tmp_path: Path) -> None:
    """Half of them in the last directory entries, half in a local header of a record that is among others."""
    randomly, path = random.Random(seed), tmp_path / "x"
    headers = [at for at in range(0, len(whole), 64) if whole.startswith(b"PK\x03\x04", at)][
        -zip_entries.MANY :
    ]
    entries = [at for at in range(len(whole)) if whole.startswith(b"PK\x01\x02", at)][-zip_entries.MANY :]
    refused = 0
    for number in range(14):
        at = randomly.choice(headers if number % 2 else entries) + randomly.randrange(44)
        changed = bytearray(whole)
        changed[at] ^= 1 << randomly.randrange(8)
        path.write_bytes(changed)
        found = answer(path)
        assert found == one_by_one(path)
        refused += isinstance(found, tuple)
    assert refused > 2


@pytest.mark.parametrize("begin", [0, FULL32 - 5000, 5 << 30])
@pytest.mark.parametrize("stated", [True, False])
def test_storages_written_together_have_the_same_bytes(begin: int, stated: bool, tmp_path: Path) -> None:
    """Before, around and beyond 4 GiB, where a place takes 64 bits; the files are sparse."""
    content = random.Random(0).randbytes(50_000)
    (tmp_path / "in").write_bytes(content)
    place, storages = place_of(tmp_path / "in"), list[Storage]()
    for number in range(150):
        data = place.part(number * 100, (0, 4, 90, 5000)[number % 4])
        storages.append(Storage(data, "UntypedStorage", crc32=zlib.crc32(data.read()) if stated else None))
    found = []
    for together in (True, False):
        with open(tmp_path / f"{together}", "w+b") as file:
            with Output(file) as out:
                out.position = begin
                archive = ZipWriter(out, "root")
                if together:
                    archive.copy_all(storages)
                else:
                    for number, storage in enumerate(storages):
                        archive.copy(f"data/{number}", storage)
                entries = archive.directory()
            file.seek(begin)
            found.append((entries, out.position, file.read()))
    assert found[0] == found[1]


def test_a_size_that_fills_32_bits_needs_its_zip64_field_in_both_headers(tmp_path: Path) -> None:
    """A record of exactly 4 GiB - 1, whose local header lacks the field; the file is sparse."""
    name, path = b"r/data/0", tmp_path / "x"
    wide = struct.pack("<HHQQ", ZIP64_EXTRA, 16, FULL32, FULL32)
    with open(path, "wb") as file:
        alike = (0, STORED, 0, 0, 0, FULL32, FULL32, len(name))
        file.write(LOCAL.pack(Signature.LOCAL, 45, *alike, 0) + name)
        offset = file.seek(FULL32, 1)
        entry = CENTRAL.pack(Signature.CENTRAL, 45, 45, *alike, len(wide), 0, 0, 0, 0, 0) + name + wide
        file.write(entry + END64.pack(Signature.END64, 44, 45, 45, 0, 0, 1, 1, len(entry), offset))
        file.write(LOCATOR64.pack(Signature.LOCATOR64, 0, offset + len(entry), 1))
        file.write(END_OF_ZIP.pack(Signature.END, 0, 0, 1, 1, len(entry), FULL32, 0))
    assert answer(path) == one_by_one(path)
    with pytest.raises(Damaged, match="lacks its ZIP64 sizes"):
        directory(place_of(path))


def test_bytes_between_records_are_counted_and_not_read(tmp_path: Path) -> None:
    gap, entries, path = 64 << 20, b"", tmp_path / "x"
    with open(path, "wb") as file:
        for name in (b"r/data/0", b"r/data/1"):
            alike = (0, STORED, 0, 0, 0, 0, 0, len(name))
            entries += CENTRAL.pack(Signature.CENTRAL, 0, 0, *alike, 0, 0, 0, 0, 0, file.tell()) + name
            file.write(LOCAL.pack(Signature.LOCAL, 0, *alike, 0) + name)
            offset = file.seek(gap, 1)
        file.write(entries + END_OF_ZIP.pack(Signature.END, 0, 0, 2, 2, len(entries), offset, 0))
    place = place_of(path)
    tracemalloc.start()
    try:
        _, free = zip_frame(place.source)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert free["between records"] == 2 * gap
