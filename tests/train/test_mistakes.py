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

stream = lambda: (Stream(), Stream())
negative = lambda: (Length(None), Length(None))
poisoned = pair(lambda index: (torch.full((3,), float("nan") if index == 20 else 1.0), index % 2))
numbers = lambda: (Made(lambda index: (torch.rand(3), torch.rand(2))),) * 2

class Stream(IterableDataset):
    classes = ["a", "b"]
    def __iter__(self):
        yield torch.rand(3), 0

class Sometimes(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.extra, self.passes = nn.Linear(3, 2), 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x) + (self.extra(x) if self.passes < 4 or len(x) == 1 else 0)

class OnRank1(Sometimes):
    def forward(self, x):
        return super().forward(x) + (0 if os.environ.get("RANK") == "1" else self.extra(x))

class Detached(Sometimes):
    def forward(self, x):
        out = super().forward(x) + 0 * self.extra(x)
        return out.detach() if self.passes == 4 else out

net = lambda num_classes: nn.Linear(3, num_classes)
sometimes = lambda: Sometimes()
forgetful = lambda: OnRank1()
detached = lambda: Detached()
"""


@pytest.fixture
def fails(tmp_path: Path, capsys: Any) -> Fails:
    """`fails(code, data, *flags)`: the one line in which a training ends."""

    def run(code: int, data: str, *flags: str) -> str:
        capsys.readouterr()
        before = {*multiprocessing.active_children()}
        own = [] if data.startswith("folder:") else ["--model", f"{data.partition(':')[0]}:net"]
        usual = ["--data", data, *own, "--epochs", "1", "--batch-size", "8", "--out", str(tmp_path / "run")]
        found = main.main([*usual, *flags])
        said = capsys.readouterr().err
        assert (found, said.count("\n")) == (code, 1), said
        assert said.startswith("error: ")
        assert {*multiprocessing.active_children()} <= before, "a loading process is left"
        return said

    return run


# ---- samples -------------------------------------------------------------------------------------------

LABEL = "as its label, not a class number"
SAMPLES = {
    "sequence": f"training sample 0 has a tensor of int64 with the shape [3] {LABEL}",
    "listed": f"training sample 0 has a list of 2 {LABEL}",
    "many": f"training sample 0 has a tensor of float32 with the shape [2] {LABEL}",
    "real": f"training sample 0 has a float {LABEL}",
    "text": f"training sample 0 has a str {LABEL}",
    "mapping": "training sample 0 is a dict, not (tensor, label)",
    "stream": "a stream that does not say its length, which --scheduler cosine needs",
    "negative": "--data: Length: __len__() should return >= 0",
    "growing": "has the shape 42, and sample 0 has 3",
}


@pytest.mark.parametrize("factory", SAMPLES)
def test_samples_that_are_no_tensor_with_a_class_are_refused(own, fails, factory):
    assert SAMPLES[factory] in fails(2, f"{own}:{factory}")


NO_GRADIENT = "in step 2 the loss of rank 0 does not depend on the parameters of --model"
UNUSED = "parameter extra.weight did not affect the output in step 2"
DURING = {
    "a label beyond the classes": ("beyond", "", "which is not one of the 2 classes"),
    "one of a loading process": ("beyond", "--workers 2", "which is not one of the 2 classes"),
    "a loading process that dies": (
        "dying",
        "--workers 2",
        "rank 0: a process that loads data (is killed by signal: Killed|exited unexpectedly)",
    ),
    "a loss of nan": ("poisoned", "--log-every 1", r"the loss is NaN by step [1-5]: training has diverged"),
    "a parameter that is not always used": ("plain", "--model {own}:sometimes", UNUSED),
    "a loss without a gradient": ("plain", "--model {own}:detached", NO_GRADIENT),
}


@pytest.mark.parametrize("what", DURING)
def test_what_goes_wrong_during_the_training_is_named(own, fails, what):
    factory, flags, said = DURING[what]
    assert re.search(said, fails(1, f"{own}:{factory}", *flags.format(own=own).split()))


def test_labels_may_be_integers_of_any_size(own, tmp_path):
    flags = ["--data", f"{own}:small_integers", "--model", f"{own}:net", "--epochs", "1"]
    assert main.main([*flags, "--out", str(tmp_path / "run")]) == 0


def test_a_parameter_that_one_rank_does_not_use_is_named_and_all_ranks_end(own, tmp_path):
    flags = ["--data", f"{own}:numbers", "--model", f"{own}:forgetful", "--task", "regression"]
    command = [sys.executable, "train/main.py", "--spawn", "2", *flags, "--out", str(tmp_path / "run")]
    ended = start(command)
    assert ended.returncode == 1, ended.stderr
    assert UNUSED in ended.stderr
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
    chunks = [b"IHDR" + header, b"IDAT" + zlib.compress(b""), b"IEND"]
    packed = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("place", [4, 5], ids=["test sample", "training sample"])
def test_an_image_that_cant_be_decoded_is_named(images, fails, workers, place):
    whole = (images / "dog" / f"{place}.png").read_bytes()
    (images / "dog" / f"{place}.png").write_bytes(whole[: whole.index(b"IDAT") + 6])
    said = fails(3, f"folder:{images}", "--workers", workers)
    hint = "--skip-damaged leaves out training samples, but no test samples"
    assert said == f"error: {images}/dog/{place}.png: is not a readable image ({hint})\n"


NO_IMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda path: path.write_text("not at all"), "is not a readable image"),
    "decompression bomb": (bomb, "is an image of more pixels than Pillow decodes"),
    "named pipe": (os.mkfifo, "is not a regular file"),
    "link to nothing": (lambda path: path.symlink_to("nowhere.png"), "no such file"),
}


@pytest.mark.timeout(30)  # a pipe is not waited for
@pytest.mark.parametrize("flags", [[], ["--resize", "8"]], ids=["", "resized"])
@pytest.mark.parametrize("what", NO_IMAGES)
def test_what_is_no_image_among_the_images_is_refused_by_name(images, fails, what, flags):
    make, said = NO_IMAGES[what]
    make(images / "dog" / "x.png")
    assert fails(3, f"folder:{images}", *flags).startswith(f"error: {images}/dog/x.png: {said}")


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

pair = lambda: (Files(), Files())
net = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
"""


