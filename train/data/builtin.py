"""The data sets that the trainer knows by name, and the user's own. Imports torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from ckpttool.core.files.commit import reason
from ckpttool.distributed.group import given_rank
from ckpttool.distributed.randomness import Keyed
from ckpttool.errors import CkptToolError, Damaged, FileError, Refused, Unreadable, UsageFault
from ckpttool.models import factory
from train import console
from train.config.sections import DataConfig
from train.data import samples as common
from train.data.samples import Parts, Samples, Scale, count, scale_of
from train.data.stream import Packed, Stream, is_stream

CLASSES = tuple("0123456789")
FAKE_SHAPE = (3, 32, 32)
UNIFORM = Scale((0.5,), (12**-0.5,))  # of numbers drawn evenly from [0, 1)
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


def digits(settings: DataConfig) -> Parts:
    """Return scikit-learn's handwritten digits: 1,797 images of 1×8×8, included in its package."""
    pixels, target = _digits()
    pictures = torch.tensor(pixels, dtype=torch.float32).div(16).view(-1, 1, 8, 8)
    labels = torch.tensor(target, dtype=torch.int64)
    whole = TensorDataset(scale_of(settings, channels=1).apply(pictures), labels)
    train, test = common.split(whole, labels.tolist())
    return Parts(train, test, CLASSES, "digits")


def _digits() -> tuple[Any, Any]:
    # Its file is read without importing it, which takes SciPy and half as long as importing torch.
    spec = importlib.util.find_spec("sklearn")
    folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
    path = os.path.join(folder, "datasets", "data", "digits.csv.gz")
    if os.path.exists(path):
        rows = np.loadtxt(path, delimiter=",")
        return rows[:, :-1], rows[:, -1]
    datasets = common.optional("sklearn.datasets", "--data digits: needs scikit-learn")
    pixels, target = datasets.load_digits(return_X_y=True)
    return pixels, target


def torchvision(settings: DataConfig) -> Parts:
    """Return CIFAR-10 or MNIST, as torchvision reads it; `--download` downloads it first."""
    datasets = common.optional("torchvision.datasets", f"--data {settings.name}: needs torchvision")
    name, _, root = settings.name.partition(":")
    root = root or "data"
    kind = {"cifar10": datasets.CIFAR10, "mnist": datasets.MNIST}[name]
    folder = {"cifar10": "cifar-10-batches-py", "mnist": os.path.join("MNIST", "raw")}[name]
    if settings.download:
        _download(kind, name, root)
    parts = []
    for train in (True, False):
        try:
            loaded = kind(root, train=train)
        except RuntimeError:
            what = f"--data {settings.name}: not found in {os.path.join(root, folder)}"
            raise UsageFault(
                what, hint=f"--download downloads it, --data {name}:DIR names a folder"
            ) from None
        pictures = torch.as_tensor(loaded.data)
        pictures = pictures.unsqueeze(1) if pictures.dim() == 3 else pictures.permute(0, 3, 1, 2)
        labels = torch.as_tensor(loaded.targets, dtype=torch.int64)
        parts.append(_Bytes(pictures, labels, scale_of(settings, pictures.shape[1])))
    return Parts(parts[0], parts[1], tuple(loaded.classes), name)


