"""Where output goes: shards, what lies next to a model in its folder, and an OUTPUT that was forgotten."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.core.cli import group
from tests.support.comparing import prefixed, saved_predictions

# --shard-size: every command that writes takes it, and the number of shards is printed.

COMMANDS = {
    "strip-prefix": "in.pt OUT",
    "add-prefix": "in.pt OUT",
    "rename-keys": "in.pt OUT --map module=m",
    "convert": "in.pt OUT",
    "slim": "in.pt OUT",
    "convert-batchnorm": "norm.pt OUT --to sync",
    "average": "in.pt in.pt OUT",
}


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    torch.save({f"module.w{i}": torch.ones(100) for i in range(4)}, "in.pt")
    norm = torch.nn.BatchNorm1d(100).state_dict()
    del norm["num_batches_tracked"]
    torch.save(norm, "norm.pt")


@pytest.mark.parametrize(("size", "shards"), [("400", 4), ("0.8k", 2), ("800B", 2), ("1G", 1)])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_writer_cuts_shards_and_says_how_many(command: str, size: str, shards: int, cli: Any) -> None:
    words = f"{command} {COMMANDS[command].replace('OUT', 'out/')} --shard-size {size}"
    shards += shards > 1 and command == "convert-batchnorm"  # for its counter of 8 bytes
    ran = cli(words)
    assert ran.code == 0, ran.err
    assert len(list(Path("out").glob("*.safetensors"))) == shards
    assert f" in {shards} shard{'s' * (shards > 1)}, " in ran.out
    assert cli(f"{words} --force --json").json["shards"] == shards


def test_every_writer_of_a_state_has_the_option() -> None:
    for name, command in group.commands.items():
        flags = {flag for parameter in command.params for flag in parameter.opts}
        if name not in ("split", "disarm", "extract-lora", "adapter", "delta", "finish") and "output" in {
            parameter.name for parameter in command.params
        }:
            assert "--shard-size" in flags, name


def test_a_file_has_no_shards(cli: Any) -> None:
    assert "shard" not in cli("convert in.pt out.safetensors").out
    assert "shards" not in cli("convert in.pt again.safetensors --json").json


@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_a_shard_size_for_a_file_is_refused(output: str, cli: Any) -> None:
    ran = cli(f"strip-prefix in.pt {output} --shard-size 1G")
    assert (ran.code, ran.err.splitlines()[1][:6]) == (2, "hint: ")
    assert "shard" in ran.err


@pytest.mark.parametrize("size", ["", "0", "-1", "1X", "G", "many"])
def test_a_malformed_size_is_exit_2(size: str, cli: Any) -> None:
    ran = cli("slim in.pt out/ --shard-size", size)
    assert ran.code == 2 and "is not a shard size" in ran.err


def test_a_folder_that_is_rewritten_keeps_its_format(cli: Any) -> None:
    cli("convert in.pt out/ --to torch-sharded")
    ran = cli("strip-prefix out/ plain/ --shard-size 800 --json")
    assert (ran.code, ran.json["format"], ran.json["shards"]) == (0, "torch-sharded", 2)


# What lies next to a model in its folder: named when it stays behind, copied along with --companions.

WEIGHTS = {"a.weight": torch.ones(3, 2), "a.bias": torch.ones(3)}


@pytest.fixture
def hf(here: Path) -> Path:
    """One whole model, as transformers and accelerate leave it."""
    made = here / "hf"
    made.mkdir()
    for name in ("model.safetensors", "model_1.safetensors"):
        save_file(WEIGHTS, made / name)
    torch.save({"state": {}}, made / "optimizer.pt")
    for name in ("config.json", "tokenizer.json"):
        (made / name).write_text("{}")
    (made / "notes.txt").write_text("mine")
    return made


@pytest.mark.usefixtures("hf")
def test_what_lies_next_to_one_whole_model_is_named(cli: Any) -> None:
    for command in ("merge hf a.pt", "convert hf b.safetensors", "convert hf c/", "slim hf d.pt"):
        ran = cli(command)
        assert ran.code == 0
        assert "not copied (--companions does): config.json, tokenizer.json\n" in ran.err, command
        others = "other files of the folder, not copied: model_1.safetensors, notes.txt, optimizer.pt\n"
        assert others in ran.err, command
    said = cli("convert hf/model.safetensors e.pt").err
    assert "not copied" not in said, "a file was named, not its folder"


@pytest.mark.usefixtures("hf")
@pytest.mark.parametrize(
    "command",
    [
        *("merge", "slim", "add-prefix", "convert --dtype bf16", "rename-keys --map ^a=b"),
        *("split --ranks 2 --as dcp", "split --ranks 2 --as dtensor"),
    ],
)
def test_every_command_copies_companions(command: str, cli: Any) -> None:
    ran = cli(f"{command} hf out/ --companions")
    assert ran.code == 0, ran.err
    assert {"config.json", "tokenizer.json"} <= {*os.listdir("out")}
    assert "notes.txt" not in os.listdir("out")
    assert "copying along: out/config.json, out/tokenizer.json\n" in ran.err
    again = cli(f"{command} hf out/ --companions --force --json")
    assert again.code == 0, again.out
    assert again.json["companions"] == ["out/config.json", "out/tokenizer.json"]


@pytest.mark.usefixtures("hf")
def test_a_lone_file_takes_the_companions_beside_it(cli: Any) -> None:
    ran = cli("convert hf/model.safetensors out/ --companions")
    assert ran.code == 0, ran.err
    assert "copying along: out/config.json, out/tokenizer.json\n" in ran.err and "notes.txt" not in ran.err
    assert {"config.json", "tokenizer.json"} <= {*os.listdir("out")}


@pytest.mark.usefixtures("hf")
def test_companions_need_a_folder_and_another_place(cli: Any, process: Any) -> None:
    with open("hf/model.safetensors", "rb") as file:
        ran = process("convert", "-", "a.pt", "--companions", stdin=file)
    assert ran.returncode == 2 and b"--companions: stdin has no files beside it" in ran.stderr
    for name in ("hf", "hf/model.safetensors"):
        ran = cli(f"convert {name} hf/a.pt --companions")
        assert ran.code == 2 and "--companions: hf/a.pt is written beside them" in ran.err
    ran = cli("convert hf - --companions")
    assert ran.code == 2 and "--companions" in ran.err


def test_a_folder_that_is_changed_in_place_keeps_its_files_and_says_nothing(hf: Path, cli: Any) -> None:
    (hf / "model_1.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(WEIGHTS, "model.safetensors")}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = cli("add-prefix hf hf/ --force --companions")
    assert ran.code == 0, ran.err
    assert "not copied" not in ran.err
    assert (hf / "config.json").read_text() == "{}"


def test_links_are_followed_within_folder_and_hub_cache(hf: Path, cli: Any) -> None:
    Path("id_rsa").write_text("secret")
    Path("elsewhere").mkdir()
    Path("elsewhere/tokenizer_config.json").write_text("secret")
    (hf / "config.json").unlink()
    (hf / "config.json").symlink_to("../id_rsa")
    (hf / "huggingface").symlink_to("../elsewhere")
    (hf / "generation_config.json").symlink_to("tokenizer.json")
    os.mkfifo(hf / "vocab.json")
    ran = cli("convert hf out/ --companions -v")
    assert ran.code == 0, ran.err
    assert {*os.listdir("out")}.isdisjoint({"config.json", "vocab.json", "tokenizer_config.json"})
    assert Path("out/generation_config.json").read_text() == "{}"
    assert "config.json (a link out of the folder)" in ran.err
    assert "huggingface (a link out of the folder)" in ran.err
    assert "vocab.json" in ran.err


def test_the_links_of_the_hub_cache_are_followed(cli: Any) -> None:
    blobs, snapshot = Path("models--a/blobs"), Path("models--a/snapshots/main")
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(WEIGHTS, blobs / "1")
    (blobs / "2").write_text('{"a": 1}')
    for name, blob in (("model.safetensors", "1"), ("config.json", "2")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    (snapshot / "tokenizer.json").symlink_to("../../../blobs/2")
    assert cli(f"convert {snapshot} out/ --companions").code == 0
    assert Path("out/config.json").read_text() == '{"a": 1}'
    assert not Path("out/config.json").is_symlink()
    assert not Path("out/tokenizer.json").exists()


# A command with several INPUTs takes the last argument for OUTPUT: a forgotten OUTPUT must cost no file.


@pytest.fixture
def epochs(here: Path) -> None:
    """Save three checkpoints and three files of predictions."""
    for number in range(3):
        norm = {key: value + number for key, value in torch.nn.BatchNorm1d(2).state_dict().items()}
        torch.save(prefixed(norm, "norm."), f"{number}.pt")
    saved_predictions(here, 3, 9)


RANKS = "rank0.safetensors rank1.safetensors rank2.safetensors"


@pytest.mark.usefixtures("epochs")
@pytest.mark.parametrize("command", ["average", "convert-batchnorm"])
def test_a_checkpoint_as_last_argument_is_named_before_any_file_is_read(command: str, cli: Any) -> None:
    before = Path("2.pt").read_bytes()
    ran = cli(f"{command} missing.pt 1.pt 2.pt")
    said = "error: 2.pt: is a checkpoint that is there already, and the last argument is the OUTPUT"
    hint = f"name the OUTPUT after it: ckpttool {command} missing.pt 1.pt 2.pt OUTPUT"
    assert (ran.code, ran.err) == (2, f"{said}\nhint: if 2.pt is an INPUT, {hint}\n")
    assert Path("2.pt").read_bytes() == before


@pytest.mark.usefixtures("epochs")
def test_folders_of_shards_are_checkpoints_too_and_another_file_needs_force(cli: Any) -> None:
    cli("convert 0.pt shards/")
    assert "shards/: is a checkpoint" in cli("average 1.pt 2.pt shards/").err
    Path("mean.pt").write_text("notes")
    ran = cli("average 0.pt 1.pt mean.pt")
    assert (ran.code, ran.err.splitlines()[-1]) == (2, "hint: write it anyway with --force")


@pytest.mark.usefixtures("epochs")
def test_gather_metrics_writes_its_certificate_over_no_prediction_file(cli: Any) -> None:
    before = Path("rank2.safetensors").read_bytes()
    for ranks in (RANKS, RANKS.rpartition(" ")[0]):
        for force in ("", "--force"):
            ran = cli(f"gather-metrics {ranks} --out rank2.safetensors {force}")
            assert ran.code == 2, ran.err
            assert "rank2.safetensors: is a prediction file" in ran.err and "--force" not in ran.err
    assert Path("rank2.safetensors").read_bytes() == before


@pytest.mark.parametrize("command", ["average", "merge", "convert-batchnorm", "convert"])
def test_one_argument_is_an_input_and_lacks_the_output(command: str, cli: Any) -> None:
    for path in ("in.pt", "not-there.pt"):
        ran = cli(command, path)
        assert (ran.code, ran.err.splitlines()[0]) == (2, "error: Missing argument 'OUTPUT'.")
    lacks = "INPUT" if command == "convert" else "INPUT… OUTPUT"
    assert cli(command).err.startswith(f"error: Missing argument '{lacks}'.\n")


@pytest.mark.usefixtures("epochs")
def test_what_is_no_prediction_file_is_said_to_be_none(cli: Any) -> None:
    Path("metrics.json").write_text('{"samples": 9}')
    Path("notes.txt").write_text("mine")
    Path("empty").touch()
    Path("sub").mkdir()
    for name in ("metrics.json", "notes.txt", "empty", "sub", "0.pt"):
        ran = cli(f"gather-metrics {name} {RANKS}")
        assert ran.code == 3 and f"{name}: is not a prediction file" in ran.err
        assert "checkpoint" not in ran.err and "hint: " in ran.err, name
    assert "name the files of ranks alone" in cli(f"gather-metrics metrics.json {RANKS}").err
