"""What an output may replace: no input that is needed beside it, and without --force nothing at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core import system
from ckpttool.core.files.commit import replacing
from ckpttool.core.files.commit_folder import replacing_folder
from ckpttool.core.formats.output import OutputPlace
from ckpttool.errors import OutputExists
from tests.support.comparing import saved_predictions
from tests.support.running import ROOT, Cli, assert_says


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def pair(here: Path) -> Path:
    """Write b and n, a delta between them, b as a folder of shards, and links to all of it."""
    save_file({"w": torch.arange(3000.0), "v": torch.ones(3)}, "b.safetensors")
    save_file({"w": torch.arange(3000.0) + 1, "v": torch.ones(3)}, "n.safetensors")
    save_file({"x.w": torch.arange(3000.0), "x.v": torch.ones(3)}, "x.safetensors")
    ckpttool.delta("b.safetensors", "n.safetensors", "d.safetensors")
    with ckpttool.open("b.safetensors") as base:
        ckpttool.save(base, "shards/", shard_size=4000)
    Path("link.safetensors").symlink_to("b.safetensors")
    os.link("b.safetensors", "hard.safetensors")
    Path("folder").symlink_to(".")
    Path("linked").symlink_to("shards")
    return here


SHARD = "shards/model-00001-of-00002.safetensors"

# BASE NEW OUTPUT of `delta`: each time the base would be lost, or a part of it.
LOST = {
    "the same name": "b.safetensors n.safetensors b.safetensors",
    "./": "b.safetensors n.safetensors ./b.safetensors",
    "a link to the base": "b.safetensors n.safetensors link.safetensors",
    "the base as a link": "link.safetensors n.safetensors b.safetensors",
    "a hard link": "b.safetensors n.safetensors hard.safetensors",
    "a linked folder": "folder/b.safetensors n.safetensors b.safetensors",
    "file://": "file://{here}/b.safetensors n.safetensors b.safetensors",
    "to file://": "b.safetensors n.safetensors file://{here}/b.safetensors",
    "new is the base": "b.safetensors b.safetensors b.safetensors",
    "a shard": f"shards n.safetensors {SHARD}",
    "a shard of a linked folder": f"linked n.safetensors {SHARD}",
    "a shard of the new one": f"b.safetensors shards {SHARD}",
    "a chain to its delta": "b.safetensors+d.safetensors n.safetensors d.safetensors",
    "a chain to its base": "b.safetensors+d.safetensors n.safetensors b.safetensors",
    "a delta to its base": "d.safetensors n.safetensors b.safetensors",
    "a delta to itself": "d.safetensors n.safetensors d.safetensors",
    "the base of a new delta": "n.safetensors d.safetensors b.safetensors",
}


@pytest.mark.parametrize("words", LOST.values(), ids=LOST)
def test_a_delta_never_replaces_its_base(words: str, pair: Path, cli: Cli) -> None:
    given, before = words.format(here=pair).split(), contents(pair)
    for more in ((), ("--dry-run",)):
        ran = cli("delta", *given, "--force", *more)
        assert_says(ran, 2, "already exists, and is ", "the input ", "hint: name another output, such as ")
        assert ran.err.splitlines()[1].endswith("-2.safetensors")
    with pytest.raises(OutputExists):
        ckpttool.delta(*given, force=True)
    assert contents(pair) == before


def test_a_delta_may_take_the_place_of_what_it_makes_again(pair: Path, cli: Cli) -> None:
    whole = ckpttool.digest("n.safetensors")
    assert cli("delta", "b.safetensors", "n.safetensors", "n.safetensors", "--force").code == 0
    assert ckpttool.digest("n.safetensors") == whole


# Commands of which no input may be replaced, and those that make one checkpoint of one.
KEPT = {
    "apply to its base": "apply b.safetensors d.safetensors b.safetensors",
    "convert of a chain to its base": "convert d.safetensors link.safetensors",
    "apply of a chain to a link of it": "apply b.safetensors d.safetensors hard.safetensors",
    "average": "average b.safetensors n.safetensors n.safetensors",
    "average of a folder": "average n.safetensors shards shards/",
    "average with a chain": "average n.safetensors d.safetensors b.safetensors",
    "the base of a merge": "average n.safetensors hard.safetensors link.safetensors --method task "
    "--base b.safetensors",
    "conform": "conform x.safetensors b.safetensors --like link.safetensors",
    "conform like a chain": "conform x.safetensors b.safetensors --like d.safetensors",
    "merge": f"merge shards {SHARD}",
    "merge-lora to its base": "merge-lora b.safetensors adapter b.safetensors",
    "merge-lora to its adapter": "merge-lora b.safetensors adapter adapter/adapter_model.safetensors",
    "extract-lora": "extract-lora adapter/adapter_model.safetensors n.safetensors adapter --rank 1",
    "adapter": "adapter adapter adapter/adapter_model.safetensors --to kohya --component unet",
    "split": "split ranks ranks/ --ranks 1 --as dtensor",
    "report": "report page.html page.html",
    "report of a chain": "report b.safetensors+page.html page.html",
    "inspect": "inspect page.html --html page.html",
    "diff": "diff b.safetensors page.html --html page.html",
    "gather-metrics": "gather-metrics rank0.safetensors rank1.safetensors --out rank1.safetensors",
}


@pytest.mark.parametrize("words", KEPT.values(), ids=KEPT)
def test_what_stays_needed_is_never_replaced(words: str, pair: Path, cli: Cli) -> None:
    Path("adapter").mkdir()
    rows = {f"base_model.model.w.lora_{each}.weight": torch.ones(2, 2) for each in "AB"}
    save_file(rows, "adapter/adapter_model.safetensors")
    Path("adapter/adapter_config.json").write_text('{"r": 2, "lora_alpha": 2, "peft_type": "LORA"}')
    save_file({"w.weight": torch.ones(2, 2)}, "b.safetensors") if "lora" in words else None
    os.rename("d.safetensors", "page.html") if "page" in words else None
    saved_predictions(pair, 2, 6)
    with ckpttool.open("n.safetensors") as checkpoint:
        ckpttool.split(checkpoint, "ranks", 2)
    before = contents(pair)
    ran = cli(*words.split(), "--force")
    assert ran.code == 2 and "--force" not in ran.err, ran
    assert contents(pair) == before


@pytest.mark.parametrize(
    "words",
    [
        "strip-prefix x.safetensors x.safetensors --prefix x.",
        "add-prefix link.safetensors b.safetensors --prefix x.",
        "convert shards shards/ --dtype bf16",
        "convert d.safetensors d.safetensors",
        "apply b.safetensors d.safetensors d.safetensors",
        "conform x.safetensors x.safetensors --like b.safetensors",
    ],
)
def test_one_checkpoint_made_of_one_may_take_its_place(words: str, pair: Path, cli: Cli) -> None:
    refused = cli(*words.split())
    assert (refused.code, "--force" in refused.err) == (2, True), refused
    ran = cli(*words.split(), "--force")
    assert ran.code == 0, ran.err


# Files that appear while the output is made.


@pytest.fixture(params=["link", "no link"])
def links(request: Any, monkeypatch: MonkeyPatch) -> None:
    """Have a file system with hard links, or without."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if request.param == "no link":
        monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("links")
