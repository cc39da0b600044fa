"""What lies next to a model in its folder: named when it stays behind, copied along with --companions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

WEIGHTS = {"a.weight": torch.ones(3, 2), "a.bias": torch.ones(3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One whole model, as transformers and accelerate leave it."""
    made = tmp_path / "hf"
    made.mkdir()
    save_file(WEIGHTS, made / "model.safetensors")
    save_file(WEIGHTS, made / "model_1.safetensors")
    torch.save({"state": {}}, made / "optimizer.pt")
    for name in ("config.json", "tokenizer.json"):
        (made / name).write_text("{}")
    (made / "notes.txt").write_text("mine")
    return made


def test_what_lies_next_to_one_whole_model_is_named(folder: Path, tmp_path: Path, cli: Any) -> None:
    for words in ("merge a.pt", "convert b.safetensors", "convert c/", "slim d.pt"):
        command, output = words.split()
        ran = cli(command, folder, f"{tmp_path}/{output}")
        assert ran.code == 0
        assert "not copied (--companions does): config.json, tokenizer.json\n" in ran.err, command
        others = "other files of the folder, not copied: model_1.safetensors, notes.txt, optimizer.pt\n"
        assert others in ran.err, command
    ran = cli("convert", folder / "model.safetensors", tmp_path / "e.pt")
    assert "not copied" not in ran.err, "a file was named, not its folder"


@pytest.mark.parametrize(
    "command",
    [
        *("merge", "slim", "add-prefix", "convert --dtype bf16", "rename-keys --map ^a=b"),
        *("split --ranks 2 --as dcp", "split --ranks 2 --as dtensor"),
    ],
)
def test_every_command_copies_companions(command: str, folder: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli(*command.split(), folder, f"{tmp_path}/out/", "--companions")
    assert ran.code == 0, ran.err
    assert {"config.json", "tokenizer.json"} <= {*os.listdir(tmp_path / "out")}
    assert "notes.txt" not in os.listdir(tmp_path / "out")
    assert f"copying along: {tmp_path}/out/config.json, {tmp_path}/out/tokenizer.json\n" in ran.err
    again = cli(*command.split(), folder, f"{tmp_path}/out/", "--companions", "--force", "--json")
    assert again.code == 0, again.out
    wanted = [f"{tmp_path}/out/{name}" for name in ("config.json", "tokenizer.json")]
    assert again.json["companions"] == wanted


def test_companions_need_a_folder_and_a_place(folder: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli("convert", folder / "model.safetensors", tmp_path / "a.pt", "--companions")
    assert ran.code == 2 and f"hint: name the folder: {folder}" in ran.err
    ran = cli("convert", folder, "-", "--companions")
    assert ran.code == 2 and "--companions" in ran.err


def test_a_folder_that_is_changed_in_place_keeps_its_files_and_says_nothing(folder: Path, cli: Any) -> None:
    (folder / "model_1.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(WEIGHTS, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = cli("add-prefix", folder, f"{folder}/", "--force", "--companions")
    assert ran.code == 0, ran.err
    assert "not copied" not in ran.err
    assert (folder / "config.json").read_text() == "{}"


def test_links_are_followed_within_folder_and_hub_cache(folder: Path, tmp_path: Path, cli: Any) -> None:
    (tmp_path / "id_rsa").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tokenizer_config.json").write_text("secret")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../id_rsa")
    (folder / "huggingface").symlink_to("../elsewhere")
    (folder / "generation_config.json").symlink_to("tokenizer.json")
    os.mkfifo(folder / "vocab.json")
    ran = cli("convert", folder, f"{tmp_path}/out/", "--companions", "-v")
    assert ran.code == 0, ran.err
    assert {*os.listdir(tmp_path / "out")} & {"config.json", "vocab.json", "tokenizer_config.json"} == set()
    assert (tmp_path / "out" / "generation_config.json").read_text() == "{}"
    assert "config.json (a link out of the folder)" in ran.err
    assert "huggingface (a link out of the folder)" in ran.err
    assert "vocab.json" in ran.err


def test_the_links_of_the_hub_cache_are_followed(tmp_path: Path, cli: Any) -> None:
    blobs, snapshot = tmp_path / "models--a" / "blobs", tmp_path / "models--a" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(WEIGHTS, blobs / "1")
    (blobs / "2").write_text('{"a": 1}')
    for name, blob in (("model.safetensors", "1"), ("config.json", "2")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    (snapshot / "tokenizer.json").symlink_to("../../../blobs/2")
    assert cli("convert", snapshot, f"{tmp_path}/out/", "--companions").code == 0
    assert (tmp_path / "out" / "config.json").read_text() == '{"a": 1}'
    assert not (tmp_path / "out" / "config.json").is_symlink()
    assert not (tmp_path / "out" / "tokenizer.json").exists()
