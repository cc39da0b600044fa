"""Mistakes in the data and the model of a user: one line, the right exit code, and no traceback."""

from __future__ import annotations

import multiprocessing
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.ranks.programs import own_model, start
from train import main

Fails = Callable[..., str]

OWN = """
import os, torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

class Made(Dataset):
    classes = ["a", "b"]

    def __init__(self, make, size=40):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.make(index)

def pair(make):
    return lambda: (Made(make), Made(lambda index: (torch.rand(3), index % 2)))

plain = pair(lambda index: (torch.rand(3), index % 2))
small_integers = pair(lambda index: (torch.rand(3), torch.tensor(index % 2, dtype=torch.uint8)))
sequence = pair(lambda index: (torch.rand(3), torch.tensor([0, 1, 1])))
listed = pair(lambda index: (torch.rand(3), [0, 1]))
many = pair(lambda index: (torch.rand(3), torch.tensor([0.0, 1.0])))
real = pair(lambda index: (torch.rand(3), 0.5))
text = pair(lambda index: (torch.rand(3), "a"))
mapping = pair(lambda index: {"x": torch.rand(3), "y": 1})
beyond = pair(lambda index: (torch.rand(3), index))
growing = pair(lambda index: (torch.rand(3 if index < 39 else 42), 0))

def dies(index):
    if torch.utils.data.get_worker_info() is not None:
        os.kill(os.getpid(), 9)
    return torch.rand(3), 0

dying = pair(dies)

class Length(Made):
    def __len__(self):
        return -1

negative = lambda: (Length(None), Length(None))
poisoned = pair(lambda index: (torch.full((3,), float("nan") if index == 20 else 1.0), index % 2))
numbers = lambda: (Made(lambda index: (torch.rand(3), torch.rand(2))),) * 2

class Stream(IterableDataset):
    classes = ["a", "b"]
    def __iter__(self):
        yield torch.rand(3), 0

def stream():
    return Stream(), Stream()

class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.extra = nn.Linear(3, 2), nn.Linear(3, 2)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.always(x) + (self.extra(x) if self.passes < 4 or len(x) == 1 else 0)

def net(num_classes):
    return nn.Linear(3, num_classes)

def sometimes(num_classes=2):
    return Sometimes()

class OnRank1(Sometimes):
    def forward(self, x):
        return super().forward(x) + (0 if os.environ.get("RANK") == "1" else self.extra(x))

forgetful = lambda: OnRank1()
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@pytest.fixture
def fails(tmp_path: Path, capsys: Any) -> Fails:
    """`fails(code, *flags)`: the one line in which a training with these flags ends."""

    def run(code: int, *flags: str) -> str:
        capsys.readouterr()
        before = {*multiprocessing.active_children()}
        found = main.main([*flags, "--epochs", "1", "--batch-size", "8", "--out", str(tmp_path / "run")])
        said = capsys.readouterr().err
        assert (found, said.count("\n")) == (code, 1), said
        assert said.startswith("error: ")
        assert {*multiprocessing.active_children()} <= before, "a loading process is left"
        return said

    return run


# ---- samples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (
            "sequence",
            "training sample 0 has a tensor of int64 with the shape [3] as its label, not a class number",
        ),
        ("listed", "training sample 0 has a list of 2 as its label, not a class number"),
        (
            "many",
            "training sample 0 has a tensor of float32 with the shape [2] as its label, not a class number",
        ),
        ("real", "training sample 0 has a float as its label, not a class number"),
        ("text", "training sample 0 has a str as its label, not a class number"),
        ("mapping", "training sample 0 is a dict, not (tensor, label)"),
        ("stream", "Stream has no samples by index"),
        ("negative", "--data: Length: __len__() should return >= 0"),
        ("growing", "has the shape 42, and sample 0 has 3"),
    ],
)
def test_samples_that_are_no_tensor_with_a_class_are_refused(own, fails, factory, said):
    assert said in fails(2, "--data", f"{own}:{factory}", "--model", f"{own}:net")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_labels_beyond_the_classes_name_the_sample(own, fails, workers):
    said = fails(1, "--data", f"{own}:beyond", "--model", f"{own}:net", "--workers", workers)
    assert "which is not one of the 2 classes" in said


def test_labels_may_be_integers_of_any_size(own, tmp_path):
    flags = ["--data", f"{own}:small_integers", "--model", f"{own}:net", "--epochs", "1"]
    assert main.main([*flags, "--out", str(tmp_path / "run")]) == 0


def test_a_loading_process_that_dies_is_named(own, fails):
    said = fails(1, "--data", f"{own}:dying", "--model", f"{own}:net", "--workers", "2")
    assert re.search(
        "rank 0: a process that loads data (is killed by signal: Killed|exited unexpectedly)", said
    )


def test_a_loss_of_nan_ends_the_run_where_it_is_logged(own, fails):
    said = fails(1, "--data", f"{own}:poisoned", "--model", f"{own}:net", "--log-every", "1")
    assert re.search(r"the loss is NaN by step [1-5]: training has diverged", said)


def test_a_parameter_that_is_not_always_used_is_named(own, fails):
    said = fails(1, "--data", f"{own}:plain", "--model", f"{own}:sometimes")
    assert "parameter extra.weight did not affect the output in step 2" in said


def test_a_parameter_that_one_rank_does_not_use_is_named_and_all_ranks_end(own, tmp_path):
    flags = ["--data", f"{own}:numbers", "--model", f"{own}:forgetful", "--task", "regression"]
    command = [sys.executable, "train/main.py", "--spawn", "2", *flags, "--out", str(tmp_path / "run")]
    ended = start(command)
    assert ended.returncode == 1, ended.stderr
    assert "parameter extra.weight did not affect the output in step 2" in ended.stderr
    assert "Traceback" not in ended.stderr


# ---- images --------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def bomb(path: Path) -> None:
    """Write the header of a PNG of 100,000 by 100,000 pixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    packed = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("place", [4, 5], ids=["test sample", "training sample"])
