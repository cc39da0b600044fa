"""Where samples are read from: files of tokens, packed documents, tar shards, data sets of Hugging Face."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from ckpttool.errors import CkptToolError, Damaged, Refused, Unreadable, UsageFault
from tests.ranks import trainings
from tests.ranks.runs import Source
from tests.support.running import open_files
from train.config.sections import DataConfig, TrainConfig
from train.data import data_set, formats
from train.data.batches import Undamaged, batch_of, load
from train.data.formats import OPEN, TarShards, Tokens, files_of
from train.data.samples import IGNORED, Collation
from train.data.stream import Packed, Position, Shard, Stream


def write(path: Path, tokens: object) -> str:
    numpy.asarray(tokens, dtype="<u2").tofile(path)
    return str(path)


@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_each_token_but_a_files_first_is_a_target_once(tmp_path, block):
    lengths = [0, 1, 2, 22, 7, 8]
    files = [list(range(100 * n, 100 * n + length)) for n, length in enumerate(lengths)]
    blocks = Tokens([write(tmp_path / f"{n}.bin", tokens) for n, tokens in enumerate(files)], block)
    inputs, targets = (
        torch.stack(part) for part in zip(*map(blocks.__getitem__, range(len(blocks))), strict=True)
    )
    assert inputs.shape == targets.shape == (len(blocks), block)
    counts = targets != IGNORED
    assert sorted(targets[counts].tolist()) == sorted(t for tokens in files for t in tokens[1:])
    assert (targets[counts] == inputs[counts] + 1).all()
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_more_files_to_test_with_are_named_by_also_test(tmp_path):
    names = [write(tmp_path / f"{n}.bin", range(10 * n + 1)) for n in (1, 2, 3)]
    config = TrainConfig.of(
        data=f"tokens:{names[0]}", task="language-model", block_size=5, test_data="fake:1"
    )
    data = data_set.load(config.changed(test_data=f"tokens:{names[1]}").data)
    named = config.changed(also_test=(f"ood=tokens:{names[2]}",))
    (name, other), *_ = data_set.with_others(named.data, data).others.items()
    assert (name, len(data.test), len(other.test)) == ("ood", 4, 6)


def test_tokens_above_32767_are_read_as_unsigned(tmp_path):
    inputs, targets = Tokens([write(tmp_path / "a.bin", [65535, 40000])], 1)[0]
    assert (inputs.item(), targets.item()) == (65535, 40000)


def test_more_files_than_may_be_open(tmp_path):
    paths = [write(tmp_path / f"{n}.bin", [n, n + 1]) for n in range(OPEN + 20)]
    blocks = pickle.loads(pickle.dumps(Tokens(paths, 1)))
    before = open_files()
    assert [blocks[n][1].item() for n in range(len(blocks))] == [n + 1 for n in range(OPEN + 20)]
    assert 0 < (open_files() - before).total() <= OPEN


def test_10_to_the_9_blocks_take_no_memory(tmp_path):
    path = tmp_path / "sparse.bin"
    path.touch()
    os.truncate(path, 2 * (4 * 10**9 + 1))
    tracemalloc.start()
    blocks = Tokens([str(path)], 4)
    assert len(blocks) == 10**9
    assert blocks[10**9 - 1][1].tolist() == [0, 0, 0, 0]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1e6


def test_a_file_that_becomes_shorter_or_goes_is_named(tmp_path):
    paths = [write(tmp_path / f"{n}.bin", range(40)) for n in range(2)]
    blocks = Tokens(paths, 4)
    os.truncate(paths[0], 20)
    assert blocks[0][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(Damaged, match=r"0.bin: has become shorter"):
        blocks[5]
    os.remove(paths[1])
    with pytest.raises(Unreadable, match=r"1.bin"):
        blocks[15]


def test_what_is_no_token_file_is_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(Damaged, match="3 bytes are no uint16 tokens"):
        Tokens([str(tmp_path / "odd.bin")], 4)
    empty = write(tmp_path / "empty.bin", [])
    for flags, wrong in (
        ({"task": "language-model"}, "needs the tokens of a sample"),
        ({"block_size": 4}, "tokens have no classes"),
        ({"block_size": 4, "task": "language-model"}, "there are no training samples"),
    ):
        with pytest.raises(UsageFault, match=wrong):
            data_set.load(TrainConfig.of(data=f"tokens:{empty}", **flags).data)


# ---- documents packed into blocks ----------------------------------------------------------------------


DOCUMENTS = [[1, 2, 3], [], [10], [20, 21], [30, 31, 32, 33, 34, 35, 36, 37, 38], [40, 41]]
PAIRS = sorted((a, b) for document in DOCUMENTS for a, b in itertools.pairwise(document))


@pytest.mark.parametrize("block", [1, 2, 5, 50])
@pytest.mark.parametrize("kind", [list, numpy.array, torch.tensor, lambda tokens: {"input_ids": tokens}])
def test_each_token_is_the_target_of_the_one_before_it_in_its_document(block, kind):
    documents = [kind(document) for document in DOCUMENTS if document]
    blocks = list(Packed(documents, block))
    inputs, targets = (torch.cat(part) for part in zip(*blocks, strict=True))
    assert {len(part) for pair in blocks for part in pair} == {block}
    counts = targets != IGNORED
    assert sorted(zip(inputs[counts].tolist(), targets[counts].tolist(), strict=True)) == PAIRS
    assert sum(map(len, DOCUMENTS)) <= len(inputs) < sum(map(len, DOCUMENTS)) + block


@pytest.mark.parametrize("done", range(6))
def test_a_position_is_restored_with_what_is_left_of_a_document(done):
    whole = [pair[0].tolist() for pair in Packed(Source(DOCUMENTS), 3)]
    shard = Shard(Packed(Source(DOCUMENTS), 3))
    iterator = shard.open(0, None)
    for _ in range(done):
        next(iterator)
    state = shard.state(iterator)
    rest = Shard(Packed(Source(DOCUMENTS), 3)).open(0, state)
    assert [pair[0].tolist() for pair in rest] == whole[done:]


def test_documents_that_go_on_where_they_were_left_begin_anew():
    packed = Packed(Source(DOCUMENTS), 3)
    whole = [pair[0].tolist() for pair in packed]
    shard = Shard(Packed(Source(DOCUMENTS), 3))
    for _ in range(2):
        next(shard.open(0, None))
    assert [pair[0].tolist() for pair in shard.open(0, None)] == whole


@pytest.mark.long
def test_a_long_document_is_packed_in_a_time_that_grows_with_its_length():
    """Not with its square: to move four million numbers 20,000 times would take minutes."""
    packed = Packed([list(range(4_000_000))], 4)
    assert sum(1 for _ in itertools.islice(packed, 20_000)) == 20_000


def test_documents_without_a_position_have_none_when_packed():
    packed = Packed(DOCUMENTS, 3)
    assert Shard(packed).state(iter(packed)) is None


@pytest.mark.parametrize("document", [{"text": "a"}, [0.5], [[1]]], ids=["no tokens", "numbers", "rows"])
def test_what_is_no_document_is_refused(document):
    with pytest.raises(UsageFault, match="--block-size"):
        list(Packed([document], 3))


@pytest.mark.parametrize("more", [{"labels": [-100, 2, 3]}, {"attention_mask": [1, 1, 0]}])
def test_a_document_of_which_not_all_tokens_count_is_refused_and_not_packed_as_if_they_did(more):
    with pytest.raises(UsageFault, match=next(iter(more))):
        next(iter(Packed([{"input_ids": [1, 2, 3], **more}], 3)))
    plain = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 1]}
    assert next(iter(Packed([plain], 3)))[1].tolist() == [2, 3, IGNORED]


# ---- patterns of files: braces, then globs -------------------------------------------------------------


def test_braces_and_globs_name_files(tmp_path, monkeypatch):
    names = ["a-00.bin", "a-01.bin", "a-10.bin", "b-1.bin"]
    for name in names:
        (tmp_path / name).touch()

    def found(pattern: str) -> list[str]:
        return [os.path.basename(path) for path in files_of(f"{tmp_path}/{pattern}", "--data tokens:")]

    assert found("a-{00..01}.bin") == names[:2]
    assert found("{a-1{0,0},b-1}.bin") == ["a-10.bin", "b-1.bin"]
    assert found("{a-01,a-*}.bin") == ["a-01.bin", "a-00.bin", "a-10.bin"]
    assert found("b-{1..1}.bin") == ["b-1.bin"]
    with pytest.raises(Unreadable, match=r"a-02.bin: no such file"):
        found("a-{00..02}.bin")
    with pytest.raises(UsageFault, match="no file matches"):
        found("c-*.bin")
    monkeypatch.setattr(formats, "MOST", 10)
    with pytest.raises(UsageFault, match="more than 10 files"):
        found("{0..9}{0..999999999}*")


# ---- tar shards, as webdataset writes them -------------------------------------------------------------


def picture(number: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (4, 4), (number * 9 % 256, 3, 200)).save(data, "png")
    return data.getvalue()


def shard(path: Path, samples: range) -> str:
    """Write a shard of images with their classes."""
    with tarfile.open(path, "w") as tar:
        for number in samples:
            for ending, data in (("png", picture(number)), ("cls", b"%d" % (number % 3))):
                member = tarfile.TarInfo(f"some.folder/{number:05d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return str(path)


def opened(*paths: str, labelled: bool = True, skip_damaged: bool = False) -> TarShards:
    parts = data_set.load_parts(config(",".join(paths), labelled=labelled, skip_damaged=skip_damaged))
    assert isinstance(parts.train, TarShards)
    return parts.train


def config(paths: str, *, labelled: bool = True, **settings: Any) -> DataConfig:
    task = "classification" if labelled else "model-loss"
    paths = f"{{{paths}}}" if "," in paths else paths
    return DataConfig(name=f"wds:{paths}", task=task, mean=(0.0,), std=(1.0,), **settings)


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    (tmp_path / "b.tar").touch()  # an empty file, and an archive of nothing
    return [
        shard(tmp_path / "a.tar", range(7)),
        str(tmp_path / "b.tar"),
        shard(tmp_path / "c.tar", range(0)),
        shard(tmp_path / "d.tar", range(7, 10)),
    ]


def test_each_sample_has_its_place_over_all_shards(three):
    samples = opened(*three)
    assert len(samples) == 10
    assert samples.labels.tolist() == [number % 3 for number in range(10)]
    for number in range(10):
        inputs, label = samples[number]
        assert (inputs.shape, label) == ((3, 4, 4), number % 3)
        assert (inputs[0, 0, 0] * 255).round() == number * 9 % 256
    assert torch.equal(pickle.loads(pickle.dumps(samples))[8][0], samples[8][0])
    data = data_set.load(config(",".join(three)))
    assert data.classes == ("0", "1", "2")
    assert data.test is None


def test_members_are_decoded_by_their_ending_and_nothing_is_unpickled(tmp_path):
    numbers = io.BytesIO()
    numpy.save(numbers, numpy.arange(6).reshape(2, 3))
    members = {"npy": numbers.getvalue(), "meta.json": json.dumps({"a": [1]}).encode(), "txt": "ä".encode()}
    members |= {"pyd": pickle.dumps([1]), "cls": b"17"}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for ending, data in members.items():
            member = tarfile.TarInfo(f"0001.{ending}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    found = opened(str(tmp_path / "a.tar"), labelled=False)[0]
    assert found["npy"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (found["meta.json"], found["txt"], found["cls"]) == ({"a": [1]}, "ä", 17)
    assert found["pyd"] == pickle.dumps([1])


def test_webdataset_finds_the_same_samples(three, tmp_path):
    wds = pytest.importorskip("webdataset", reason="the peer: it wrote the format")
    with wds.TarWriter(str(tmp_path / "e.tar")) as sink:
        for number in range(5):
            sink.write({"__key__": f"x/{number}.5", "seg.png": picture(number), "json": {"n": number}})
    paths = [three[0], three[3], str(tmp_path / "e.tar")]
    theirs = [
        {k: v for k, v in sample.items() if k[:2] != "__"}
        for sample in wds.WebDataset(paths, shardshuffle=False)
    ]
    samples = opened(*paths, labelled=False)
    assert len(samples) == len(theirs)
    for number, sample in enumerate(theirs):
        shard_number, members = samples._members(number)
        assert {name: samples._bytes(shard_number, *span) for name, span in members.items()} == sample


def archive(path: Path, members: list[tuple[str, bytes]]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return str(path)


def test_a_member_that_a_sample_has_twice_is_named_and_none_of_them_is_lost(tmp_path):
    twice = [("0.txt", b"a"), ("1.txt", b"b"), ("1.json", b"1"), ("1.txt", b"c")]
    path = archive(tmp_path / "twice.tar", twice)
    with pytest.raises(Damaged, match=r"has 1\.txt twice in one sample"):
        opened(path, labelled=False)
    assert len(opened(path, labelled=False, skip_damaged=True)) == 1


@pytest.mark.long
def test_as_many_endings_as_there_are_members(tmp_path):
    """Headers that differ in digits are made of one, as tarfile takes five seconds for them."""
    name, path = b"0.00000", tmp_path / "many.tar"
    header = tarfile.TarInfo(name.decode()).tobuf(tarfile.USTAR_FORMAT)
    rest, after = header[len(name) : 148], header[156:]
    checksum = int(header[148:154], 8) - sum(name)
    with open(path, "wb") as file:
        for member in (*(b"0.%05d" % number for number in range(1 << 16)), b"1.00000"):
            file.write(b"".join((member, rest, b"%06o\0 " % (checksum + sum(member)), after)))
        file.write(bytes(1024))
    assert len(opened(str(path), labelled=False)) == 2


@pytest.mark.parametrize(
    ("ending", "data"),
    [("npy", b""), ("npy", b"PK\3\4"), ("json", b"[" * 10**5), ("txt", b"\xff"), ("cls", b"one")],
)
def test_a_member_that_is_not_what_its_ending_says_is_named(tmp_path, ending, data):
    path = archive(tmp_path / "wrong.tar", [(f"0.{ending}", data)])
    with pytest.raises(Damaged, match=rf"the member \.{ending} at byte 512 is not what its ending says"):
        opened(path, labelled=False)[0]


def cut(path: str, keep: int) -> str:
    os.truncate(path, keep)
    return path


@pytest.mark.parametrize("keep", [100, 512, 600, 1024, 5000, 7 * 2048, 7 * 2048 + 300])
def test_a_shard_cut_anywhere_is_named_and_what_is_before_is_used(three, keep):
    cut(three[0], keep)
    with pytest.raises(Damaged, match=r"a\.tar"):
        opened(*three)
    samples = opened(*three, skip_damaged=True)
    whole = min((keep - 1) // 2048, 6)  # the last may lack members
    assert [samples[n][1] for n in range(len(samples))][-3:] == [1, 2, 0]
    assert len(samples) == whole + 3


def test_what_is_no_local_tar_is_refused(three, tmp_path):
    (tmp_path / "z.tar").write_bytes(b"no tar" * 500)
    (tmp_path / "z.tar.gz").write_bytes(gzip.compress(Path(three[0]).read_bytes()))
    for path, error in (("z.tar", Damaged), ("z.tar.gz", Refused), ("none.tar", Unreadable)):
        with pytest.raises(error, match=path):
            opened(str(tmp_path / path))
    with pytest.raises(UsageFault, match="on this machine"):
        opened("https://example.org/a.tar")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0001.txt"))
    with pytest.raises(UsageFault, match=r"has none of (jpg|cls)"):
        opened(str(tmp_path / "t.tar"))


def test_a_shard_damaged_in_the_middle_of_an_epoch_is_named_or_its_samples_are_left_out(three):
    samples = pickle.loads(pickle.dumps(opened(*three)))  # as in another process, which has not opened it yet
    os.remove(three[3])
    with open(three[0], "r+b") as file:
        file.seek(512)
        file.write(b"broken png")
    with pytest.raises(CkptToolError, match=r"a\.tar at byte 512"):
        samples[0]
    with pytest.raises(Unreadable, match=r"d\.tar"):
        samples[8]
    read = batch_of(Undamaged(samples), Collation(), [0, 1, 8])
    assert read.taken == [1]
    assert read.samples[1].tolist() == [1]
    assert [what.split(":")[0] for _, what in read.skipped] == ["training sample 0", "training sample 8"]
    for workers in (0, 2):
        loader = load(Undamaged(samples), [[0, 8], [2, 3]], trainings.place(0, 1), workers)
        assert [read.taken for read in loader] == [[], [2, 3]]


# ---- data sets of Hugging Face, whose shards are dealt to lanes ----------------------------------------


BATCH = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set of six shards of 5 to 10 rows."""
    datasets = pytest.importorskip("datasets", reason="the library that reads them")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for shard in range(6):
        rows = [json.dumps({"x": [shard, row], "label": row % 2}) for row in range(5 + shard)]
        (tmp_path / f"train-{shard}.jsonl").write_text("\n".join(rows))
    (tmp_path / "test-0.jsonl").write_text(json.dumps({"x": [9, 9], "label": 1}))
    return str(tmp_path)