RAISED = {
    "open('/nowhere/7.png')": "/nowhere/7.png: no such file or directory: training sample 7 of --data ",
    "raise OSError('truncated')": "own.py:pair: training sample 7 can't be read: truncated",
}


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("code", RAISED)
def test_a_file_that_a_user_s_data_set_can_t_read_is_named_with_its_sample(tmp_path, fails, workers, code):
    (tmp_path / "own.py").write_text(UNREADABLE.format(fails=code))
    assert RAISED[code] in fails(3, f"{tmp_path}/own.py:pair", "--workers", workers)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_sample_on_which_a_user_s_data_set_fails_is_named_with_the_line(tmp_path, fails, workers):
    (tmp_path / "own.py").write_text(UNREADABLE.format(fails="raise ValueError('corrupt file 7.jpg')"))
    said = fails(3, f"{tmp_path}/own.py:pair", "--workers", workers)
    where = f"(at {tmp_path}/own.py:11)"
    assert f"own.py:pair: training sample 7 can't be read: ValueError: corrupt file 7.jpg {where}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("code", "also"), [("0", ""), ("'no licence'", ": no licence")])
def test_a_rank_whose_model_calls_sys_exit_says_where_and_fails(tmp_path, capsys, code, also):
    model = own_model(tmp_path, f"sys.exit({code})")
    assert main.main(["--data", "fake:16", "--model", model, "--out", str(tmp_path / "run")]) == 1
    assert f"error: rank 0: {tmp_path}/own.py:12 ended the process{also} (" in capsys.readouterr().err
