"""Folders of images: PATH/<class>/<file>."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from ckpttool.errors import Damaged, FileError, Refused, Unreadable, UsageFault
from train.config.shared import DataConfig
from train.data.samples import Parts, Scale, scale_of, split

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


def load(config: DataConfig, path: str) -> Parts:
    """Return PATH/train/<class>/* and PATH/test/<class>/*; or PATH/<class>/*, divided.

    Raises:
        UsageFault: there is no such folder, it holds no classes or no images, or they differ in size.
        Unreadable, Damaged: an image can't be read.
    """
    if not os.path.isdir(path):
        raise UsageFault(f"--data folder:{path}: no such folder", hint="give folder:PATH")
    scale = scale_of(config, channels=3)
    divided = all(os.path.isdir(os.path.join(path, part)) for part in ("train", "test"))
    if not divided:
        files, labels, classes = find_pictures(path)
        everything = Folder(files, labels, scale, config.resize)
        train, test = split(everything, labels)
        return Parts(train, test, classes, fingerprint(path, files))
    files, labels, classes = find_pictures(os.path.join(path, "train"))
    test_files, test_labels, _ = find_pictures(os.path.join(path, "test"), classes)
    train = Folder(files, labels, scale, config.resize)
    test = Folder(test_files, test_labels, scale, config.resize)
    return Parts(train, test, classes, fingerprint(path, files + test_files))


def load_test(config: DataConfig, path: str) -> Parts:
    """Return the images of PATH/test/<class>/*, or of PATH/<class>/*, as both parts. Raises as `load`."""
    inner = os.path.join(path, "test")
    if os.path.isdir(inner):
        path = inner
    files, labels, classes = find_pictures(path)
    samples = Folder(files, labels, scale_of(config, channels=3), config.resize)
    return Parts(samples, samples, classes, fingerprint(path, files))


def fingerprint(root: str, files: Sequence[str]) -> str:
    """Return a text that differs for folders with other files."""
    names = "\n".join(os.path.relpath(file, root) for file in files)
    return f"folder {hashlib.sha256(names.encode(errors='surrogateescape')).hexdigest()[:16]}"


def find_pictures(
    root: str, classes: Sequence[str] | None = None
) -> tuple[list[str], list[int], tuple[str, ...]]:
    """Find the image files under `root`.

    Args:
        root: holds one folder per class.
        classes: the classes to use, if another folder defines them.

    Returns:
        The files, their labels, and the classes, each sorted by name.

    Raises:
        UsageFault: there are no class folders, no images in them, or a class that is not in `classes`.
        Unreadable: something that is named like an image is no file, or a link to none.
    """
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not names:
        raise UsageFault(
            f"{root}: has no folders of images, one per class", hint="give folder:PATH with PATH/<class>/*"
        )
    labels_of = {name: label for label, name in enumerate(classes or names)}
    unknown = [name for name in names if name not in labels_of]
    if unknown:
        raise UsageFault(f"{os.path.join(root, unknown[0])}: the training data has no such class")
    files: list[str] = []
    labels: list[int] = []
    for name in names:
        folder = os.path.join(root, name)
        entries = [entry for entry in os.scandir(folder) if entry.name.lower().endswith(ENDINGS)]
        for entry in entries:
            if not entry.is_file():  # opening a named pipe would wait for a writer
                raise Unreadable(
                    entry.path, "is not a regular file" if os.path.exists(entry.path) else "no such file"
                )
        found = sorted(entry.path for entry in entries)
        files += found
        labels += [labels_of[name]] * len(found)
    if not files:
        raise UsageFault(f"{root}: its folders hold no images", hint=f"known extensions: {' '.join(ENDINGS)}")
    return files, labels, tuple(classes or names)


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Image files, read as RGB. All must have the size of the first, unless `resize` is given."""

    def __init__(
        self, files: Sequence[str], labels: Sequence[int], scale: Scale, resize: int | None = None
    ) -> None:
        self.files, self.labels, self.scale, self.resize = files, labels, scale, resize
        if not resize:
            self._check_sizes()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.scale.apply(self._read(self.files[index])), self.labels[index]

    def raw_sample(self, index: int) -> tuple[str, int]:
        """Return the SHA-256 of a file, and its label.

        Raises:
            Unreadable: the file can't be read.
        """
        path = self.files[index]
        try:
            with open(path, "rb") as file:
                return hashlib.sha256(file.read()).hexdigest(), self.labels[index]
        except OSError as error:
            raise _unreadable(path, error) from error

    def _read(self, path: str) -> torch.Tensor:
        image_kind = _pillow()
        try:
            with image_kind.open(path) as opened:
                picture = opened.convert("RGB")
        except Exception as error:  # Pillow raises all kinds of errors for damaged bytes
            raise _unreadable(path, error) from error
        if self.resize:
            picture = picture.resize((self.resize, self.resize), image_kind.Resampling.BILINEAR)
        data = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return data.view(picture.height, picture.width, 3).permute(2, 0, 1).float().div(255)

    def _check_sizes(self) -> None:
        """Read every file's header: a batch of two sizes would fail hours into a run."""
        image_kind = _pillow()
        first: tuple[int, int] | None = None
        for path in self.files:
            try:
                with image_kind.open(path) as opened:
                    size = opened.size
            except Exception as error:  # Pillow raises all kinds of errors for damaged bytes
                raise _unreadable(path, error) from error
            first = first or size
            if size != first:
                raise UsageFault(
                    f"{path}: is {size[0]}×{size[1]}, but {self.files[0]} is {first[0]}×{first[1]}",
                    hint="--resize N makes all images N×N",
                )


def _unreadable(path: str, error: Exception) -> FileError:
    if isinstance(error, OSError) and error.errno is not None:
        return Unreadable(path, (error.strerror or str(error)).lower())
    if type(error).__name__ == "DecompressionBombError":
        return Refused(path, "is an image of more pixels than Pillow decodes: a decompression bomb?")
    return Damaged(path, "is not a readable image")


def _pillow() -> Any:
    """Return Pillow's Image, imported when an image is needed."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageFault("--data folder: needs Pillow", hint="pip install 'ckpttool[train]'") from None
    return Image