def streamed(folder: str, **settings: Any) -> Stream:
    config = TrainConfig.of(
        data=f"hf:{folder}", task="model-loss", batch_size=BATCH, shuffle_window=4, **settings
    )
    stream = data_set.load(config.data).train
    assert isinstance(stream, Stream)
    stream.batch_size = BATCH
    return stream


def epoch(stream: Stream, number: int, start: int = 0) -> tuple[dict[int, tuple[int, ...]], list[Any]]:
    """Return the rows of an epoch by their place, and the positions after each step."""
    stream.set_epoch(number)
    rows: dict[int, tuple[int, ...]] = {}
    positions = []
    for place in range(start, 500, BATCH):
        read = stream.__getitems__(list(range(place, place + BATCH)))
        rows |= {at: tuple(row["x"].tolist()) for at, row in zip(read.taken, read.samples, strict=True)}
        positions.append(read.positions)
        if not any(read.more.values()):
            return rows, positions
    raise AssertionError("it did not end")


def test_each_row_comes_once_in_another_order_in_each_epoch(folder):
    stream = streamed(folder)
    assert (stream.lanes, stream.resumes) == (6, True)
    first, _ = epoch(stream, 0)
    second, _ = epoch(stream, 1)
    again, _ = epoch(stream, 0)
    assert sorted(first.values()) == sorted((shard, row) for shard in range(6) for row in range(5 + shard))
    assert sorted(second.values()) == sorted(first.values())
    assert list(second.values()) != list(first.values())
    assert again == first


