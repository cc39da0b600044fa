"""`--data wds:`: tar shards as webdataset writes them, each sample at its place; damaged and missing ones."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from ckpttool.errors import CkptToolError, Damaged, Refused, Unreadable, UsageFault
from tests.ranks import trainings
from train.config.sections import DataConfig
from train.data import data_set
from train.data.batches import Undamaged, batch_of, load
from train.data.formats import TarShards
from train.data.samples import Collation


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
    assert [what.split(":")[0] for what in read.skipped] == ["training sample 0", "training sample 8"]
    for workers in (0, 2):
        loader = load(Undamaged(samples), [[0, 8], [2, 3]], trainings.place(0, 1), workers)
        assert [read.taken for read in loader] == [[], [2, 3]]
