"""Data sets by name, the errors when they are missing or malformed, and processes that load them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import random
import re
import struct
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from ckpttool.distributed.group import process_group
from ckpttool.errors import CkptToolError, Damaged, UsageFault
from tests.ranks import trainings
from tests.ranks.programs import OWN_DATA, start
from train import main
from train.config.sections import DataConfig, TrainConfig
from train.data import batches as loading
from train.data import builtin, data_set
from train.data import data_set as data
from train.model import builtin as models


def load(name: str, **flags: Any) -> data.Data:
    return data.load(DataConfig(name=name, **flags))


def labels(samples: Any) -> list[int]:
    return [int(samples[index][1]) for index in range(len(samples))]


# ---- digits and noise ----------------------------------------------------------------------------------


def test_every_digit_is_in_one_part_and_scaled_to_0_to_1():
    digits = load("digits")
    train, test = digits.train, digits.test
    assert (len(train), len(test), digits.shape, len(digits.classes)) == (1442, 355, (1, 8, 8), 10)
    pictures = torch.stack([part[i][0] for part in (train, test) for i in range(len(part))])
    assert (pictures.min(), pictures.max()) == (0, 1)
    assert sorted([*train.indices, *test.indices]) == list(range(1797))


def test_the_digits_are_divided_in_the_same_way_each_time_and_by_class():
    first, second = load("digits"), load("digits")
    assert first.test.indices == second.test.indices
    in_train, in_test = (torch.bincount(torch.tensor(labels(part))) for part in (first.train, first.test))
    assert torch.equal(in_test, (in_train + in_test) // 5)


@pytest.mark.long
def test_the_digits_are_scikit_learns_with_and_without_its_file(monkeypatch):
    from sklearn.datasets import load_digits

    ours, theirs = load("digits").train, load_digits()
    monkeypatch.setattr(builtin.os.path, "exists", lambda _: False)
    for index in (0, 700, -1):
        for samples in (ours, load("digits").train):
            picture, label = samples[index]
            place = samples.indices[index]
            assert torch.equal(picture[0], torch.tensor(theirs.images[place] / 16, dtype=torch.float32))
            assert label == theirs.target[place]


def test_the_digits_need_no_torchvision_and_import_no_scikit_learn():
    """It takes a second."""
    code = "import sys; sys.modules['torchvision'] = sys.modules['sklearn.datasets'] = None; "
    code += "from train.data import data_set as data; data.load(data.DataConfig())"
    done = start([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_fake_samples_are_the_same_each_time_and_differ_between_train_and_test():
    noise = load("fake:20")
    assert (len(noise.train), len(noise.test), noise.shape) == (20, 4, (3, 32, 32))
    assert torch.equal(noise.train[3][0], load("fake:20").train[3][0])
    assert not torch.equal(noise.train[0][0], noise.test[0][0])


def test_fake_samples_are_normalised_by_default_and_as_the_flags_say():
    noise = load("fake:200").train
    pictures = torch.stack([noise[index][0] for index in range(200)])
    assert pictures.mean(dim=(0, 2, 3)).abs().max() < 0.01
    assert (pictures.std(dim=(0, 2, 3)) - 1).abs().max() < 0.01
    plain = load("fake:200", mean=(0.0,), std=(1.0,)).train[7][0]
    assert 0 <= plain.min() < 0.01 < 0.99 < plain.max() < 1
    assert torch.allclose(noise[7][0], (plain - 0.5) * 12**0.5, atol=1e-6)


def test_data_sets_with_other_samples_or_another_normalisation_have_other_fingerprints(tmp_path):
    make_folder(tmp_path / "a", {"cat": 6, "dog": 6})
    make_folder(tmp_path / "b", {"cat": 6, "dog": 5, "eel": 1})
    names = ["digits", "fake:20", "fake:21", f"folder:{tmp_path}/a", f"folder:{tmp_path}/b"]
    made = [*map(load, names), load("fake:20", mean=(0.5, 0.5, 0.5))]
    assert len({one.fingerprint for one in made}) == 6
    (tmp_path / "a").rename(tmp_path / "moved")
    assert load(f"folder:{tmp_path}/moved").fingerprint.startswith("folder ")


# ---- cifar10 and mnist ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("mnist", "MNIST/raw")])
def test_missing_files_are_an_error_that_names_the_path_and_the_flags(tmp_path, name, folder):
    with pytest.raises(UsageFault) as fault:
        load(f"{name}:{tmp_path}")
    assert str(tmp_path / folder) in str(fault.value)
    assert "--download" in fault.value.hint and f"--data {name}:DIR" in fault.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_gives_its_reason_and_another_way(tmp_path, monkeypatch):
    from torchvision import datasets

    def offline(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(datasets.MNIST, "download", offline)
    with pytest.raises(CkptToolError, match="could not be downloaded: no route to host") as failure:
        load(f"mnist:{tmp_path}", download=True)
    assert str(tmp_path) in failure.value.hint


def test_mnist_is_read_as_torchvision_reads_it(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 5), ("t10k", 3)):
        pixels = numpy.arange(count * 784, dtype=numpy.uint8).tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + pixels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 0x801, count) + bytes(range(count))
        )
    mnist = load(f"mnist:{tmp_path}")
    assert (len(mnist.train), len(mnist.test), mnist.shape) == (5, 3, (1, 28, 28))
    assert mnist.train[0][0][0, 0, 2] == torch.tensor(2 / 255)
    assert labels(mnist.test) == [0, 1, 2]


def test_cifar10_is_normalised_like_other_colour_images(tmp_path, monkeypatch):
    from torchvision import datasets

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        batch = {"data": numpy.full((2, 3072), 51, dtype=numpy.uint8), "labels": [1, 9]}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda _: True)
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    cifar = load(f"cifar10:{tmp_path}")
    assert (len(cifar.train), len(cifar.test), cifar.shape) == (10, 2, (3, 32, 32))
    scales = ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))
    expected = [(0.2 - mean) / std for mean, std in scales]
    assert cifar.train[0][0][:, 0, 0].tolist() == pytest.approx(expected)
    assert labels(cifar.test) == [1, 9]


# ---- folders of images ---------------------------------------------------------------------------------


def make_folder(root: Path, classes: dict[str, int], size: tuple[int, int] = (6, 4)) -> None:
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = bytes((number * 7 + i) % 256 for i in range(size[0] * size[1] * 3))
            Image.frombytes("RGB", size, pixels).save(root / name / f"{number:03d}.png")


def load_test(root: Path, **flags: Any) -> data.Data:
    return data.load_test(DataConfig(name=f"folder:{root}", **flags))


def test_a_folder_with_train_and_test_is_already_divided(tmp_path):
    make_folder(tmp_path / "train", {"cat": 3, "dog": 4})
    make_folder(tmp_path / "test", {"dog": 2})
    for loaded in (load(f"folder:{tmp_path}"), load_test(tmp_path)):
        assert (loaded.classes, loaded.shape) == (("cat", "dog"), (3, 4, 6))
        assert (labels(loaded.train), labels(loaded.test)) == ([0, 0, 0, 1, 1, 1, 1], [1, 1])


def test_a_folder_of_classes_is_divided_for_training_and_whole_for_evaluation(tmp_path):
    make_folder(tmp_path, {"cat": 10, "dog": 5})
    loaded = load(f"folder:{tmp_path}")
    assert (labels(loaded.train), labels(loaded.test)) == ([0] * 8 + [1] * 4, [0, 0, 1])
    assert labels(load_test(tmp_path).test) == [0] * 10 + [1] * 5


def test_a_folder_with_only_a_test_part_can_be_evaluated(tmp_path):
    make_folder(tmp_path / "test", {"cat": 2, "dog": 1})
    assert labels(load_test(tmp_path).test) == [0, 0, 1]


def test_images_are_read_as_rgb_and_normalised_as_by_torchvision(tmp_path):
    from torchvision import transforms

    make_folder(tmp_path, {"cat": 2})
    Image.frombytes("L", (6, 4), bytes(range(24))).save(tmp_path / "cat" / "grey.png")
    Image.frombytes("RGBA", (6, 4), bytes(range(96))).save(tmp_path / "cat" / "veiled.png")
    files = sorted((tmp_path / "cat").iterdir())
    normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    transform = transforms.Compose([transforms.ToTensor(), normalise])
    samples = load_test(tmp_path).test
    assert len(samples) == len(files) == 4
    for index, file in enumerate(files):
        assert torch.equal(samples[index][0], transform(Image.open(file).convert("RGB")))


def test_mean_and_std_take_one_number_or_one_per_channel(tmp_path):
    make_folder(tmp_path, {"cat": 1})
    picture = load_test(tmp_path, mean=(0.5,), std=(0.25, 0.5, 1.0)).test[0][0]
    plain = load_test(tmp_path, mean=(0.0,), std=(1.0,)).test[0][0]
    assert torch.allclose(picture, (plain - 0.5) / torch.tensor([0.25, 0.5, 1.0]).view(3, 1, 1))
    with pytest.raises(UsageFault, match="--mean: 2 numbers for images of 3 channels"):
        load(f"folder:{tmp_path}", mean=(0.1, 0.2))


def test_images_of_two_sizes_are_refused_without_resize(tmp_path):
    make_folder(tmp_path, {"cat": 2})
    make_folder(tmp_path, {"dog": 1}, size=(8, 8))
    with pytest.raises(UsageFault, match=r"is 8×8, but .* is 6×4") as fault:
        load(f"folder:{tmp_path}")
    assert "--resize" in fault.value.hint
    resized = load_test(tmp_path, resize=5).test
    assert {tuple(resized[index][0].shape) for index in range(3)} == {(3, 5, 5)}


NO_CLASSES: dict[str, tuple[dict[str, dict[str, int]], str]] = {
    "empty": ({}, "no folders of images"),
    "empty class": ({".": {"cat": 0}}, "hold no images"),
    "unknown class": ({"train": {"cat": 1}, "test": {"eel": 1}}, "the training data has no such class"),
}


@pytest.mark.parametrize("what", NO_CLASSES)
def test_a_folder_without_classes_or_images_is_refused(tmp_path, what):
    parts, said = NO_CLASSES[what]
    for part, classes in parts.items():
        make_folder(tmp_path / part, classes)
    with pytest.raises(UsageFault, match=said):
        load(f"folder:{tmp_path}")


# ---- the user's own ------------------------------------------------------------------------------------

OWN = """
import random, numpy, torch
from torch.utils.data import Dataset, TensorDataset