def test_a_file_that_appears_meanwhile_is_not_replaced(here: Path) -> None:
    with pytest.raises(OutputExists, match="f: already exists"), replacing("f", exclusive=True) as file:
        file.write(b"mine")
        Path("f").write_bytes(b"theirs")
    assert contents(here) == {str(here / "f"): b"theirs"}
    with pytest.raises(OutputExists), replacing("f", exclusive=True):
        raise AssertionError("it is not even begun")
    with replacing("g", exclusive=True) as file:
        file.write(b"mine")
    assert contents(here) == {str(here / "f"): b"theirs", str(here / "g"): b"mine"}


def test_a_link_that_leads_nowhere_is_an_output_that_is_there(pair: Path, cli: Cli) -> None:
    Path("out.safetensors").symlink_to("nowhere.safetensors")
    assert_says(cli("slim", "n.safetensors", "out.safetensors"), 2, "already exists", "--force")
    assert not Path("nowhere.safetensors").exists()


@pytest.mark.parametrize("there", ["a file", "a folder", "something in an empty folder"])
def test_a_folder_that_appears_meanwhile_is_not_replaced(there: str, here: Path) -> None:
    if there == "something in an empty folder":
        Path("out").mkdir()
    with (
        pytest.raises(OutputExists, match="out: already exists"),
        replacing_folder("out", lambda _: ["mine"], exclusive=True) as new,
    ):
        (Path(new.path) / "mine").write_bytes(b"mine")
        if there == "a file":
            Path("out").write_bytes(b"theirs")
        else:
            Path("out").mkdir(exist_ok=True)
            Path("out/mine").write_bytes(b"theirs")
    assert [*contents(here).values()] == [b"theirs"]
    assert os.listdir(here) == ["out"]


def test_an_empty_folder_gives_way(here: Path) -> None:
    Path("out").mkdir(mode=0o750)
    with replacing_folder("out", lambda _: ["mine"], exclusive=True) as new:
        (Path(new.path) / "mine").write_bytes(b"mine")
    assert contents(here) == {str(here / "out" / "mine"): b"mine"}
    assert Path("out").stat().st_mode & 0o777 == 0o750


APPEARS = {
    "convert": "convert b.safetensors out.pt",
    "slim": "slim b.safetensors out.pt",
    "delta": "delta b.safetensors n.safetensors out.safetensors",
    "report": "report b.safetensors out.html",
    "inspect": "inspect b.safetensors --html out.html",
    "shards": "convert b.safetensors out/",
    "dcp": "split b.safetensors out --ranks 2 --as dcp",
    "ranks": "split b.safetensors out --ranks 2 --as dtensor",
}


