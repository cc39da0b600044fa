"""Files that run code when they are loaded, each in another way, and honest files of the same kinds.

Loading an attack makes `canary` in the current folder; `how` says what loads it. Writing imports torch.
"""

from __future__ import annotations

import argparse
import bz2
import collections
import datetime
import gzip
import io
import json
import lzma
import pathlib
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.crafting import (
    call,
    dict_of,
    list_of,
    name,
    number,
    program,
    safetensors_file,
    text,
    torch_legacy,
    torch_zip,
    tuple_of,
)


class Case(NamedTuple):
    """A file, and what loads it: a key of LOADERS in scan_loading; None where no one call does."""

    file: str
    write: Callable[[Path], object]
    how: str | None = "pickle"


CODE = "__import__('os').mkdir('canary')"
MKDIR = call(name("os", "mkdir"), text("canary"))
PAYLOAD = program(MKDIR)
ARRAY = name("joblib.numpy_pickle", "NumpyArrayWrapper")


def raw(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def calling(module: str, attribute: str, *args: bytes, protocol: int = 2) -> Callable[[Path], object]:
    """Write a pickle that calls a function, whose name may have dots in protocol 4."""
    if "." in attribute:
        named = text(module) + text(attribute) + b"\x93"
        return raw(program(call(named, *args), 4))
    return raw(program(call(name(module, attribute), *args), protocol))


def tarred(inside: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo(inside)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(inside: str, data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr(inside, data)
    return out.getvalue()


def changed(write: Callable[[Path], object], change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    """Write a file and change its bytes."""

    def both(path: Path) -> None:
        write(path)
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return both


def _zip(path: Path) -> None:
    torch_zip(path, dict_of({"w": MKDIR}))


def _at(signature: bytes, offset: int, value: bytes) -> Callable[[bytearray], None]:
    """Replace bytes of the first header with a signature: that of `data.pkl`."""

    def change(data: bytearray) -> None:
        at = data.index(signature) + offset
        data[at : at + len(value)] = value

    return change


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


def _wrong_crc(data: bytearray) -> None:
    _at(LOCAL, 14, b"\1\2\3\4")(data)
    _at(CENTRAL, 16, b"\1\2\3\4")(data)


def _torch_tar(path: Path) -> None:
    """A tar of torch before 0.1.12; its second pickle runs code, between storages."""
    first = program(number(1)) + program(MKDIR)
    members = {"storages": first, "tensors": program(number(0)), "pickle": program(b"}")}
    with tarfile.open(path, "w") as archive:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _joblib(compress: int | tuple[str, int] = 0) -> Callable[[Path], object]:
    """An array of objects, one of which runs code, behind an array of numbers."""

    def write(path: Path) -> None:
        import joblib
        import numpy as np

        joblib.dump([np.ones(4), np.array([_Runs(), 1], dtype=object)], path, compress=compress)

    return write


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, ("canary",)


def _numpy(packed: bool) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import numpy as np

        objects = np.array([_Runs(), 1], dtype=object)
        with path.open("wb") as file:
            np.savez_compressed(file, a=np.ones(3), o=objects) if packed else np.save(file, objects)

    return write


def _legacy_bytes() -> bytes:
    """What torch.storage._load_from_bytes is given: a file of torch.save before 1.6, here with code in it."""
    parts = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join([*parts, PAYLOAD, pickle.dumps([], 2)])


def _extra_state(path: Path) -> None:
    """A tensor of bytes that is a pickle, as the _extra_state of some layers is."""
    import torch

    torch.save({"layer._extra_state": torch.frombuffer(bytearray(PAYLOAD), dtype=torch.uint8)}, path)


def _row_of_zips(path: Path) -> None:
    """Several files of torch.save in one, as DCP writes them; the second has code in it."""
    import torch

    torch.save(torch.ones(3), path)
    first = path.read_bytes()
    _zip(path)
    path.write_bytes(first + path.read_bytes())


def bytes_of(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


# An array of joblib whose bytes are opcodes for whoever reads the file with pickle.load.
IN_ARRAY = (
    ARRAY
    + b")\x81"
    + dict_of(
        {
            "subclass": name("numpy", "ndarray"),
            "shape": tuple_of(number(len(MKDIR) + 1)),
            "order": text("C"),
            "dtype": call(name("numpy", "dtype"), text("u1"), b"\x89", b"\x88"),
        }
    )
    + b"b"
    + MKDIR
    + b"0"
    + b"."
)

ATTACKS: dict[str, Case] = {
    # What is called.
    "os.mkdir": Case("a.pkl", calling("os", "mkdir", text("canary"))),
    "posix.mkdir": Case("a.pkl", calling("posix", "mkdir", text("canary"))),
    "os.system": Case("a.pkl", calling("os", "system", text("mkdir canary"))),
    "eval": Case("a.pkl", calling("builtins", "eval", text(CODE))),
    "exec, protocol 0": Case("a.pkl", raw(b'c__builtin__\nexec\n(S"%b"\ntR.' % CODE.encode())),
    "subprocess": Case("a.pkl", calling("subprocess", "check_call", list_of(text("mkdir"), text("canary")))),
    "getattr chain": Case(
        "a.pkl",
        raw(
            program(
                call(
                    call(
                        name("builtins", "getattr"),
                        call(name("importlib", "import_module"), text("os")),
                        text("mkdir"),
                    ),
                    text("canary"),
                )
            )
        ),
    ),
    "runpy._run_code": Case("a.pkl", calling("runpy", "_run_code", text(CODE), b"}")),
    "code.InteractiveInterpreter": Case(
        "a.pkl",
        raw(
            program(
                call(
                    text("code") + text("InteractiveInterpreter.runsource") + b"\x93",
                    call(name("code", "InteractiveInterpreter")),
                    text(CODE),
                ),
                4,
            )
        ),
    ),
    "pydoc.pipepager": Case("a.pkl", calling("pydoc", "pipepager", text(""), text("mkdir canary"))),
    "timeit.timeit": Case("a.pkl", calling("timeit", "timeit", text(f"{CODE}; raise ValueError"))),
    "cProfile.run": Case("a.pkl", calling("cProfile", "run", text(CODE))),
    "bdb.Bdb.run": Case(
        "a.pkl",
        raw(program(call(text("bdb") + text("Bdb.run") + b"\x93", call(name("bdb", "Bdb")), text(CODE)), 4)),
    ),
    "logging.FileHandler": Case("a.pkl", calling("logging", "FileHandler", text("canary"))),
    "sqlite3.connect": Case("a.pkl", calling("sqlite3", "connect", text("canary"))),
    "uuid._get_command_stdout": Case(
        "a.pkl", calling("uuid", "_get_command_stdout", text("mkdir"), text("canary"))
    ),
    "multiprocessing.util.spawnv_passfds": Case(
        "a.pkl",
        raw(
            program(
                call(
                    name("multiprocessing.util", "spawnv_passfds"),
                    bytes_of(b"/bin/mkdir"),
                    list_of(bytes_of(b"mkdir"), bytes_of(b"canary")),
                    tuple_of(),
                ),
                3,
            )
        ),
    ),
    "pathlib.Path.mkdir": Case(
        "a.pkl",
        raw(
            program(
                call(
                    text("pathlib") + text("Path.mkdir") + b"\x93",
                    call(name("pathlib", "PosixPath"), text("canary")),
                ),
                4,
            )
        ),
    ),
    "numpy runstring": Case("a.pkl", calling("numpy.testing._private.utils", "runstring", text(CODE), b"}")),
    "torch.utils.collect_env.run": Case(
        "a.pkl", calling("torch.utils.collect_env", "run", text("mkdir canary"))
    ),
    "torch execWrapper": Case(
        "a.pkl", calling("torch.jit.unsupported_tensor_ops", "execWrapper", text(CODE), b"}", b"}")
    ),
    "a module in a module": Case("a.pkl", calling("torch.serialization", "os.mkdir", text("canary"))),
    "a module in a class's module": Case(
        "a.pkl", calling("torch.nn.modules.module", "torch.os.mkdir", text("canary"))
    ),
    "pickle.loads of bytes": Case("a.pkl", calling("pickle", "loads", bytes_of(PAYLOAD), protocol=3)),
    "_load_from_bytes": Case(
        "a.pkl", calling("torch.storage", "_load_from_bytes", bytes_of(_legacy_bytes()), protocol=3)
    ),
    "torch.load": Case("a.pkl", calling("torch", "load", text("other.pt")), None),
    "pip.main": Case("a.pkl", calling("pip", "main", list_of(text("install"), text("x"))), None),
    "idlelib.run": Case("a.pkl", calling("idlelib.run", "Executive", text("x")), None),
    # How it is called.
    "INST": Case("a.pkl", raw(program(b"(" + text("canary") + b"ios\nmkdir\n"))),
    "OBJ": Case("a.pkl", raw(program(b"(" + name("os", "mkdir") + text("canary") + b"o"))),
    "memoised strings": Case(
        "a.pkl",
        raw(
            program(
                text("os") + b"q\x000" + text("mkdir") + b"q\x010h\x00h\x01\x93" + text("canary") + b"\x85R",
                4,
            )
        ),
    ),
    "strings made far away": Case(
        "a.pkl",
        raw(
            program(
                list_of(text("os") + b"r\xff\xff\x00\x00", text("mkdir") + b"r\x00\x00\x10\x00")
                + b"0j\xff\xff\x00\x00j\x00\x00\x10\x00\x93"
                + text("canary")
                + b"\x85R",
                4,
            )
        ),
    ),
    "a second PROTO": Case("a.pkl", raw(b"\x80\x04\x80\x02" + MKDIR + b".")),
    "a FRAME of a wrong length": Case("a.pkl", raw(b"\x80\x02" + MKDIR + b"0\x95\xff\0\0\0\0\0\0\0}.")),
    "a result that is dropped": Case("a.pkl", raw(program(MKDIR + b"0" + dict_of({"w": number(1)})))),
    "an end that is broken": Case("a.pkl", raw(b"\x80\x02" + MKDIR + b"\xff\xff")),
    "an end that is missing": Case("a.pkl", raw(b"\x80\x02" + MKDIR)),
    "a broken end, protocol 0": Case("a.bin", raw(b"cos\nmkdir\n(S'canary'\ntR\xff")),
    "the second pickle": Case("a.pkl", raw(pickle.dumps({"w": 1}) + PAYLOAD), "pickle twice"),
    "behind 20 MB of bytes": Case("a.pkl", raw(program(bytes_of(bytes(20_000_000)) + b"0" + MKDIR, 3))),
    "the bytes of joblib's array": Case("a.joblib", raw(program(IN_ARRAY)[:-1])),
    # What a file is called.
    "called .txt": Case("a.txt", raw(PAYLOAD)),
    "called .jpg, protocol 0": Case("a.jpg", raw(b"cos\nmkdir\n(S'canary'\ntR.")),
    "called .safetensors": Case("a.safetensors", raw(PAYLOAD)),
    "a zip called .bin": Case("a.bin", _zip, "torch"),
    "a zip called .txt": Case("a.txt", _zip, "torch"),
    # Files of torch.
    "torch zip": Case("a.pt", _zip, "torch"),
    "torch zip, deflated": Case(
        "a.pt",
        lambda path: torch_zip(path, dict_of({"w": MKDIR}), compression=zipfile.ZIP_DEFLATED),
        "torch",
    ),
    "torch zip, a wrong CRC": Case("a.pt", changed(_zip, _wrong_crc), "torch"),
    "torch zip, a flag of encryption": Case("a.pt", changed(_zip, _at(LOCAL, 6, b"\1\0")), "torch"),
    "torch zip, another name in the local header": Case("a.pt", changed(_zip, _at(LOCAL, 30, b"A")), "torch"),
    "torch zip, a folder's bit": Case("a.pt", changed(_zip, _at(CENTRAL, 38, b"\x10")), "torch"),
    "torch legacy": Case("a.pt", lambda path: torch_legacy(path, dict_of({"w": MKDIR})), "torch"),
    "torch tar": Case("a.pt", _torch_tar, "torch"),
    "a tensor of bytes": Case("a.pt", _extra_state, "extra state"),
    "a row of zips": Case("__0_0.distcp", _row_of_zips, None),
    # Files of joblib and NumPy.
    "joblib": Case("a.joblib", _joblib(), "joblib"),
    "joblib, zlib": Case("a.joblib", _joblib(3), "joblib"),
    "joblib, gzip": Case("a.joblib", _joblib(("gzip", 3)), "joblib"),
    "joblib, bz2": Case("a.joblib", _joblib(("bz2", 3)), "joblib"),
    "joblib, xz": Case("a.joblib", _joblib(("xz", 3)), "joblib"),
    "joblib, lzma": Case("a.joblib", _joblib(("lzma", 3)), "joblib"),
    "npy": Case("a.npy", _numpy(packed=False), "numpy"),
    "npy called .bin": Case("a.bin", _numpy(packed=False), "numpy"),
    "npz": Case("a.npz", _numpy(packed=True), "numpy"),
    # Containers in containers.
    "pickle.gz": Case("a.pkl.gz", raw(gzip.compress(PAYLOAD)), "gzip"),
    "pickle.bz2": Case("a.pkl.bz2", raw(bz2.compress(PAYLOAD)), None),
    "pickle.xz": Case("a.pkl.xz", raw(lzma.compress(PAYLOAD)), None),
    "zlib": Case("a.bin", raw(zlib.compress(PAYLOAD)), None),
    "tar": Case("a.tar", raw(tarred("x.pkl", PAYLOAD)), None),
    "tar.gz": Case("a.tar.gz", raw(gzip.compress(tarred("x.pkl", PAYLOAD))), None),
    "zip in zip": Case("a.zip", raw(zipped("x.zip", zipped("x.pkl", PAYLOAD))), None),
    "gz in tar in zip": Case(
        "a.zip", raw(zipped("x.tar", tarred("x.pkl.gz", gzip.compress(PAYLOAD)), zipfile.ZIP_DEFLATED)), None
    ),
    "zip, bzip2": Case("a.zip", raw(zipped("x.pkl", PAYLOAD, zipfile.ZIP_BZIP2)), None),
    "a zip behind a pickle": Case("a.pkl", raw(PAYLOAD + zipped("x.txt", b"x"))),
    "a zip behind other bytes": Case("a.bin", raw(b"MZ" + bytes(100) + zipped("x.pkl", PAYLOAD)), None),
}


# Honest files.


def _torch(value: Callable[[Any], object], **given: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import torch

        torch.save(value(torch), path, **given)

    return write


def _training(torch: Any) -> object:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "lr": [0.1, 0.2]}


def _settings(torch: Any) -> object:
    import numpy as np

    return {
        "args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("runs")),
        "when": datetime.datetime(2026, 1, 1),
        "counts": collections.Counter("abc"),
        "more": collections.defaultdict(list, a=[1]),
        "rng": np.random.RandomState(0).get_state(),
        "best": np.float64(0.5),
        "rows": np.arange(3),
    }


def _joblib_of(value: Callable[[Any], object], **given: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import joblib
        import numpy as np

        joblib.dump(value(np), path, **given)

    return write


def _array(value: Callable[[Any], object]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import numpy as np

        with path.open("wb") as file:
            np.save(file, value(np))

    return write


def _arrays(path: Path) -> None:
    import numpy as np

    with path.open("wb") as file:
        np.savez_compressed(file, a=np.ones((30, 30)), n=np.arange(9))


def _script(path: Path) -> None:
    import torch

    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


def _fitted(path: Path) -> None:
    import joblib
    from sklearn.linear_model import LogisticRegression

    joblib.dump(LogisticRegression().fit([[0.0], [1.0]], [0, 1]), path)


def _pickled_tensor(path: Path) -> None:
    import torch

    path.write_bytes(pickle.dumps({"w": torch.ones(3)}))


def _plain(protocol: int) -> Callable[[Path], object]:
    data = {"a": [1, 2.5, None, True], "b": (b"x\x80\x02c", "text", {1, 2}), 3: 2**70, "c": 1j}
    return raw(pickle.dumps(data, protocol))


PYTHON = b"class Net:\n    open\n\nimport os\nos.system('ls')\n"

HONEST: dict[str, Case] = {
    "torch, a state": Case("a.pt", _torch(lambda torch: torch.nn.Linear(3, 2).state_dict())),
    "torch, training": Case("a.pt", _torch(_training)),
    "torch, legacy": Case("a.pt", _torch(_training, _use_new_zipfile_serialization=False)),
    "torch, legacy, 640 numbers": Case(
        "a.pt", _torch(lambda torch: {"w": torch.ones(640)}, _use_new_zipfile_serialization=False)
    ),
    "torch, settings and NumPy": Case("a.pt", _torch(_settings)),
    "torch, a whole model": Case(
        "a.pt", _torch(lambda torch: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    ),
    "torch, other tensors": Case(
        "a.pt",
        _torch(
            lambda torch: [
                torch.ones(2).bfloat16(),
                torch.eye(2).to_sparse(),
                torch.nn.Parameter(torch.ones(2)),
                torch.frombuffer(bytearray(b"\x80\x02\x00\x01N."), dtype=torch.uint8),
            ]
        ),
    ),
    "TorchScript": Case("a.pt", _script),
    "pickle of a tensor": Case("a.pkl", _pickled_tensor),
    **{f"pickle, protocol {protocol}": Case("a.pkl", _plain(protocol)) for protocol in range(6)},
    "pickles in a row": Case("a.pkl", raw(b"".join(pickle.dumps({"row": n}) for n in range(50)))),
    "pickle and raw numbers": Case("a.pkl", raw(pickle.dumps({"n": 9}) + struct.pack("<9d", *range(9)))),
    "joblib, arrays": Case(
        "a.joblib", _joblib_of(lambda np: {"w": np.ones((3, 4)), "s": np.array(["a", "bc"]), "n": 1})
    ),
    "joblib, compressed": Case(
        "a.joblib", _joblib_of(lambda np: {"w": np.ones((9, 9)), "o": np.array([1, "x"], object)}, compress=3)
    ),
    "scikit-learn": Case("a.joblib", _fitted),
    "npy": Case("a.npy", _array(lambda np: np.ones((3, 4)))),
    "npy of text": Case("a.npy", _array(lambda np: np.array(["a", "b"]))),
    "npy of objects": Case("a.npy", _array(lambda np: np.array(["a", 1, None], dtype=object))),
    "npz": Case("a.npz", _arrays),
    "safetensors": Case(
        "a.safetensors",
        lambda path: safetensors_file(
            path, {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)
        ),
    ),
    "labels": Case("labels.txt", raw(b"cat\ndog\nopen\nbird\n")),
    "Python's source": Case("net.py", raw(PYTHON)),
    "JSON": Case("config.json", raw(json.dumps({"model_type": "x"}).encode())),
    "Markdown": Case("README.md", raw(b"# A model\n\ncos\nsystem\n")),
    "nothing": Case("__init__.py", raw(b"")),
    "random bytes": Case("a.bin", raw(random.Random(0).randbytes(1 << 16))),
    "numbers": Case("a.bin", raw(struct.pack("<1000f", *range(1000)))),
    "source in a tar.gz": Case("a.tar.gz", raw(gzip.compress(tarred("net.py", PYTHON)))),
}


def written(cases: dict[str, Case], folder: Path) -> dict[str, Path]:
    """Write the files of some cases, each in a folder of its own; return their paths."""
    paths = {}
    for number_, (title, case) in enumerate(cases.items()):
        path = folder / str(number_) / case.file
        path.parent.mkdir(parents=True)
        case.write(path)
        paths[title] = path
    return paths