class Restless(Dataset):
    classes = ["a", "b"]
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.rand(2) + random.random() + numpy.random.rand(), index % 2

restless = lambda: (Restless(), Restless())

def plain():
    parts = TensorDataset(torch.rand(4, 3), torch.tensor([0, 2, 1, 0]))
    return parts, parts

one = lambda: Restless()
three = lambda: (Restless(), Restless(), Restless())
none = lambda: None

class Nameless(Restless):
    classes = None

nameless = lambda: (Nameless(), Nameless())

from ckpttool.errors import Damaged

class Files(TensorDataset):
    classes = ["a", "b"]

    def __getitem__(self, index):
        if index in (0, 1, 19):  # which are looked at before training
            raise Damaged(f"{index}.png", "is cut short")
        return super().__getitem__(index)

def files():
    return Files(torch.rand(20, 1, 8, 8), torch.arange(20) % 2)

class Faulty(TensorDataset):
    classes = ["a", "b"]
    wrong = {}

    def __getitem__(self, index):
        if index in self.wrong:
            return self.wrong[index]()
        return super().__getitem__(index)

def of_30(wrong):
    samples = Faulty(torch.rand(30, 1, 8, 8), torch.arange(30) % 2)
    samples.wrong = wrong
    return samples

def raising(number=8, late=False):
    kinds = [ValueError("odd length"), KeyError("label"), OSError("gone"), RuntimeError("no frame")]
    def fail(error):
        raise error
    places = [7 * 3] if late else range(0, 3 * number, 3)
    return of_30({at: lambda error=kinds[at // 3 % 4]: fail(error) for at in places})

def of_most():
    def fail():
        raise ValueError("odd")
    return of_30(dict.fromkeys(range(1, 18), fail))

def nothing():
    return of_30({22: lambda: None})

def larger():
    return of_30({22: lambda: (torch.rand(1, 9, 9), 0)})

def unlabelled():
    return of_30({22: lambda: (torch.rand(1, 8, 8), None)})
"""


def test_a_users_factory_returns_both_data_sets(own):
    assert load(f"{own}:restless").classes == ("a", "b")
    plain = load(f"{own}:plain")
    assert (plain.classes, plain.shape) == (("0", "1", "2"), (3,))


def test_a_factory_may_return_training_samples_alone(own):
    assert load(f"{own}:one").test is None
    assert len(data.load(DataConfig(name=f"{own}:one", test_data=f"{own}:plain")).test) == 4


def test_a_factory_that_returns_something_else_is_refused_with_what_is_needed(own):
    wrong = {
        "three": r"\(train, test\), or one",
        "none": "no samples by index",
        "nameless": "does not say its classes",
    }
    for name, said in wrong.items():
        with pytest.raises(UsageFault, match=said):
            load(f"{own}:{name}")


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed)


def test_random_user_data_depends_only_on_seed_epoch_and_sample(own):
    def train_of(seed: int) -> Any:
        return data.load(DataConfig(name=f"{own}:restless"), seed=seed).train

    seed_all(0)
    first = train_of(1)
    alone = [first[index][0] for index in range(6)]
    assert len({tuple(sample.tolist()) for sample in alone}) == 6

    seed_all(9)
    again = train_of(1)
    assert all(torch.equal(again[index][0], alone[index]) for index in (5, 0, 3))
    again.set_epoch(1)
    assert not torch.equal(again[0][0], alone[0])
    assert not torch.equal(train_of(2)[0][0], alone[0])


def test_loading_user_data_restores_the_random_state(own):
    samples, drawn = load(f"{own}:restless").train, []
    for read in (lambda: None, lambda: samples[2]):
        seed_all(4)
        read()
        drawn.append((random.random(), torch.rand(1).item(), numpy.random.rand()))
    assert drawn[0] == drawn[1]


# ---- on several ranks ----------------------------------------------------------------------------------


def compare_on_ranks(rank: int, world_size: int, of_rank_1: int) -> Any:
    whole = trainings.tensors((10,), of_rank_1 if rank else 8)
    return trainings.error_of(lambda: data.compare(whole, "before training"))


def test_ranks_that_loaded_different_data_are_refused(run_ranks):
    assert run_ranks(2, compare_on_ranks, 8) == [None, None]
    for _, said in run_ranks(2, compare_on_ranks, 9):
        assert said == "rank 1 has a different --data than rank 0, before training"


# ---- loading processes: the random numbers that they draw, and their end -------------------------------


class Noisy(TensorDataset):
    """Draws from the random state of whatever process loads it."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return torch.rand(10), self.tensors[1][index]


class Stuck(Dataset[Any]):
    """Has two samples that are there at once; the others take for ever."""

    def __len__(self) -> int:
        return 99

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(1000 * (index > 1))
        return torch.tensor(index)


class Noted(threading.Thread):
    """A thread that notes when it begins and when it is waited for."""

    order: list[str] = []  # noqa: RUF012

    def start(self) -> None:
        self.order.append("start")
        super().start()

    def join(self, timeout: float | None = None) -> None:
        self.order.append("join")
        super().join(timeout)


def test_loading_processes_that_are_stuck_are_ended_together(monkeypatch):
    monkeypatch.setattr(loading, "PATIENCE", 0.5)
    before = {*multiprocessing.active_children()}
    with loading.processes_ended():
        each = [[index] for index in range(99)]
        both = [iter(loading.load(Stuck(), each, trainings.place(0, 1), workers=2)) for _ in range(2)]
        assert [int(next(batches)) for batches in both] == [0, 0]
        ended = iter(loading.load(Stuck(), [[1]], trainings.place(0, 1), workers=1))
        assert [int(batch) for batch in ended] == [1]
        monkeypatch.setattr(threading, "Thread", Noted)
    assert Noted.order == sorted(Noted.order, reverse=True) and Noted.order.count("start") >= 2
    for process in {*multiprocessing.active_children()} - before:
        process.join(60)  # they have been killed
    assert {*multiprocessing.active_children()} <= before
    time.sleep(0.1)  # nor is their end raised here as a failure


def test_more_loading_processes_than_cores_are_started_without_a_warning():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with loading.processes_ended():
            numbers = TensorDataset(torch.arange(4))
            loaded = [*loading.load(numbers, [[0], [1], [2, 3]], trainings.place(0, 1), workers=2)]
    finally:
        os.sched_setaffinity(0, cores)
    assert [batch.tolist() for (batch,) in loaded] == [[0], [1], [2, 3]]


def drawn(rank: int = 0, seed: int = 0, *, start: int = 0, epochs: int = 1) -> list[torch.Tensor]:
    """Return the first samples of one rank of two in each of some epochs, loaded from step `start`."""
    data, seen, found = trainings.tensors((10,), 16), [], []
    data = dataclasses.replace(data, train=Noisy(*data.train.tensors))  # type: ignore[attr-defined]
    model = nn.Linear(10, 10)
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with process_group(trainings.place(0, 1), timeout=5):  # a plan of two ranks, and this one alone
        settings = {"batch_size": 8, "seed": seed, "workers": 1}
        trainer = trainings.trainer(rank, 2, data, model, **settings)
        trainer.progress.step = start
        for _ in range(epochs):
            seen.clear()
            trainings.finish_epoch(trainer)
            found.append(torch.cat(seen)[:4])
    return found


def test_workers_draw_different_numbers_for_each_epoch_rank_and_seed():
    alike = drawn(epochs=2)
    assert all(map(torch.equal, alike, drawn(epochs=2)))
    met = [*alike, *drawn(rank=1), *drawn(seed=1), *drawn(start=1)]
    assert len({tuple(numbers.flatten().tolist()) for numbers in met}) == 5


def test_random_samples_from_workers_are_the_same_after_a_resume_within_an_epoch(tmp_path):
    before = {*multiprocessing.active_children()}
    (tmp_path / "own.py").write_text(OWN_DATA)
    settings = ["--data", f"{tmp_path}/own.py:pair", "--batch-size", "4", "--workers", "2"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    saving = ["--epochs", "2", "--save-every", "1steps", "--keep", "9"]
    assert main.main([*settings, *saving, "--out", str(whole)]) == 0
    going_on = ["--out", str(resumed), "--resume", str(whole / "step-000002.pt")]
    assert main.main([*settings, *saving, *going_on]) == 0
    one, other = (torch.load(out / "last.pt", weights_only=True)["model"] for out in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {*multiprocessing.active_children()} <= before  # those of an evaluation are kept for the next


# ---- --skip-damaged ------------------------------------------------------------------------------------


def trained(rank: int, size: int, spec: str, **more: Any) -> tuple[int, int]:
    """Check and train; return the samples that were used, and those that were left out."""
    settings: dict[str, Any] = {"data": spec, "batch_size": 6, "skip_damaged": True, "epochs": 1, **more}
    data, model = data_set.load(TrainConfig.of(**settings).data), models.simple_cnn(2)
    trainings.check(model, data, size, rank=rank, **settings)
    trainer = trainings.trainer(rank, size, data, model, **settings)
    trainings.finish_epoch(trainer)
    return trainer.progress.samples, trainer.feed.skipped


def test_damaged_samples_are_left_out_also_where_they_are_looked_at_before_training(run_ranks, own):
    assert run_ranks(2, trained, f"{own}:files") == [(17, 3)] * 2
    with pytest.raises(Damaged, match=r"0\.png: is cut short"):
        data_set.load(TrainConfig.of(data=f"{own}:files").data)


@pytest.mark.parametrize("flags", [{"mixup": 0.5}, {"cutmix": 1.0}, {"augment": "crop-flip"}])
def test_a_sample_that_is_mixed_with_a_damaged_one_is_used(run_ranks, own, flags):
    """Eight of thirty raise errors of four kinds, the first sample among them; all others are trained on."""
    assert run_ranks(2, partial(trained, **flags), f"{own}:raising") == [(22, 8)] * 2


def told(rank: int, size: int, spec: str, folder: str) -> list[str]:
    settings: dict[str, Any] = {"data": spec, "batch_size": 6, "skip_damaged": True, "epochs": 1}
    data, model = data_set.load(TrainConfig.of(**settings).data), models.simple_cnn(2)
    trainer = trainings.trainer(rank, size, data, model, **settings)
    trainings.finish_epoch(trainer)
    return trainer.feed.left_out


def test_what_is_left_out_is_told_in_the_same_order_on_any_number_of_ranks(run_ranks, own):
    (alone,) = run_ranks(1, told, f"{own}:raising", "")
    assert len(alone) == 8 and "training sample 0 can't be read: ValueError: odd length" in "".join(alone)
    for size in (2, 3):
        assert run_ranks(size, told, f"{own}:raising", "") == [alone] * size


def test_more_damage_than_samples_ends_the_run(run_ranks, own):
    (said,) = run_ranks(1, ended, f"{own}:raising(number=10)", {"batch_size": 30})
    assert said is None  # a third
    many = f"{own}:of_most"
    (one, _), (other, _) = told = run_ranks(2, ended, many, {})
    assert (one, other) == ("CheckFailed", "RankFailed")
    for _, message in told:
        assert re.search(
            "--skip-damaged: 1[67] of (24|30) samples of this epoch can't be read; the last", message
        )


def ended(rank: int, size: int, spec: str, more: dict[str, Any]) -> tuple[str, str] | None:
    return trainings.error_of(lambda: trained(rank, size, spec, **more))


@pytest.mark.parametrize(("name", "said"), [
    ("nothing", r"training sample 22 is None, and \d+ is a tuple of 2 "),
    ("larger", r"training sample 22\[0\] is a tensor of float32 with the shape \[1, 9, 9\], and "),
    ("unlabelled", r"training sample 22\[1\] is None, and "),
])  # fmt: skip
@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_a_sample_of_another_kind_is_named(own, tmp_path, capsys, name, said, mixup):
    """Which no trial has read: it is met in training."""
    flags = ["--data", f"{own}:{name}", "--batch-size", "10", "--epochs", "1", "--mixup", str(mixup)]
    code = main.main([*flags, "--out", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert code == 1 and re.search(r"training sample.* 22\b", error) and error.count("\n") == 1, error
    assert mixup or re.search(said, error)


def test_an_error_of_a_users_sample_late_in_training_is_no_wrong_flag(own, tmp_path, capsys):
    """3, as for a file that can't be read, and not 2, which says that nothing was started."""
    assert main.main(["--data", f"{own}:raising(late=True)", "--epochs", "1", "--out", f"{tmp_path}/r"]) == 3
    assert "training sample 21 can't be read: RuntimeError: no frame" in capsys.readouterr().err


def make_divided(root: Path) -> list[str]:
    """Make pictures to train and test with; return flags for them."""
    make_folder(root / "p" / "train", {"cat": 12, "dog": 12}, size=(12, 12))
    make_folder(root / "p" / "test", {"cat": 9, "dog": 9}, size=(12, 12))
    flags = ["--data", f"folder:{root}/p", "--epochs", "1", "--batch-size", "8", "--skip-damaged"]
    return [*flags, "--out", str(root / "run")]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:70])


def test_a_file_that_is_no_image_is_left_out_and_counted(tmp_path, capsys):
    flags = make_divided(tmp_path)
    (tmp_path / "p/train/cat/000.png").write_text("no image")  # the first is looked at most
    truncate(tmp_path / "p/train/dog/003.png")
    assert main.main(flags) == 0
    said = capsys.readouterr()
    assert said.err.count("--skip-damaged: left out training sample") == 2
    assert "left out 2 that can't be read" in said.out


@pytest.mark.parametrize("workers", [[], ["--workers", "1"]])
def test_a_damaged_test_image_is_named_before_the_first_step(tmp_path, capsys, workers):
    """One that no trial has read: scores are of every test sample, and so it is not left out."""
    flags = make_divided(tmp_path)
    truncate(tmp_path / "p/test/dog/002.png")
    assert main.main([*flags, *workers]) == 3
    said = capsys.readouterr()
    assert "dog/002.png: is not a readable image (a score is of every test sample" in said.err
    assert "train loss" not in said.out


def test_a_test_image_that_is_damaged_during_training_costs_no_step(tmp_path, capsys):
    """The state is saved, and a resume begins with the score."""
    flags = [flag for flag in make_divided(tmp_path) if flag != "--skip-damaged"]
    broken = tmp_path / "p/test/dog/001.png"
    whole = broken.read_bytes()
    truncate(broken)
    assert main.main(flags) == 3
    assert "dog/001.png: is not a readable image" in capsys.readouterr().err
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["progress"]
    assert (state["global_step"], state["unscored"]) == (3, True)
    broken.write_bytes(whole)
    assert main.main([*flags, "--resume", "auto"]) == 0
    said = capsys.readouterr().out
    assert "1/1" in said and (tmp_path / "run" / "best.pt").exists()


def test_a_class_without_images_is_said(tmp_path, capsys):
    make_folder(tmp_path / "train", {"cat": 3, "dog": 0, "eel": 2})
    make_folder(tmp_path / "test", {"cat": 3, "eel": 2})
    assert load(f"folder:{tmp_path}").classes == ("cat", "dog", "eel")
    assert (
        f"warning: {tmp_path}/train/dog: holds no images, so the class 'dog' has no"
        in capsys.readouterr().err
    )