def test_it_goes_on_from_any_step_in_another_process(folder, tmp_path):
    whole, positions = epoch(streamed(folder), 1)
    for step in (1, 3, 5):
        torch.save(
            {number: position._asdict() for number, position in positions[step - 1].items()}, tmp_path / "p"
        )
        stream = streamed(folder)
        saved = torch.load(tmp_path / "p", weights_only=True)
        stream.start = 1, {number: Position(**position) for number, position in saved.items()}
        rest, _ = epoch(stream, 1, step * BATCH)
        assert rest == {place: row for place, row in whole.items() if place >= step * BATCH}


def test_a_split_to_test_with_and_packed_documents(folder):
    given = {"data": f"hf:{folder}", "test_data": f"hf:{folder}:test", "task": "model-loss"}
    data = data_set.load(TrainConfig.of(**given, max_steps=1).data)
    assert len(data.test) == 1
    for shard in range(3):
        Path(folder, f"train-{shard}.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n{"input_ids": [5, 6]}')
    for shard in range(3, 6):
        Path(folder, f"train-{shard}.jsonl").unlink()
    packed = streamed(folder, block_size=4).head
    assert packed[0][0].tolist() == [1, 2, 3, 4]
    assert packed[3][0].tolist() == [5, 6, 0, 0]


def test_all_rows_of_unequal_shards_to_test_with_are_there_in_their_order(folder):
    config = TrainConfig.of(data=f"hf:{folder}", test_data=f"hf:{folder}", task="model-loss", max_steps=1)
    rows = [tuple(row["x"].tolist()) for row in data_set.load(config.data).test]
    assert rows == [(shard, row) for row in range(10) for shard in range(6) if row < 5 + shard]


def test_what_is_not_there_is_named(folder):
    with pytest.raises(Unreadable, match="hf:"):
        streamed(f"{folder}/none")
    with pytest.raises(UsageFault, match="no column of classes among x, label"):
        data_set.load(TrainConfig.of(data=f"hf:{folder}").data)
