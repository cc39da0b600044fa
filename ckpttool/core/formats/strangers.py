"""What is neither read nor written here: other formats and URLs, each by name and with the way on."""

from __future__ import annotations

import os
import re
import shlex
import zlib

from ...errors import Unsupported, UsageFault, masked
from .. import system
from ..remote.urls import BUCKETS, HUB, canonical, is_url
from ..tensors.ref import Source
from ..words import first_few

AS_ARRAYS = "and save its arrays with numpy.savez, which is read here"
FROM_FLAX = "load it with transformers: from_pretrained(FOLDER, from_flax=True), then save_pretrained"
FROM_KERAS = f"load it with Keras or h5py, {AS_ARRAYS}"
FROM_TENSORFLOW = f"read it with tf.train.load_checkpoint, {AS_ARRAYS}"
FROM_PADDLE = f"load it with paddle.load, {AS_ARRAYS}"
FROM_LUA = f"load it with torchfile (pip install torchfile), {AS_ARRAYS}"
FROM_CAFFE = f"load it with caffe or OpenCV (cv2.dnn.readNetFromCaffe), {AS_ARRAYS}"
OF_ANOTHER = "take the model of transformers or openai-whisper that it was made of"
ONLY_CODE = "it is made from a model, and not to go back: take the checkpoint that it was made of"
NO_CODE = "its objects are code of that library: where you trust it, load it there and save its arrays"

UNPACK = "unpack it first: "

# Archives that are compressed as a whole, by the names that they have.
TARS = (".nemo", ".tgz", ".tbz2", ".txz", *(f".tar.{kind}" for kind in ("gz", "bz2", "xz", "zst")))

# Other files by how they begin: what each is, and what to do.
HEADS = tuple(
    (re.compile(begin, re.DOTALL), what, hint)
    for begin, what, hint in (
        (rb"version https://git-lfs", "a Git LFS pointer, not the file itself", "fetch it: git lfs pull"),
        (
            rb"(?i)\s*<(!doctype html|html)",
            "an HTML page, such as a login, not a checkpoint",
            "download the file again, from its raw link; a private one needs a token",
        ),
        (rb"\s*<\?xml", "an XML page, such as a server's refusal, not a checkpoint", "read what it says"),
        (rb"\x1f\x8b", "compressed with gzip", UNPACK + "gunzip"),
        (rb"BZh", "compressed with bzip2", UNPACK + "bunzip2"),
        (rb"\xfd7zXZ", "compressed with xz", UNPACK + "unxz"),
        (rb"\x28\xb5\x2f\xfd", "compressed with zstd", UNPACK + "unzstd"),
        (rb"7z\xbc\xaf", "a 7z archive", "unpack it first: 7z x"),
        (rb"Rar!", "a RAR archive", "unpack it first: unrar x"),
        (rb"lmgg[\x98-\x9a]\xca\0\0", "a model of whisper.cpp, in GGML", OF_ANOTHER),
        (rb"lmgg|fmgg|tjgg|algg", "a GGML model, older than GGUF", "make it again with llama.cpp of today"),
        (rb"[\x03\x04]\0\0\0\x01\0\0\0", "a file of Lua Torch (.t7)", FROM_LUA),
        (rb"\x89HDF", "an HDF5 file, which is not read here", FROM_KERAS),
        (rb"[\x81-\x8f]\xa6params", "a Flax msgpack file, which is not read here", FROM_FLAX),
        (rb"....TFL3", "a TensorFlow Lite model, which is not read here", ONLY_CODE),
        (rb"....E[TP]\d\d", "an ExecuTorch program, which is not read here", ONLY_CODE),
        (rb"\x12\x01\0\0\0\0\0\0", "an MXNet file", f"load it with mxnet.nd.load, {AS_ARRAYS}"),
        (rb"\x08\x01\x12", "a TensorFlow SavedModel: code; values are in variables/", FROM_TENSORFLOW),
        (rb"model_checkpoint_path:", "a note of which TensorFlow checkpoint is the newest", FROM_TENSORFLOW),
        (rb"\x80.*\bsklearn\b", "a pickle of scikit-learn", NO_CODE),
        (rb"\x80.*\bjoblib\b", "a pickle of joblib", NO_CODE),
        (rb"x[\x01\x5e\x9c\xda]", "compressed with zlib, as joblib does", NO_CODE),
        (rb"\x80.*StructuredToParameterName@@", "a PaddlePaddle file", FROM_PADDLE),
    )
)

# Others by how their names end: what begins in no way of its own.
NAMED = tuple(
    (re.compile(end), what, hint)
    for end, what, hint in (
        (r".*\.caffemodel", "a Caffe model, which is not read here", FROM_CAFFE),
        (r".*\.t7", "a file of Lua Torch (.t7)", FROM_LUA),
        (r".*\.msgpack", "a Flax msgpack file, which is not read here", FROM_FLAX),
        (r".*\.pdparams|.*\.pdopt|.*\.pdiparams", "a PaddlePaddle file", FROM_PADDLE),
        (r".*\.data-\d{5}-of-\d{5}|.*\.ckpt-\d+\.(index|meta)", "a TensorFlow checkpoint", FROM_TENSORFLOW),
        (r".*\.pb", "a TensorFlow graph, which is not read here", ONLY_CODE),
        (r".*\.mlmodel", "a Core ML model, which is not read here", ONLY_CODE),
        (r".*\.joblib", "a file of joblib", NO_CODE),
    )
)

