"""What is neither read nor written here: other formats and URLs, each by name and with the way on."""

from __future__ import annotations

import os
import re
import shlex

from ..errors import Unsupported, UsageFault
from ..remote.urls import BUCKETS, HUB, canonical, is_url
from ..tensors.ref import Source

ONNX = re.compile(rb"\x08[\x01-\x20](\x12[\x01-\x40][\w.-]+)?[\x12\x1a\x3a\x42]")  # begins with a version

FROM_GGUF = "transformers reads it: AutoModelForCausalLM.from_pretrained({folder}, gguf_file={name})"

# Formats by their first bytes: what it is, and what to do.
HEADS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "fetch it: git lfs pull"),
    (b"<!doctype html", "an HTML page, not a checkpoint", "download the file again, from its raw link"),
    (b"<html", "an HTML page, not a checkpoint", "download the file again, from its raw link"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it first: gunzip"),
    (b"BZh", "compressed with bzip2", "unpack it first: bunzip2"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it first: unxz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it first: unzstd"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it first: 7z x"),
    (b"Rar!", "a RAR archive", "unpack it first: unrar x"),
    (b"GGUF", "a GGUF model, which is not read here", FROM_GGUF),
    (b"\x89HDF", "an HDF5 file, which is not read here", "load it with Keras or h5py, and save its tensors"),
    (b"\x93NUMPY", "a NumPy array, not a checkpoint", "load it with numpy.load and save it with torch.save"),
)
FROM_ONNX = "read it with onnx: onnx.load(...).graph.initializer holds the tensors"

FROM_SAFETENSORS = "numpy.savez(..., **safetensors.numpy.load_file(...))"

# Formats by their names' endings, for an output that asks for one: what it is, and what makes it.
ENDINGS = {
    ".gguf": ("GGUF", "write safetensors next to config.json, then run llama.cpp's convert_hf_to_gguf.py"),
    ".onnx": ("ONNX", "it holds the model's code too: load the state, then torch.onnx.export"),
    **dict.fromkeys((".h5", ".hdf5"), ("HDF5", "write safetensors, and store its tensors with h5py")),
    ".npz": ("NumPy archives", f"write safetensors, then {FROM_SAFETENSORS}"),
    ".msgpack": ("Flax's msgpack", "write safetensors, which Flax models of transformers load too"),
    ".tflite": ("TensorFlow Lite", "it holds the model's code too: convert the model, not its checkpoint"),
    ".zip": ("plain zip archives", "write a .pt, which is a zip; or zip the output"),
}

# Name endings of checkpoints in archives of other tools.
ARCHIVED = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


def head_of(source: Source) -> bytes:
    """Return the first bytes of a file, by which formats are recognised."""
    return source.read(0, min(source.size, 512))


def known(source: Source) -> Unsupported | None:
    """Return the error for a file that begins as something else does; None for one that begins otherwise."""
    path, head = source.path, head_of(source)
    folder, name = os.path.split(path)
    for start, what, hint in HEADS:
        if head.lstrip()[: len(start)].lower() == start.lower():
            hint = hint.format(folder=repr(folder or "."), name=repr(name))
            return Unsupported(path, f"is {what}", hint=hint)
    if ONNX.match(head) and (b"pytorch" in head or path.lower().endswith(".onnx")):
        return Unsupported(path, "is an ONNX model, which is not read here", hint=FROM_ONNX)
    if path.lower().endswith(".msgpack"):
        hint = "load it with transformers: from_pretrained(FOLDER, from_flax=True), then save_pretrained"
        return Unsupported(path, "is a Flax msgpack file, which is not read here", hint=hint)
    return None


def stranger(source: Source) -> Unsupported:
    """Return the error for a file in a format that is not read here."""
    if fault := known(source):
        return fault
    if head_of(source)[:1] == b"\x80":
        listed = f"see what is in it, without running it: python -m pickletools {shlex.quote(source.path)}"
        return Unsupported(source.path, "is a pickle, but not one that torch.save wrote", hint=listed)
    return Unsupported(source.path, "is not a checkpoint in any format known here")


def output_at(path: str, revision: str | None = None) -> str:
    """Return an output's URL in its one form, a path as it is; refuse a URL to which nothing is uploaded."""
    scheme = path.partition("://")[0].lower()
    if not is_url(path) or os.path.isdir(f"{scheme}:"):
        return path
    if scheme not in (*BUCKETS, HUB, "file"):
        what = f"{path.partition('?')[0]}: is a URL of a kind that is not written here"
        raise UsageFault(what, hint="s3, gs, az and hf are written; for others write a file, then upload it")
    return canonical(path, revision)


def unwritable(path: str) -> UsageFault | None:
    """Return the error for an output whose ending asks for a format that is not written here."""
    what, hint = ENDINGS.get(os.path.splitext(path)[1].lower(), ("", ""))
    return UsageFault(f"{path}: can't write {what}", hint=hint) if what else None


def checkpoints_inside(path: str, names: list[str], unpack: str) -> Unsupported | None:
    """Return the error for an archive that is no checkpoint itself but has some, by the names in it."""
    files = [name for name in names if name.lower().endswith(ARCHIVED)]
    listed = ", ".join(name[:80] for name in files[:3]) + (f" and {len(files) - 3} more" if files[3:] else "")
    what = f"is an archive that holds checkpoints: {listed}"
    return Unsupported(path, what, hint=f"unpack it first: {unpack} {shlex.quote(path)}") if files else None