@pytest.mark.parametrize("words", APPEARS.values(), ids=APPEARS)
def test_no_command_replaces_what_appears_meanwhile(
    words: str, pair: Path, cli: Cli, monkeypatch: MonkeyPatch
) -> None:
    out = Path(next(word for word in words.split() if word.startswith("out")))
    flush = os.fsync

    def slowly(fd: int) -> None:
        flush(fd)
        if not out.exists():
            out.write_bytes(b"theirs")

    monkeypatch.setattr(os, "fsync", slowly)
    ran = cli(*words.split())
    assert_says(ran, 2, f"error: {out}", "already exists\n", "hint: write it anyway with --force")
    assert out.read_bytes() == b"theirs"
    assert [name for name in os.listdir(pair) if name.startswith(".")] == []


@pytest.mark.parametrize("out", ["out.safetensors", "out/"])
def test_of_commands_at_once_one_is_done(out: str, here: Path) -> None:
    save_file({"module.w": torch.ones(1_000_000)}, "in.safetensors")
    command = [sys.executable, "-m", "ckpttool", "strip-prefix", "in.safetensors", out]
    given: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **given) for _ in range(8)]
    said = [each.communicate(timeout=60) for each in started]
    assert sorted(each.returncode for each in started) == [0] + 7 * [2], said
    assert sum(f"error: {out}: already exists\n" in err for _, err in said) == 7
    assert [*ckpttool.open(out).state().tensors] == ["w"]


def test_a_companion_that_appears_meanwhile_is_not_replaced(
    pair: Path, cli: Cli, monkeypatch: MonkeyPatch
) -> None:
    Path("shards/config.json").write_text("{}")
    flush = os.fsync

    def slowly(fd: int) -> None:
        flush(fd)
        Path("out").mkdir(exist_ok=True)
        Path("out/config.json").write_text("theirs")

    monkeypatch.setattr(os, "fsync", slowly)
    Path("out").mkdir()
    ran = cli("convert", "shards", "out/model.safetensors", "--companions")
    assert_says(ran, 2, "out/config.json: already exists")
    assert Path("out/config.json").read_text() == "theirs"
    assert pair


def test_an_object_that_is_needed_is_never_replaced() -> None:
    place = OutputPlace("s3://bucket/base.pt", True, ["s3://bucket/base.pt"])
    with pytest.raises(OutputExists, match=r"such as s3://bucket/base-2\.pt"), place.local():
        raise AssertionError("nothing is asked of the bucket")


WAYS = {
    "convert": ("convert", "a.pt", "out"),
    "a folder": ("convert", "a.pt", "out/", "--shard-size", "10kB"),
    "a part": ("convert", "a.pt", "out", "--part", "1/1"),
    "a part of a folder": ("convert", "a.pt", "out/", "--shard-size", "10kB", "--part", "1/1"),
    "dcp": ("convert", "a.pt", "out/", "--to", "dcp"),
    "slim": ("slim", "a.pt", "out"),
    "average": ("average", "b.pt", "a.pt", "out"),
    "delta": ("delta", "b.safetensors", "a.safetensors", "out"),
    "delta on a private one": ("delta", "a.safetensors", "b.safetensors", "out"),
    "apply": ("apply", "a.safetensors", "d.safetensors", "out"),
    "extract-lora": ("extract-lora", "a.safetensors", "b.safetensors", "out/", "--rank", "2"),
    "split": ("split", "b.pt", "out/", "--as", "dtensor", "--ranks", "2"),
    "report": ("report", "b.pt", "a.pt", "out.html"),
}


@pytest.mark.skipif(not system.HAS_OWNERS, reason="has no permissions")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o444])
def test_a_new_output_has_no_more_permissions_than_its_inputs(
    way: str, mode: int, here: Path, cli: Cli
) -> None:
    weights = {"module.l.weight": torch.randn(64, 64)}
    for name, more in (("a", 0), ("b", 1), ("d", 0)):
        changed = {key: value + more * torch.eye(64) for key, value in weights.items()}
        torch.save(changed, f"{name}.pt")
        save_file(changed, f"{name}.safetensors")
        Path(f"{name}.safetensors").chmod(0o644)
    ckpttool.delta("a.safetensors", "b.safetensors", "d.safetensors", force=True)
    private = "b.pt" if way == "split" else "a.pt" if "a.pt" in WAYS[way] else "a.safetensors"
    Path(private).chmod(mode)
    mask = os.umask(0o022)
    try:
        words = [word if word != "out" else f"out{Path(private).suffix}" for word in WAYS[way]]
        assert cli(*words).code == 0
    finally:
        os.umask(mask)
    found = {
        path.name: path.stat().st_mode & 0o777 for path in here.rglob("*") if path.name.startswith("out")
    }
    files = {path: path.stat().st_mode & 0o777 for path in here.glob("out/*")} or found
    assert {*files.values()} == {mode | 0o600}, files
    if (here / "out").is_dir():
        assert found["out"] == mode | 0o700 | (mode & 0o444) >> 2


def test_what_came_by_a_pipe_is_as_private_as_the_umask_says(here: Path) -> None:
    torch.save({"l.weight": torch.randn(4)}, "a.pt")
    command = [sys.executable, "-c", "from ckpttool.core.cli import main; main()", "convert", "-", "out.pt"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, input=Path("a.pt").read_bytes(), check=True, umask=0o027, env=environment)
    assert Path("out.pt").stat().st_mode & 0o777 == 0o640