def test_an_image_that_cant_be_decoded_is_named(images, fails, workers, place):
    whole = (images / "dog" / f"{place}.png").read_bytes()
    (images / "dog" / f"{place}.png").write_bytes(whole[: whole.index(b"IDAT") + 6])
    said = fails(3, "--data", f"folder:{images}", "--workers", workers)
    assert said == f"error: {images}/dog/{place}.png: is not a readable image\n"


@pytest.mark.parametrize("flags", [[], ["--resize", "8"]], ids=["", "resized"])
def test_a_decompression_bomb_is_refused(images, fails, flags):
    bomb(images / "dog" / "5.png")
    said = fails(3, "--data", f"folder:{images}", *flags)
    assert said.startswith(f"error: {images}/dog/5.png: is an image of more pixels than Pillow decodes")


@pytest.mark.timeout(30)
def test_a_named_pipe_among_the_images_is_refused_and_not_waited_for(images, fails):
    os.mkfifo(images / "dog" / "pipe.png")
    said = fails(3, "--data", f"folder:{images}")
    assert said == f"error: {images}/dog/pipe.png: is not a regular file\n"


def test_a_link_to_nothing_among_the_images_is_named(images, fails):
    (images / "dog" / "gone.png").symlink_to("nowhere.png")
    said = fails(3, "--data", f"folder:{images}")
    assert said == f"error: {images}/dog/gone.png: no such file\n"


# ---- a user's data set that can't read a file --------------------------------------------------------------

UNREADABLE = """
import torch
from torch.utils.data import Dataset

class Files(Dataset):
    classes = list("ab")
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == 7 and torch.distributed.is_initialized():
            {fails}
        return torch.rand(1, 8, 8), index % 2

def pair():
    return Files(), Files()
"""


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("open('/nowhere/7.png')", "/nowhere/7.png: no such file or directory: training sample 7 of --data "),
        ("raise OSError('truncated')", "own.py:pair: training sample 7 can't be read: truncated"),
    ],
    ids=["missing", "damaged"],
)
def test_a_file_that_a_user_s_data_set_can_t_read_is_named_with_its_sample(
    tmp_path, capsys, workers, fails, said
):
    (tmp_path / "own.py").write_text(UNREADABLE.format(fails=fails))
    data = f"{tmp_path}/own.py:pair"
    assert main.main(["--data", data, "--out", str(tmp_path / "run"), "--workers", workers]) == 3
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("code", "also"), [("0", ""), ("'no licence'", ": no licence")])
def test_a_rank_whose_model_calls_sys_exit_says_where_and_fails(tmp_path, capsys, code, also):
    model = own_model(tmp_path, f"sys.exit({code})")
    assert main.main(["--data", "fake:16", "--model", model, "--out", str(tmp_path / "run")]) == 1
    assert f"error: rank 0: {tmp_path}/own.py:12 ended the process{also} (" in capsys.readouterr().err