# Folders of other tools by a name in them.
FOLDERS = {
    "saved_model.pb": ("a TensorFlow SavedModel", FROM_TENSORFLOW),
    "keras_metadata.pb": ("a Keras model", FROM_KERAS),
    "manifest.ocdbt": ("a checkpoint of Orbax (JAX)", f"restore it with orbax.checkpoint, {AS_ARRAYS}"),
    "_CHECKPOINT_METADATA": ("a checkpoint of Orbax (JAX)", f"restore it with orbax.checkpoint, {AS_ARRAYS}"),
    "Manifest.json": ("a Core ML package", ONLY_CODE),
}

OLDEST = re.compile(rb"\([dl]p\d+\n|\(i[\w.]+\n\w+\n|c[\w.]+\n[\w.]+\n")  # a pickle of protocol 0
TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{1,512}")

FROM_SAFETENSORS = "numpy.savez(..., **safetensors.numpy.load_file(...))"

# Formats by their names' endings, for an output that asks for one: what it is, and what makes it.
ENDINGS = {
    ".gguf": ("GGUF", "write safetensors next to config.json, then run llama.cpp's convert_hf_to_gguf.py"),
    ".onnx": ("ONNX", "it holds the model's code too: load the state, then torch.onnx.export"),
    **dict.fromkeys((".h5", ".hdf5"), ("HDF5", "write safetensors, and store its tensors with h5py")),
    **dict.fromkeys((".npz", ".npy"), ("NumPy archives", f"write safetensors, then {FROM_SAFETENSORS}")),
    ".pt2": ("exported programs", "they hold the model's code: load the state, then torch.export.save"),
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
    """Return the error for a file that begins, or is called, as something else; None for any other."""
    path, head = source.path, head_of(source)
    name = os.path.basename(path).lower()
    rows = [row for row in HEADS if row[0].match(head)] + [row for row in NAMED if row[0].fullmatch(name)]
    if not rows:
        return None
    _, what, hint = rows[0]
    return Unsupported(path, f"is {what}", hint=_unpacking(path, head, hint))


def _unpacking(path: str, head: bytes, hint: str) -> str:
    """Return a hint whose command unpacks a file, whatever its name is; another as it is."""
    tool = hint.removeprefix(UNPACK)
    if tool == hint or " " in tool or path == "-":
        return hint
    if path.lower().endswith(TARS) or _is_tar(head):
        return f"{UNPACK}tar -xf {shlex.quote(path)}"
    stem, end = os.path.splitext(path)
    plain = stem if end.lower() in (".gz", ".bz2", ".xz", ".zst") else f"{path}.unpacked"
    return f"{UNPACK}{tool} -c {shlex.quote(path)} > {shlex.quote(plain)}"


def _is_tar(head: bytes) -> bool:
    """Return whether a file that gzip packed is an archive; of others only the name tells."""
    try:
        return zlib.decompressobj(31).decompress(head, 512)[257:262] == b"ustar"
    except zlib.error:
        return False


def stranger_folder(path: str, names: list[str]) -> Unsupported | None:
    """Return the error for a folder that another tool wrote; None for any other."""
    found = next((FOLDERS[name] for name in names if name in FOLDERS), None)
    return found and Unsupported(path, f"is {found[0]}, which is not read here", hint=found[1])


def stranger(source: Source) -> Unsupported:
    """Return the error for a file in a format that is not read here."""
    if fault := known(source):
        return fault
    head = head_of(source)
    if head[:1] == b"\x80" or (OLDEST.match(head) and source.read(source.size - 1, 1) == b"."):
        listed = f"see what is in it, without running it: python -m pickletools {shlex.quote(source.path)}"
        return Unsupported(source.path, "is a pickle, but not one that torch.save wrote", hint=listed)
    if TEXT.fullmatch(head) and source.size < 1 << 16:  # what some servers send instead of a file
        line = " ".join(head.decode().split())[:80]
        return Unsupported(source.path, f"is not a checkpoint, but text: {line}")
    return Unsupported(source.path, "is not a checkpoint in any format known here")


def output_at(path: str, revision: str | None = None) -> str:
    """Return an output's URL in its one form, a path as it is; refuse a URL to which nothing is uploaded."""
    scheme = path.partition("://")[0].lower()
    if not is_url(path) or os.path.isdir(f"{scheme}:"):
        return system.local(path)
    if scheme not in (*BUCKETS, HUB, "file"):
        what = f"{masked(path, whole=True)}: is a URL of a kind that is not written here"
        raise UsageFault(what, hint="s3, gs, az and hf are written; for others write a file, then upload it")
    return canonical(path, revision)


def unwritable(path: str) -> UsageFault | None:
    """Return the error for an output whose ending asks for a format that is not written here."""
    what, hint = ENDINGS.get(os.path.splitext(path)[1].lower(), ("", ""))
    return UsageFault(f"{path}: can't write {what}", hint=hint) if what else None


def checkpoints_inside(path: str, names: list[str], unpack: str) -> Unsupported | None:
    """Return the error for an archive that is no checkpoint itself but has some, by the names in it."""
    files = [name for name in names if name.lower().endswith(ARCHIVED)]
    what = f"is an archive that holds checkpoints: {first_few([name[:80] for name in files], 3)}"
    return Unsupported(path, what, hint=f"unpack it first: {unpack} {shlex.quote(path)}") if files else None
