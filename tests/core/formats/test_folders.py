"""Outputs that are folders: which format they get, and what they never replace."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core import system
from tests.support.comparing import convert
from tests.support.running import Cli, Ran, assert_says

TRAINING = {
    "model": {"module.a": torch.ones(2), "module.b": torch.zeros(3)},
    "optimizer": {"state": {"a": {"m": torch.ones(2)}}, "param_groups": [{"params": ["a"]}]},
    "epoch": 3,
}
FOLDERS = ["safetensors-sharded", "torch-sharded", "dcp"]
COMMANDS: dict[str, list[str]] = {
    "rename-keys": ["--map", "module=m"],
    "strip-prefix": [],
    "add-prefix": ["--prefix", "x."],
    "slim": [],
    "convert": [],
}


def index_of(folder: Path) -> Path:
    """The file by which a folder may be named too."""
    return next(path for path in folder.iterdir() if path.name.endswith((".index.json", ".metadata")))


def folder_of(kind: str, path: Path, tree: object = TRAINING, **given: Any) -> Path:
    """A folder of that format, named without a slash."""
    convert(tree, path, to=kind, **given)
    return path


@pytest.fixture(params=FOLDERS)
def kind(request: Any) -> Any:
    return request.param


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    return folder_of(kind, tmp_path / "d")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return folder_of("safetensors-sharded", tmp_path / "d")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_changed_in_place_keeps_its_format(kind: str, folder: Path, command: str, cli: Cli) -> None:
    ran = cli(command, folder, folder, *COMMANDS[command], "--force", "--json")
    assert (ran.code, ran.json["format"]) == (0, kind)
    assert ckpttool.open(folder).format == kind


@pytest.mark.parametrize("full", [False, True])
def test_a_dcp_folder_keeps_all_when_its_keys_are_renamed(full: bool, cli: Cli, tmp_path: Path) -> None:
    more = {5: ["five"]} if full else {}
    folder = folder_of("dcp", tmp_path / "d", {**TRAINING, **more}, full=full)
    assert cli("strip-prefix", folder, folder, "--force", "--json").json["left_out"] == []
    found = ckpttool.open(folder)
    assert {name for name, _ in found.tensors()} == {"model.a", "model.b", "optimizer.state.a.m"}
    assert isinstance(found.tree, dict) and found.tree["epoch"] == 3
    assert (found.format, found.full, found.tree.get(5)) == ("dcp", full, more.get(5))


def test_an_output_that_is_a_folder_has_its_format(kind: str, folder: Path, cli: Cli, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    words = ["convert", tmp_path / "m.safetensors", folder, "--force"]
    assert cli(*words).code == 0
    assert ckpttool.open(folder).format == kind
    other = FOLDERS[FOLDERS.index(kind) - 1]
    assert cli(*words, "--to", other).code == 0
    assert ckpttool.open(folder).format == other


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "empty"])
def test_a_new_folder_has_the_input_s_format(kind: str, folder: Path, is_there: bool, cli: Cli) -> None:
    for command, found in (("strip-prefix", kind), ("convert", "safetensors-sharded")):
        out = folder.with_name(command)
        if is_there:
            out.mkdir()
        assert cli(command, folder, f"{out}/", "--force").code == 0
        assert ckpttool.open(out).format == found


@pytest.mark.parametrize("more", [[], ["--force"], ["--force", "--dry-run"]], ids=str)
def test_other_files_are_told_at_once(more: list[str], shards: Path, cli: Cli, tmp_path: Path) -> None:
    (shards / "config.json").write_text("{}")
    ran = cli("convert", tmp_path / "in.pt", shards, *more)
    assert ran.code == 2
    assert f"{shards}: already exists, and holds other files too (config.json)\n" in ran.err
    assert ran.err.endswith("hint: name a new folder, or a file in it\n")
    assert (shards / "config.json").read_text() == "{}"


@pytest.fixture(params=[False, True], ids=["folder", "index"])
def source(request: Any, folder: Path) -> Path:
    """A folder, or the index by which it is named."""
    return index_of(folder) if request.param else folder


def test_files_that_a_new_folder_does_not_get_are_named(source: Path, folder: Path, cli: Cli) -> None:
    others = ["config.json", "vocab.txt"]
    for name in (*others, ".gitattributes"):
        (folder / name).write_text("{}")
    ran = cli("strip-prefix", source, f"{folder.with_name('new')}/")
    assert "not copied (--companions does): config.json, vocab.txt\n" in ran.err
    for other in (folder.with_name("other"), folder / "stripped"):
        assert cli("strip-prefix", source, f"{other}/", "--json").json["not_copied"] == others
    assert "not_copied" not in cli("strip-prefix", source, folder, "--force", "--json").json
    one_file = cli("strip-prefix", source, folder.with_name("one.pt"), "--json").json
    assert one_file.get("not_copied") == ([*others, "stripped"] if source == folder else None)


def test_other_files_of_a_changed_folder_stay(source: Path, folder: Path, cli: Cli, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{}")
    (tmp_path / "vocabulary").write_text("a b")
    (folder / "vocab.txt").symlink_to("../vocabulary")
    assert "write it anyway with --force" in cli("strip-prefix", source, folder).err
    ran = cli("strip-prefix", source, folder, "--force", "--json")
    assert ran.code == 0
    assert set(ckpttool.open(folder).state().tensors) == {"a", "b"}
    written = [path for path in folder.iterdir() if path.name not in ("config.json", "vocab.txt")]
    assert ran.json["bytes"] == sum(path.stat().st_size for path in written)
    assert (folder / "config.json").read_text() == "{}"
    assert os.readlink(folder / "vocab.txt") == "../vocabulary"
    assert sorted(os.listdir(tmp_path)) == ["d", "in.pt", "vocabulary"]


@pytest.mark.parametrize("in_place", [False, True])
def test_what_came_meanwhile_stays(folder: Path, in_place: bool, cli: Cli, monkeypatch: MonkeyPatch) -> None:
    sync_folder = system.sync_folder

    def meanwhile(path: str) -> None:
        (folder / "trainer_state.json").write_text("{}")
        sync_folder(path)

    monkeypatch.setattr(system, "sync_folder", meanwhile)
    ran = cli("strip-prefix", folder if in_place else folder.with_name("in.pt"), folder, "--force")
    assert ran.code == 0
    assert (folder / "trainer_state.json").read_text() == "{}"
    assert "put into the folder by another process meanwhile, and kept: trainer_state.json\n" in ran.err


NOT_OURS = {
    "a folder named like a shard": "old-00001-of-00002.safetensors/notes.txt",
    "a folder named like a part of DCP": "run.distcp/notes.txt",
    "a file named like a shard, which no index names": "old-00001-of-00002.safetensors",
    "an index of other files": "notes.index.json",
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_what_no_index_names_stays(kind: str, folder: Path, what: str, cli: Cli, tmp_path: Path) -> None:
    path = folder / NOT_OURS[what]
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"weight_map": {"a": "notes.txt", "b": "../in.pt"}}')
    kept = path
    if "index of" in what:
        (kept := folder / "notes.txt").write_text("kept")
    before = kept.read_text()
    for words in (["convert", tmp_path / "in.pt", folder], ["strip-prefix", folder, folder]):
        assert cli(*words, "--force").code in (0, 2)
        assert kept.read_text() == before
        assert (tmp_path / "in.pt").exists()


@pytest.mark.parametrize("kind", ["dcp", "safetensors-sharded"])
@pytest.mark.parametrize("name", ["../in.pt", "{folder}/in.pt", "below/in.pt"])
def test_files_outside_a_folder_stay(name: str, kind: str, folder: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    named = name.format(folder=tmp_path)
    if kind == "dcp":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = named
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        (folder / "__0_0.distcp").unlink()
    else:
        index_of(folder).write_text(json.dumps({"weight_map": {"a": named}}))
        next(folder.glob("*.safetensors")).unlink()
    torch.save(TRAINING, tmp_path / "other.pt")
    cli("convert", tmp_path / "other.pt", folder, "--force")
    assert (tmp_path / "in.pt").exists()


def test_more_shards_are_replaced_without_a_rest(shards: Path, cli: Cli, tmp_path: Path) -> None:
    words = ["convert", tmp_path / "in.pt", shards, "--force", "--shard-size"]
    for size, count in (("8B", 2), ("1G", 1)):
        assert cli(*words, size, "--json").json["shards"] == count
        assert len(os.listdir(shards)) == count + 1


@pytest.mark.parametrize("name", ["itself", "a hard link", "a link", "the index"])
def test_a_part_of_the_input_is_no_output(folder: Path, name: str, cli: Cli, tmp_path: Path) -> None:
    is_index = name == "the index"
    part = next(path for path in sorted(folder.iterdir()) if (path == index_of(folder)) == is_index)
    out = part if name in ("itself", "the index") else tmp_path / "out"
    if name == "a hard link":
        os.link(part, out)
    elif name == "a link":
        out.symlink_to(part)
    before = contents(folder)
    for source in (folder, index_of(folder)):
        ran = cli("convert", source, out, "--to", "safetensors", "--force")
        assert ran.code == 2
        assert f"{out}: already exists, and is a part of the input {source}\n" in ran.err
    assert contents(folder) == before


def test_a_shard_is_not_replaced_by_the_folder_around_it_nor_another_input(shards: Path, cli: Cli) -> None:
    (shard,) = shards.glob("*.safetensors")
    assert_says(cli("strip-prefix", shard, shards, "--force"), 2, f"and is a part of the input {shard}\n")
    assert set(ckpttool.open(shards).state().tensors) == {"module.a", "module.b"}
    other = shards.with_name("in.pt")
    assert_says(cli("average", shards, other, shard, "--force"), 2, "is a part of the input")
    assert cli("average", other, shards, shards.with_name("out.safetensors")).code == 0


def test_what_can_not_be_removed_is_named(shards: Path, cli: Cli, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(os, "unlink", refuse)
    ran = cli("strip-prefix", shards, shards, "--force")
    assert ran.code == 0
    (left,) = shards.parent.glob(".d.*")
    assert f"could not be removed: {left} (operation not permitted)\n" in ran.err
    ran = cli("add-prefix", shards, shards, "--force", "--json")
    assert left.name in ran.json["not_removed"][-1] or left.name in ran.json["not_removed"][0]


@pytest.mark.parametrize("what", ["a folder", "a link that leads nowhere"])
def test_what_is_no_plain_file_can_not_stay(what: str, shards: Path, cli: Cli) -> None:
    (shards / "onnx").mkdir() if what == "a folder" else (shards / "onnx").symlink_to("nowhere")
    (shards / "config.json").write_text("{}")
    assert_says(cli("strip-prefix", shards, shards, "--force"), 2, "holds other files too (onnx)")
    assert sorted(os.listdir(shards))[-2:] == ["model.safetensors.index.json", "onnx"]


def test_another_checkpoint_in_a_folder_stays(shards: Path, cli: Cli, tmp_path: Path) -> None:
    for path in folder_of("torch-sharded", tmp_path / "other").iterdir():
        path.rename(shards / path.name)
    index = shards / "pytorch_model.bin.index.json"
    assert cli("strip-prefix", shards, shards, "--force").code == 0
    assert set(ckpttool.open(shards).state().tensors) == {"a", "b"}
    assert set(ckpttool.open(index).state().tensors) == {"module.a", "module.b"}
    assert cli("add-prefix", index, shards, "--prefix", "x.", "--force").code == 0
    assert set(ckpttool.open(shards).state().tensors) == {"a", "b"}
    assert set(ckpttool.open(index).state().tensors) == {"x.module.a", "x.module.b"}
    ran = cli("convert", index, shards, "--to", "safetensors-sharded", "--force")
    assert ran.code == 2 and "which can't be kept: file exists" in ran.err


def test_files_that_can_t_be_kept_change_nothing(shards: Path, cli: Cli, monkeypatch: MonkeyPatch) -> None:
    (shards / "config.json").write_text("{}")
    before = contents(shards)
    monkeypatch.setattr(os, "link", refuse)
    ran = cli("strip-prefix", shards, shards, "--force")
    assert ran.code == 2 and "(config.json), which can't be kept: operation not permitted" in ran.err
    assert contents(shards) == before
    assert sorted(os.listdir(shards.parent)) == ["d", "in.pt"]


def test_what_contradicts_itself_is_told_before_force_is_proposed(cli: Cli, tmp_path: Path) -> None:
    ran = cli("convert", tmp_path / "in.pt", folder_of("dcp", tmp_path / "d"), "--shard-size", "5GB")
    assert ran.code == 2 and "a shard size was given" in ran.err


def test_a_folder_may_be_put_where_a_link_leads_nowhere(cli: Cli, tmp_path: Path) -> None:
    torch.save(TRAINING, tmp_path / "in.pt")
    (tmp_path / "link").symlink_to("target")
    words: list[Any] = ["convert", tmp_path / "in.pt", tmp_path / "link", "--to", "torch-sharded"]
    assert "write it anyway with --force" in cli(*words).err
    assert cli(*words, "--force").code == 0
    assert os.listdir(tmp_path / "target")


def test_a_dry_run_knows_about_the_size_of_a_dcp_folder(cli: Cli, tmp_path: Path) -> None:
    torch.save(TRAINING, tmp_path / "in.pt")
    words: list[Any] = ["convert", tmp_path / "in.pt", tmp_path / "d", "--dry-run", "--to"]
    assert "(about 28 bytes, " in cli(*words, "dcp").out
    assert "(about" not in cli(*words, "torch-sharded").out


def test_an_empty_folder_is_written_into_without_force(kind: str, cli: Cli, tmp_path: Path) -> None:
    torch.save(TRAINING, tmp_path / "in.pt")
    for name in ("d", "f", "hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "hidden" / ".keep").write_text("")

    def into(name: str, to: str) -> Ran:
        return cli("convert", tmp_path / "in.pt", f"{tmp_path}/{name}", "--to", to)

    assert into("d/", kind).code == 0
    assert cli("inspect", tmp_path / "d", "--json").json["format"] == kind
    again = into("d/", kind)
    assert (again.code, "--force" in again.err) == (2, True)
    assert (into("f", "safetensors").code, into("hidden/", kind).code) == (2, 2)