def _download(kind: Any, name: str, root: str) -> None:
    """Download on the first rank of each machine to come here; the others wait and find the files."""
    os.makedirs(root, exist_ok=True)
    with open(os.path.join(root, f".{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            kind(root, download=True)
        except (OSError, RuntimeError) as error:
            what = f"--download: {name} could not be downloaded: {error}"
            hint = f"put its files into {root}, or name their folder: --data {name}:DIR"
            raise CkptToolError(what, hint=hint) from error


class _Bytes(Dataset[tuple[torch.Tensor, int]]):
    """Images kept as bytes, scaled on access."""

    def __init__(self, pictures: torch.Tensor, labels: torch.Tensor, scale: Scale) -> None:
        self.pictures, self.labels, self.scale = pictures, labels.tolist(), scale

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.scale.apply(self.pictures[index].float().div(255)), self.labels[index]


def fake(settings: DataConfig, argument: str) -> Parts:
    """Return noise of CIFAR's shape, mean 0, deviation 1: N samples, and a fifth as many test samples."""
    if not argument.isdecimal() or not int(argument):
        raise UsageFault(f"--data {settings.name}: needs a number of samples", hint="for example fake:64")
    number, scale = int(argument), scale_of(settings, FAKE_SHAPE[0], usual=UNIFORM)
    test = _Noise(number, max(1, number // common.HELD_OUT), scale)
    return Parts(_Noise(0, number, scale), test, CLASSES, "fake")


class _Noise(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, first: int, size: int, scale: Scale) -> None:
        self.first, self.size, self.scale = first, size, scale

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        number = self.first + index
        noise = torch.rand(FAKE_SHAPE, generator=torch.Generator().manual_seed(number))
        return self.scale.apply(noise), number % 10


# ---- folders of images: PATH/<class>/<file> ------------------------------------------------------------


def folder(settings: DataConfig, path: str) -> Parts:
    """Return PATH/train/<class>/* and PATH/test/<class>/*; or PATH/<class>/*, divided."""
    if not os.path.isdir(path):
        raise UsageFault(f"--data folder:{path}: no such folder", hint="give folder:PATH")
    if not is_divided(path):
        whole, classes = _pictures(settings, path)
        return Parts(*common.split(whole, whole.labels), classes, _fingerprint(path, whole))
    train, classes = _pictures(settings, os.path.join(path, "train"))
    test, _ = _pictures(settings, os.path.join(path, "test"), classes)
    return Parts(train, test, classes, _fingerprint(path, train, test))


def is_divided(path: str) -> bool:
    return all(os.path.isdir(os.path.join(path, part)) for part in ("train", "test"))


def test_folder(settings: DataConfig, path: str) -> Parts:
    """Return the images of PATH/test/<class>/*, or of PATH/<class>/*, as both parts."""
    inner = os.path.join(path, "test")
    path = inner if os.path.isdir(inner) else path
    samples, classes = _pictures(settings, path)
    return Parts(samples, samples, classes, _fingerprint(path, samples))


def _pictures(
    settings: DataConfig, path: str, classes: Sequence[str] | None = None
) -> tuple[Folder, tuple[str, ...]]:
    scale = scale_of(settings, channels=3)
    files, labels, classes = find_pictures(path, classes)
    return Folder(files, labels, scale, settings.resize, skip_damaged=settings.skip_damaged), classes


def _fingerprint(root: str, *folders: Folder) -> str:
    names = "\n".join(os.path.relpath(file, root) for folder in folders for file in folder.files)
    return f"folder {hashlib.sha256(names.encode(errors='surrogateescape')).hexdigest()[:16]}"


def find_pictures(
    root: str, classes: Sequence[str] | None = None
) -> tuple[list[str], list[int], tuple[str, ...]]:
    """Return the image files under `root`, their labels, and the classes, each sorted by name.

    Args:
        root: holds one folder per class.
        classes: the classes to use, if another folder defines them; it may hold no other.
    """
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not names:
        hint = "give folder:PATH with PATH/<class>/*"
        raise UsageFault(f"{root}: has no folders of images, one per class", hint=hint)
    labels_of = {name: label for label, name in enumerate(classes or names)}
    unknown = [name for name in names if name not in labels_of]
    if unknown:
        raise UsageFault(f"{os.path.join(root, unknown[0])}: the training data has no such class")
    files: list[str] = []
    labels: list[int] = []
    for name in names:
        entries = [e for e in os.scandir(os.path.join(root, name)) if e.name.lower().endswith(ENDINGS)]
        for entry in entries:
            if not entry.is_file():  # opening a named pipe would wait for a writer
                why = "is not a regular file" if os.path.exists(entry.path) else "no such file"
                raise Unreadable(entry.path, why)
        if not entries and given_rank() == 0:
            console.warn(f"{os.path.join(root, name)}: holds no images, so the class '{name}' has no samples")
        files += sorted(entry.path for entry in entries)
        labels += [labels_of[name]] * len(entries)
    if not files:
        raise UsageFault(f"{root}: its folders hold no images", hint=f"known extensions: {' '.join(ENDINGS)}")
    return files, labels, tuple(classes or names)


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Image files, read as RGB. All must have the size of the first, unless `resize` is given."""

    def __init__(
        self,
        files: Sequence[str],
        labels: Sequence[int],
        scale: Scale,
        resize: int | None = None,
        *,
        skip_damaged: bool = False,
    ) -> None:
        self.files, self.labels, self.scale, self.resize = files, labels, scale, resize
        if not resize:
            self._check_sizes(skip_damaged)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.scale.apply(self._read(self.files[index])), self.labels[index]

    def raw_sample(self, index: int) -> tuple[str, int]:
        """Return the SHA-256 of a file, and its label."""
        path = self.files[index]
        try:
            with open(path, "rb") as file:
                return hashlib.sha256(file.read()).hexdigest(), self.labels[index]
        except OSError as error:
            raise _unreadable(path, error) from error

    def _read(self, path: str) -> torch.Tensor:
        with _picture(path) as opened:
            return pixels(opened, self.resize)

    def _check_sizes(self, skip_damaged: bool) -> None:
        """Read every file's header: a batch of two sizes would fail hours into a run."""
        first: tuple[str, tuple[int, int]] | None = None
        for path in self.files:
            try:
                with _picture(path) as opened:
                    size = opened.size
            except FileError:
                if not skip_damaged:
                    raise
                continue
            first = first or (path, size)
            if size != first[1]:
                what = f"{path}: is {size[0]}×{size[1]}, but {first[0]} is {first[1][0]}×{first[1][1]}"
                raise UsageFault(what, hint="--resize N makes all images N×N")


def pixels(opened: Any, resize: int | None) -> torch.Tensor:
    """Return an image that Pillow has opened as RGB: float32 [3, height, width] in [0, 1]."""
    picture = opened.convert("RGB")
    if resize:
        picture = picture.resize((resize, resize), _pillow().Resampling.BILINEAR)
    data = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return data.view(picture.height, picture.width, 3).permute(2, 0, 1).float().div(255)


def picture_in(data: bytes, name: str, resize: int | None) -> torch.Tensor:
    """Return the `pixels` of an image in memory; `name` is for errors, which are those of a file."""
    with _picture(name, io.BytesIO(data)) as opened:
        return pixels(opened, resize)


@contextlib.contextmanager
def _picture(path: str, file: Any = None) -> Iterator[Any]:
    try:
        with _pillow().open(file or path) as opened:
            yield opened
    except UsageFault:
        raise
    except Exception as error:  # Pillow raises all kinds of errors for damaged bytes
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> FileError:
    if isinstance(error, OSError) and error.errno is not None:
        return Unreadable(path, reason(error))
    if type(error).__name__ == "DecompressionBombError":
        return Refused(path, "is an image of more pixels than Pillow decodes: a decompression bomb?")
    return Damaged(
        path,
        "is not a readable image",
        hint="--skip-damaged leaves out training samples, but no test samples",
    )


def _pillow() -> Any:
    return common.optional("PIL.Image", "--data folder: needs Pillow")


# ---- the user's own ----------------------------------------------------------------------------------


def from_factory(settings: DataConfig, seed: int) -> Parts:
    """Return the data sets that a user's factory makes; what they draw is keyed by (seed, epoch, sample).

    UsageFault if it returns something else.
    """
    if settings.mean or settings.std:
        raise UsageFault(f"--mean, --std: {settings.name} makes its own images", hint="leave them out")
    made = factory.build(settings.name)
    train, test = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
    if isinstance(train, tuple):
        raise UsageFault(f"--data {settings.name}: must return (train, test), or one data set")
    named = common.by_name(train, test)
    of_training, *of_test = [_own(samples, part, settings, seed) for part, samples in named.items()]
    return Parts(of_training, of_test[0] if of_test else None, _classes(train, settings), settings.name)


def _own(samples: Any, part: str, settings: DataConfig, seed: int) -> Samples:
    """Return a user's data set, whose random numbers are keyed; a stream if it is only iterable."""
    if not is_stream(samples):
        count(samples)
        return Named(samples, seed, part, settings.name)
    packed = Packed(samples, settings.block_size) if settings.block_size else samples
    window = settings.shuffle_window or 1
    return Stream([packed], settings.name, seed=seed, window=window, skip_damaged=settings.skip_damaged)


class Named(Keyed):
    """A data set of a user's, whose sample is named when it can't be made."""

    def __init__(self, samples: Samples, seed: int, part: str, data: str) -> None:
        super().__init__(samples, seed)
        self.part, self.data = part, data

    def drawn(self, index: int) -> Any:
        try:
            return super().drawn(index)
        except CkptToolError:
            raise
        except Exception as error:
            sample = f"{self.part} sample {index}"
            why, hint = factory.described(error), "CKPTTOOL_DEBUG=1 with --workers 0 shows the traceback"
            if isinstance(error, OSError):
                why, hint = reason(error), ""
                if error.filename is not None:
                    path = os.fsdecode(error.filename)
                    raise Unreadable(path, f"{why}: {sample} of --data {self.data}") from error
            raise Unreadable(
                f"--data {self.data}", f"{sample} can't be read: {why}", hint=hint or None
            ) from error


def _classes(samples: Any, settings: DataConfig) -> tuple[str, ...]:
    """Return the names of the classes; those of another task than classification only if they are named."""
    named = getattr(samples, "classes", None)
    if named is not None:
        return tuple(map(str, named))
    if settings.task != common.CLASSIFICATION:
        return ()
    labels = getattr(samples, "targets", None)
    if labels is None and isinstance(samples, TensorDataset):
        labels = samples.tensors[-1]
    if labels is None:
        hint = "give it an attribute: classes = ['cat', 'dog']"
        raise UsageFault(f"--data {settings.name}: the training data set does not say its classes", hint=hint)
    return tuple(str(label) for label in range(int(max(labels)) + 1))
