"""A seal: what it says, what verify finds by it, and that model-signing verifies what it states."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.core import system
from ckpttool.core.files.digest import PIECE
from ckpttool.errors import Damaged, NoState, OutputExists, Refused, Unsupported
from ckpttool.sealing import seal as sealing
from tests.support.every_format import INPUTS
from tests.support.hub_server import Hub
from tests.support.range_server import RangeServer
from tests.support.running import ROOT, Cli, assert_says

shared = torch.arange(12, dtype=torch.float32).reshape(3, 4)
STATE = {
    "w": torch.linspace(-1, 1, 600).reshape(20, 30),
    "b": torch.zeros(7).bfloat16(),
    "n": torch.tensor(3),
    "e": torch.empty(0, 5),
}
VIEWS = {
    "tied": shared,
    "again": shared,
    "turned": shared.t(),
    "part": shared[1:, :2],
    "flat": shared.view(-1),
}


def kinds(path: object, **choices: Any) -> list[tuple[str, str]]:
    """What verify finds by a seal."""
    found = ckpttool.verify(path, **choices)  # type: ignore[arg-type]
    assert found.sealed
    return [(problem.name, problem.message) for problem in found.problems if problem.kind == "seal"]


def said(path: Path) -> Any:
    return json.loads(path.read_text())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def model(here: Path) -> Path:
    save_file(STATE, here / "m.safetensors", metadata={"format": "pt"})
    return here / "m.safetensors"


@pytest.fixture
def folder(here: Path) -> Path:
    """A sealed folder of two shards, with what lies beside them."""
    torch.save(STATE, here / "all.pt")
    ckpttool.convert(here / "all.pt", here / "model/", to="safetensors-sharded", shard_size=1300)
    (here / "model/config.json").write_text('{"model_type": "none"}')
    (here / "model/below").mkdir()
    (here / "model/below/vocab.txt").write_text("a\n")
    ckpttool.seal(here / "model")
    return here / "model"


# What a seal says.


def test_what_a_seal_says_can_be_recomputed(model: Path) -> None:
    sealed = ckpttool.seal(model)
    assert (sealed.path, sealed.keys, sealed.files) == (f"{model}.seal.json", 4, ("m.safetensors",))
    seal, raw = said(Path(sealed.path)), model.read_bytes()
    assert sealed.digest == seal["digest"] == ckpttool.digest(model)
    assert seal["files"] == {"m.safetensors": sha256(model)}
    for name, tensor in STATE.items():
        entry = seal["tensors"][name]
        _, start, nbytes = entry["place"]
        values = raw[start : start + nbytes]
        assert values == bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        pieces = hashlib.sha256(values).digest() if values else b""  # of 16 MiB, docs/digest.md
        assert entry["sha256"] == hashlib.sha256(pieces).hexdigest()
        assert (entry["dtype"], entry["shape"]) == (str(tensor.dtype).removeprefix("torch."), [*tensor.shape])


def test_every_byte_is_read_once(here: Path, monkeypatch: MonkeyPatch) -> None:
    save_file({"big": torch.zeros(PIECE + 3, dtype=torch.uint8), "w": torch.ones(9)}, here / "m.safetensors")
    expected, read = ckpttool.digest(here / "m.safetensors"), list[int]()
    preadv = system.preadv

    def counting(fd: int, views: Any, offset: int) -> int:
        read.append(preadv(fd, views, offset))
        return read[-1]

    monkeypatch.setattr(system, "preadv", counting)
    assert ckpttool.seal(here / "m.safetensors").digest == expected
    assert sum(read) == os.path.getsize(here / "m.safetensors")


@pytest.mark.parametrize("form", INPUTS)
def test_every_format_is_sealed_and_known_again(form: str, here: Path) -> None:
    path = here / ("in" if "shards" in form or "DCP" in form else "in.pt")
    try:
        INPUTS[form](path)
    except ImportError as lacking:
        pytest.skip(f"{lacking.name} is not installed")
    ckpttool.seal(path)
    assert ckpttool.verify(path).sealed
    assert kinds(path) == []
    seal = said(here / ("in/ckpttool.seal.json" if path.is_dir() else "in.pt.seal.json"))
    assert seal["digest"] == ckpttool.digest(path)
    for name, value in seal["files"].items():
        assert sha256((path if path.is_dir() else here) / name) == value


def test_tied_tensors_and_views_have_the_digests_of_their_values(here: Path) -> None:
    torch.save({"model": STATE | VIEWS, "optimizer": {"state": {0: {"m": torch.ones(4)}}}}, here / "c.pt")
    sealed = ckpttool.seal("c.pt")
    seal = said(Path(sealed.path))
    assert sealed.digest == ckpttool.digest("c.pt")
    assert [*seal["outside"]] == ["optimizer.state.0.m"]
    assert seal["tensors"]["tied"] == seal["tensors"]["again"]
    assert seal["tensors"]["flat"]["sha256"] == seal["tensors"]["tied"]["sha256"]
    assert seal["tensors"]["turned"]["sha256"] != seal["tensors"]["tied"]["sha256"]
    assert kinds("c.pt") == []


@pytest.mark.parametrize("state", [{}, {"one": torch.tensor(1)}])
def test_a_model_of_no_tensor_or_of_one(state: dict[str, torch.Tensor], here: Path) -> None:
    save_file(state, here / "m.safetensors")
    assert ckpttool.seal("m.safetensors").keys == len(state)
    assert kinds("m.safetensors") == []


# What verify finds.


def test_each_changed_byte_is_found_and_a_tensor_is_named(model: Path) -> None:
    ckpttool.seal(model)
    place = said(Path(f"{model}.seal.json"))["tensors"]["w"]["place"][1]
    intact = model.read_bytes()
    for at, name in [(place, "w"), (place + 2399, "w"), (intact.index(b'"pt"') + 1, "m.safetensors")]:
        flip(model, at)
        assert name in [found for found, _ in kinds(model)]
        model.write_bytes(intact)
    assert kinds(model) == []


def test_a_changed_byte_of_padding_is_found_in_a_zip(here: Path) -> None:
    torch.save(STATE, here / "c.pt")
    ckpttool.seal("c.pt")
    flip(here / "c.pt", (here / "c.pt").read_bytes().rindex(b"ZZZZZZZZ"))
    assert kinds("c.pt") == [("c.pt", "is not the file that was sealed, though its tensors are")]


def renamed(path: Path, old: str, new: str, **more: torch.Tensor) -> None:
    state = {new if name == old else name: tensor for name, tensor in STATE.items()}
    save_file(state | more, path, metadata={"format": "pt"})


def of_bits(name: str, path: Path) -> None:
    state = {**STATE, name: STATE[name].view(torch.float16)}
    save_file(state, path, metadata={"format": "pt"})


CHANGES: dict[str, tuple[Callable[[Path], object], tuple[str, str]]] = {
    "renamed": (lambda path: renamed(path, "w", "v"), ("v", "is sealed as 'w'")),
    "added": (lambda path: renamed(path, "", "", x=torch.ones(1)), ("x", "is not sealed")),
    "removed": (
        lambda path: save_file({k: t for k, t in STATE.items() if k != "n"}, path),
        ("n", "is sealed, and is not here"),
    ),
    "same bytes": (lambda path: of_bits("b", path), ("b", "is float16 [7], sealed as bfloat16 [7]")),
    "same bytes, another shape": (
        lambda path: save_file({**STATE, "w": STATE["w"].view(30, 20)}, path),
        ("w", "is float32 [30, 20], sealed as float32 [20, 30]"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_of_another_name_or_form_is_named(change: str, model: Path) -> None:
    ckpttool.seal(model)
    make, expected = CHANGES[change]
    make(model)
    assert kinds(model)[0] == expected


def test_files_of_a_folder(folder: Path) -> None:
    assert kinds(folder) == kinds(folder / "model.safetensors.index.json") == []
    (folder / "below/vocab.txt").write_text("b\n")
    (folder / "config.json").unlink()
    (folder / "run.py").write_text("")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    other = "is not the file that was sealed"
    assert sorted(kinds(folder)) == [
        ("below/vocab.txt", other),
        ("config.json", "is sealed, and is not here"),
        ("model.safetensors.index.json", other),
        ("run.py", "is not sealed"),
    ]


@pytest.mark.skipif(os.name == "nt", reason="links and pipes of POSIX")
def test_what_is_no_file_is_not_sealed(folder: Path, here: Path) -> None:
    (here / "code").mkdir()
    (here / "code/run.py").write_text("")
    (folder / "code").symlink_to(here / "code")
    (folder / "nowhere.py").symlink_to("nothing")
    os.mkfifo(folder / "below/pipe")
    odd = ["below/pipe", "code", "nowhere.py"]
    assert kinds(folder) == [(name, "is not sealed") for name in odd]
    for name in odd:
        with pytest.raises(Refused, match=rf"{name}: is no file, and a seal covers files alone"):
            ckpttool.seal(folder, force=True)
        (folder / name).unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(here / "code")
    assert kinds(folder) == [("config.json", "is sealed, and is not here")]


def test_the_seal_of_a_folder_counts_for_a_file_in_it(here: Path) -> None:
    (here / "d").mkdir()
    save_file(STATE, here / "d/model.safetensors")
    ckpttool.seal("d")
    assert kinds("d") == kinds("d/model.safetensors") == []
    (here / "d/more.txt").write_text("")
    assert kinds("d/model.safetensors") == [("more.txt", "is not sealed")]


def test_a_shard_has_its_own_tensors_of_the_folders_seal(folder: Path) -> None:
    shards = sorted(folder.glob("model-*.safetensors"))
    assert [kinds(shard) for shard in shards] == [[]] * len(shards)
    state = {name: tensor.clone() for name, tensor in load_file(shards[0]).items()}
    gone, _ = state.popitem()
    save_file(state, shards[0], metadata={"format": "pt"})
    found = kinds(shards[0])
    assert (gone, "is sealed, and is not here") in found
    assert {name for name, _ in found} == {gone, shards[0].name}


def test_a_folder_has_its_own_seal_compared_where_its_file_has_one_too(here: Path, cli: Cli) -> None:
    (here / "d").mkdir()
    save_file(STATE, here / "d/model.safetensors")
    (here / "d/config.json").write_text("{}")
    ckpttool.seal("d/model.safetensors")
    ckpttool.seal("d")
    (here / "d/config.json").write_text('{"a": 1}')
    changed = [("config.json", "is not the file that was sealed")]
    for folder in ("d", "d/"):
        assert kinds(folder) == kinds(folder, seal="d/ckpttool.seal.json") == changed
        assert "config.json" in cli("verify", folder).err
    assert kinds("d/model.safetensors") == []
    (here / "d/model.safetensors").rename(here / "d/adapter_model.safetensors")
    assert len(kinds("d", seal="d/ckpttool.seal.json")) == 3


def test_another_format_of_the_model_is_known_by_its_tensors(here: Path, cli: Cli) -> None:
    wrapped = {f"module.{name}": tensor for name, tensor in (STATE | VIEWS).items()}
    torch.save({"model": wrapped, "optimizer": {"state": {0: {"m": torch.ones(4)}}}}, here / "c.pt")
    cli("seal", "c.pt")
    cli("convert", "c.pt", "c.safetensors")
    assert cli("verify", "c.safetensors", "--json").json["sealed"] is False
    assert "ok, as it was sealed" in cli("verify", "c.safetensors", "--seal", "c.pt.seal.json").out
    cli("strip-prefix", "c.pt", "plain.safetensors")
    found = dict(kinds("plain.safetensors", seal="c.pt.seal.json"))
    assert found["w"] == "is sealed as 'module.w'"
    assert len(found) == len(wrapped)


def test_a_model_and_its_seal_may_get_another_name_together(model: Path) -> None:
    ckpttool.seal(model)
    other = model.rename(model.parent / "other.safetensors")
    Path(f"{model}.seal.json").rename(f"{other}.seal.json")
    assert kinds(other) == []


def test_what_the_command_prints(model: Path, cli: Cli) -> None:
    ran = cli("seal", "m.safetensors", "--json")
    assert (ran.json["output"], ran.json["files"]) == ("m.safetensors.seal.json", ["m.safetensors"])
    assert cli("verify", "m.safetensors", "--json").json["sealed"] is True
    flip(model, -1)
    assert_says(cli("verify", "m.safetensors"), 1, "seal: b: has other values than were sealed")
    assert cli("verify", "m.safetensors", "--seal", "none.json").code == 3
    assert cli("seal", "m.safetensors").code == 2
    assert cli("seal", "m.safetensors", "--dry-run", "--out", "x.json").code == 0
    assert not os.path.exists("x.json")


# A seal that is none.


def put(seal: Any, value: object, *keys: str) -> Any:
    at = seal
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return seal


OF_W = "tensors", "w"
HOSTILE: dict[str, Callable[[Any], object]] = {
    "no object": lambda seal: [seal],
    "no version": lambda seal: {key: value for key, value in seal.items() if key != "seal"},
    "a version that is no number": lambda seal: put(seal, True, "seal"),
    "a digest of another tensor": lambda seal: put(seal, "0" * 64, *OF_W, "sha256"),
    "a digest that is none": lambda seal: put(seal, "x", *OF_W, "sha256"),
    "NaN": lambda seal: put(seal, [float("nan")], *OF_W, "shape"),
    "a type that is none": lambda seal: put(seal, ["float32"], *OF_W, "dtype"),
    "a path out of the folder": lambda seal: put(seal, "0" * 64, "files", "../secret"),
    "an absolute path": lambda seal: put(seal, "0" * 64, "files", "/etc/passwd"),
    "another file than is stated": lambda seal: put(seal, "0" * 64, "files", "m.safetensors"),
    "a statement that is none": lambda seal: put(seal, 7, "statement"),
    "no files": lambda seal: put(seal, [], "files"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_damaged_seal_is_refused_by_its_name(fault: str, model: Path) -> None:
    path = Path(ckpttool.seal(model).path)
    path.write_text(json.dumps(HOSTILE[fault](said(path))))
    with pytest.raises(Damaged, match=r"m\.safetensors\.seal\.json"):
        ckpttool.verify(model)


def test_a_seal_that_is_cut_or_huge_or_newer(model: Path) -> None:
    path = Path(ckpttool.seal(model).path)
    text = path.read_text()
    for raw in (text[:-9], "", text.replace('"files"', '"tensors"'), "[" * 100_000):
        path.write_text(raw)
        with pytest.raises(Damaged):
            ckpttool.verify(model)
    with open(path, "w") as file:
        file.write(text)
        file.truncate(1 << 30)
    with pytest.raises(Damaged, match="too large for a seal of this model"):
        ckpttool.verify(model)
    path.write_text(text.replace('"seal": 1', '"seal": 2'))
    with pytest.raises(Unsupported, match="version 2"):
        ckpttool.verify(model)


def test_the_seal_of_another_model_names_every_tensor(model: Path, here: Path) -> None:
    save_file({"other": torch.ones(3)}, here / "o.safetensors")
    ckpttool.seal("o.safetensors")
    names = [name for name, _ in kinds(model, seal="o.safetensors.seal.json")]
    assert sorted(names) == ["b", "e", "n", "other", "w"]


# Where it is written.


def test_no_input_is_replaced_and_no_seal_without_force(model: Path) -> None:
    ckpttool.seal(model)
    before = model.read_bytes()
    with pytest.raises(OutputExists):
        ckpttool.seal(model)
    with pytest.raises(OutputExists, match="is the input"):
        ckpttool.seal(model, model, force=True)
    assert model.read_bytes() == before
    ckpttool.seal(model, force=True)
    ckpttool.seal(model, "apart.json")
    assert kinds(model, seal="apart.json") == []


def test_a_folder_that_can_not_be_written_takes_no_seal(model: Path, cli: Cli) -> None:
    home = model.parent / "closed"
    home.mkdir()
    shutil.copy(model, home / "m.safetensors")
    home.chmod(0o500)
    try:
        ran = cli("seal", "closed/m.safetensors")
        assert ran.code == 2 or os.geteuid() == 0
        assert cli("seal", "closed/m.safetensors", "--out", "own.json").code == 0
    finally:
        home.chmod(0o700)
    assert kinds("closed/m.safetensors", seal="own.json") == []


def test_two_at_once_leave_one_whole_seal(model: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        made = [*pool.map(lambda _: ckpttool.seal(model, force=True).digest, range(4))]
    assert len({*made}) == 1
    assert kinds(model) == []
    assert sorted(os.listdir()) == ["m.safetensors", "m.safetensors.seal.json"]


def test_a_model_that_changes_meanwhile_is_refused(model: Path, monkeypatch: MonkeyPatch) -> None:
    of_views = sealing.Hashes.of_views

    def slowly(hashes: sealing.Hashes, progress: Any = None) -> Any:
        os.utime(model, ns=(1, 1))
        return of_views(hashes, progress)

    monkeypatch.setattr(sealing.Hashes, "of_views", slowly)
    with pytest.raises(Refused, match="was changed while it was read"):
        ckpttool.seal(model)
    assert os.listdir() == ["m.safetensors"]


def test_what_has_no_place_or_no_values_is_refused(here: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.full((3,), float(step))}, here / f"{step}.pt")
    (here / "below").mkdir()
    ckpttool.delta("1.pt", "2.pt", "2.safetensors")
    ckpttool.seal("2.safetensors")  # its base lies beside it
    assert [*said(here / "2.safetensors.seal.json")["files"]] == ["1.pt", "2.safetensors"]
    assert kinds("2.safetensors") == []
    (here / "2.safetensors").rename(here / "below/2.safetensors")
    with pytest.raises(Refused):
        ckpttool.seal("1.pt+below/2.safetensors")
    torch.save({"parts": {"folder": "x.parts", "files": {}}}, here / "parts.pt")
    with pytest.raises(NoState):
        ckpttool.seal("parts.pt")


# Elsewhere.


@pytest.fixture
def cache(here: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTTOOL_CACHE", str(here / "cache"))


@pytest.mark.usefixtures("cache")
def test_a_remote_model_is_read_once(model: Path) -> None:
    ckpttool.seal(model)
    there = {path.name: path.read_bytes() for path in (model, Path(f"{model}.seal.json"))}
    with RangeServer(there) as server:
        found = ckpttool.verify(f"{server.url}/m.safetensors")
        assert (found.ok, found.sealed, found.unsealed) == (True, True, ("m.safetensors",))
        there["m.safetensors"] = there["m.safetensors"][:-1] + b"\1"
    with RangeServer(there) as server:
        url = f"{server.url}/m.safetensors"
        assert kinds(model, seal=f"{url}.seal.json") == []
        assert [name for name, _ in kinds(url, seal=f"{model}.seal.json")] == ["b"]


@pytest.mark.usefixtures("cache")
def test_the_hub_tells_the_hash_of_a_file(here: Path, monkeypatch: MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    (here / "d").mkdir()
    save_file(STATE, here / "d/model.safetensors")
    (here / "d/config.json").write_text("{}")
    ckpttool.seal("d")
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        repo = hub.create("o/r")
        repo.commit_folder(here / "d")
        found = ckpttool.verify("hf://o/r")
        assert (found.ok, found.sealed, found.unsealed) == (True, True, ())
        repo.commit({"config.json": b'{"a": 1}'})
        assert kinds("hf://o/r")[0][0] == "config.json"


# What model-signing makes of it: docs/seal.md has these lines.


def lines(language: str) -> Iterator[str]:
    """The blocks of a language in docs/seal.md."""
    for block in (ROOT / "docs/seal.md").read_text().split(f"```{language}\n")[1:]:
        yield block.partition("```")[0]


def test_model_signing_verifies_what_the_page_signs(folder: Path, here: Path) -> None:
    if find_spec("model_signing") is None:
        pytest.skip("model-signing is not installed")
    keys, verify = (each.splitlines() for each in lines("sh"))
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    for command in keys:
        subprocess.run(command, shell=True, check=True, capture_output=True)
    words = verify[0].split()[1:]
    (here / "both.py").write_text(f"{next(lines('python'))}{TWICE.format(words)}")
    ran = subprocess.run([sys.executable, "both.py"], capture_output=True, text=True)
    assert [line for line in ran.stdout.splitlines() if line in ("True", "False")] == ["True"] * 2, ran.stderr
    assert kinds(folder) == [("config.json", "is not the file that was sealed")]


TWICE = """
from model_signing._cli import main


def verifies():
    try:
        main({0}, standalone_mode=False)
    except SystemExit as end:
        return not end.code
    return True


print(verifies())
Path("model/config.json").write_text("x")
print(not verifies())
"""
