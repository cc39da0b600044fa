"""Checkpoints cut into files by an index: read as one, and held against their index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.core.formats.destination import parse_size
from ckpttool.core.tensors.values import live_tensors
from ckpttool.errors import CkptToolError, Damaged, FileError, Unreadable, Unsupported, UsageFault
from tests.support.comparing import assert_same, convert, values
from tests.support.running import ROOT, Cli, open_files

State = dict[str, torch.Tensor]

ONE: State = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(3)}
TWO: State = {"b.weight": torch.arange(4, dtype=torch.bfloat16), "c": torch.tensor(7)}
WHOLE = {**ONE, **TWO}


def sharded(
    folder: Path,
    shards: Mapping[str, State],
    *,
    index: str = "model.safetensors.index.json",
    weight_map: Mapping[str, str] | None = None,
) -> Path:
    """A folder as transformers writes it; the index tells the truth unless it is given."""
    folder.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        if name.endswith(".safetensors"):
            save_file(tensors, folder / name, metadata={"format": "pt"})
        else:
            torch.save(tensors, folder / name)
    true = {key: name for name, tensors in shards.items() for key in tensors}
    text = {"metadata": {"total_size": 1}, "weight_map": true if weight_map is None else weight_map}
    (folder / index).write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
    return folder


SAFE = {"model-00001-of-00002.safetensors": ONE, "model-00002-of-00002.safetensors": TWO}
TORCH = {"pytorch_model-00001-of-00002.bin": ONE, "pytorch_model-00002-of-00002.bin": TWO}
TORCH_INDEX = "pytorch_model.bin.index.json"


def assert_holds(found: Mapping[str, torch.Tensor], wanted: State = WHOLE) -> None:
    described = [{k: (v.dtype, v.shape, values(v)) for k, v in state.items()} for state in (found, wanted)]
    assert described[0] == described[1]


def assert_is_whole(checkpoint: ckpttool.Checkpoint, wanted: State = WHOLE) -> None:
    assert_holds(live_tensors(checkpoint.state().tensors), wanted)


@pytest.mark.parametrize("by_index", [False, True], ids=["folder", "index"])
def test_safetensors_shards_are_one_state(by_index: bool, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", SAFE)
    checkpoint = ckpttool.open(folder / "model.safetensors.index.json" if by_index else folder)
    assert checkpoint.format == "safetensors-sharded"
    assert checkpoint.metadata == {"format": "pt"}
    assert checkpoint.nbytes == sum(file.stat().st_size for file in folder.iterdir())
    assert_is_whole(checkpoint)


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_shards_are_one_state(zipped: bool, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", TORCH, index=TORCH_INDEX)
    for name, tensors in TORCH.items():
        torch.save(tensors, folder / name, _use_new_zipfile_serialization=zipped)
    checkpoint = ckpttool.open(folder)
    assert checkpoint.format == "torch-sharded"
    assert_is_whole(checkpoint)


def test_each_shard_says_that_its_tensors_are_torch_s(tmp_path: Path) -> None:
    """Several versions of transformers look for it."""
    convert({"a": ONE["a.bias"], "b": torch.ones(3)}, tmp_path / "o", to="safetensors-sharded", shard_size=8)
    shards = sorted((tmp_path / "o").glob("*.safetensors"))
    assert len(shards) == 2
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_shards_become_one_file_and_one_file_shards_that_are_loaded_one_by_one(tmp_path: Path) -> None:
    with ckpttool.open(sharded(tmp_path / "m", SAFE)) as checkpoint:
        ckpttool.save(checkpoint, tmp_path / "out.safetensors")
        ckpttool.save(checkpoint, tmp_path / "out.pt")
    assert_holds(load_file(tmp_path / "out.safetensors"))
    assert_holds(torch.load(tmp_path / "out.pt"))
    ckpttool.convert(tmp_path / "out.pt", tmp_path / "shards", to="torch-sharded", shard_size=24)
    shards = sorted((tmp_path / "shards").glob("*.bin"))
    assert len(shards) > 1
    assert_holds({k: v for shard in shards for k, v in torch.load(shard, weights_only=True).items()})


def test_inspect_shows_the_whole(cli: Cli, tmp_path: Path) -> None:
    found = cli("inspect", sharded(tmp_path / "m", SAFE), "--json").json
    assert found["format"] == "safetensors-sharded" and found["state"] == ""
    assert [row["name"] for row in found["tensors"]] == ["a.bias", "a.weight", "c", "b.weight"]


def test_a_closed_checkpoint_holds_no_file_open(tmp_path: Path) -> None:
    before = open_files()
    with ckpttool.open(sharded(tmp_path / "m", SAFE)):
        assert (open_files() - before).total() == 3
    assert not open_files() - before


def test_shards_may_be_links_as_in_the_hub_s_cache(tmp_path: Path) -> None:
    blobs = sharded(tmp_path / "blobs", SAFE)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / str(number))
    assert_is_whole(ckpttool.open(snapshot))
    assert_is_whole(ckpttool.open(snapshot / "model.safetensors.index.json"))


def test_shards_may_lie_in_folders_below(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", SAFE)
    (folder / "below").mkdir()
    first = next(iter(SAFE))
    (folder / first).rename(folder / "below" / first)
    told = {k: (f"below/{name}" if name == first else name) for name, t in SAFE.items() for k in t}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": told}))
    assert_is_whole(ckpttool.open(folder))


def test_a_tie_that_a_shard_records_needs_no_entry(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", SAFE)
    save_file(ONE, folder / next(iter(SAFE)), metadata={"format": "pt", "head.weight": "a.weight"})
    tensors = ckpttool.open(folder).state().tensors
    assert tensors["head.weight"].storage is tensors["a.weight"].storage


def test_an_index_of_nothing_is_an_empty_state(tmp_path: Path) -> None:
    assert ckpttool.open(sharded(tmp_path / "m", {})).state().tensors == {}


# Which file of a folder.


def test_safetensors_by_an_index_are_preferred_where_a_folder_holds_more(tmp_path: Path) -> None:
    folder = sharded(sharded(tmp_path / "m", TORCH, index=TORCH_INDEX), SAFE)
    assert ckpttool.open(folder).format == "safetensors-sharded"
    one(folder / "model.safetensors")  # a model that is not cut
    assert ckpttool.open(folder).format == "safetensors-sharded"


def test_any_one_index_will_do_and_of_several_one_must_be_named(tmp_path: Path) -> None:
    for name in ("x.safetensors", "diffusion_pytorch_model.fp16.safetensors"):
        assert_is_whole(ckpttool.open(sharded(tmp_path / name, SAFE, index=f"{name}.index.json")))
        folder = sharded(tmp_path / "m", SAFE, index=f"{name}.index.json")
    refusal = refused(folder, "several indexes", error=Unreadable)
    assert "diffusion_pytorch_model.fp16.safetensors.index.json" in str(refusal.hint)
    assert_is_whole(ckpttool.open(folder / "x.safetensors.index.json"))


def one(path: Path) -> Path:
    """Write the first tensors, in the format that the name says."""
    (save_file if path.suffix == ".safetensors" else torch.save)(ONE, path)  # type: ignore[operator]
    return path


@pytest.mark.parametrize("names", [["weights.safetensors"], ["model.safetensors", "pytorch_model.bin"]])
def test_a_folder_without_an_index_names_its_files(names: list[str], tmp_path: Path) -> None:
    """Of two models that are not cut, one must be named."""
    for name in names:
        one(tmp_path / name)
    refusal = refused(tmp_path, "holds checkpoints, and is none itself", error=Unreadable)
    assert names[0] in str(refusal.hint)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_that_is_not_cut_is_found_as_transformers_finds_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = one(tmp_path / name)
    checkpoint = ckpttool.open(tmp_path)
    assert checkpoint.path == str(path)
    assert_is_whole(checkpoint, ONE)


def test_json_without_a_map_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    refused(tmp_path / "config.json", "not the index of a sharded checkpoint", error=Unsupported)


# Index and shards that disagree.


def refused(folder: Path, *said: str, error: type[FileError] = Damaged) -> FileError:
    with pytest.raises(error) as refusal:
        ckpttool.open(folder)
    assert [words for words in said if words not in str(refusal.value)] == []
    return refusal.value


FIRST, SECOND = SAFE
TOLD = {key: name for name, tensors in SAFE.items() for key in tensors}


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "can't be opened: no such file"),
    "a folder": (a_folder, "can't be opened"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-1]), ""),
    "empty": (lambda path: path.write_bytes(b""), "is not a checkpoint"),
    "a pointer": (lambda path: path.write_text(POINTER), "is a Git LFS pointer"),
    "a page": (lambda path: path.write_text("<html>"), "is an HTML page"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_shard_that_can_not_be_read_is_named(how: str, tmp_path: Path) -> None:
    spoil, said = SPOILT[how]
    spoil(sharded(tmp_path / "m", SAFE) / SECOND)
    refused(tmp_path / "m", f"its shard '{SECOND}' {said}" if said else SECOND)


OUTSIDE = ["../x.safetensors", "/etc/passwd", "a/../../x", "./x", "a//b", "", ".", "..", "a\\b", "a\0b", ".x"]
Disagreement = tuple[Mapping[str, State], Mapping[str, str] | None, tuple[str, ...]]
DISAGREEMENTS: dict[str, Disagreement] = {
    "a name that the shard lacks": (SAFE, {**TOLD, "d": SECOND}, (f"'d' should be in the shard '{SECOND}'",)),
    "a name that the index lacks": (
        SAFE,
        {key: name for key, name in TOLD.items() if key != "c"},
        (f"'c' is in the shard '{SECOND}', but the index does not",),
    ),
    "a name in another shard": (
        {FIRST: {**ONE, "c": TWO["c"]}, SECOND: TWO},
        TOLD,
        (f"'c' is in the shard '{FIRST}', but", SECOND),
    ),
    "a name in two shards": (
        {FIRST: ONE, SECOND: {**TWO, "a.bias": ONE["a.bias"]}},
        TOLD,
        (f"'a.bias' is in the shard '{SECOND}'", "another"),
    ),
    "different case": (SAFE, {**TOLD, "c": SECOND.upper()}, ("names a shard twice", SECOND.upper())),
    "different formats": ({FIRST: ONE, next(iter(TORCH)): TWO}, None, ("different formats",)),
    "an index": (SAFE, {"a": "model.safetensors.index.json"}, ("is not a checkpoint",)),
    **{f"outside: {name!r}": (SAFE, {**TOLD, "z": name}, ("outside its folder",)) for name in OUTSIDE},
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_an_index_that_disagrees_with_its_shards_is_refused(what: str, tmp_path: Path) -> None:
    shards, told, said = DISAGREEMENTS[what]
    save_file(ONE, tmp_path / "x.safetensors")
    refused(sharded(tmp_path / "m", shards, weight_map=told), *said)


def test_an_index_that_names_some_shards_of_a_series_is_a_problem(cli: Cli, tmp_path: Path) -> None:
    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        save_file({f"w{number}": torch.ones(2)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w0": files[0], "w1": files[1]}}))
    (problem,) = ckpttool.verify(tmp_path).problems
    said = "are 3 shards, and the index does not name number 3"
    assert (problem.name, problem.message) == ("model-*.safetensors", said)
    assert f"model-*.safetensors: {said}" in cli("inspect", tmp_path).out
    index.write_text(json.dumps({"weight_map": {f"w{number}": file for number, file in enumerate(files)}}))
    assert ckpttool.verify(tmp_path).ok


def test_two_names_of_one_file_are_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", {FIRST: WHOLE}, weight_map=TOLD)
    (folder / SECOND).symlink_to(FIRST)
    refused(folder, f"its shards '{FIRST}' and '{SECOND}' are the same file")


@pytest.mark.parametrize("tree", [[1, 2], {1: torch.ones(2)}, torch.ones(2)])
def test_a_shard_that_is_no_state_is_refused(tree: object, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", TORCH, index=TORCH_INDEX)
    torch.save(tree, folder / next(iter(TORCH)))
    refused(folder, next(iter(TORCH)))


MAPS = ["1", "[1]", '{"a": 1}', '{"a": ["x"]}', '{"a": "x", "a": "y"}', '{}, "weight_map": {}']
MALFORMED = ['{"weight_map": ', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": "\xff"}']
MALFORMED += [f'{{"weight_map": {text}}}' for text in MAPS]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_index_is_damage(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises((Damaged, Unsupported)):
        ckpttool.open(tmp_path)


def test_an_index_has_no_shards_on_standard_input(process: Callable[..., Any], tmp_path: Path) -> None:
    index = sharded(tmp_path / "m", SAFE) / "model.safetensors.index.json"
    ran = process("inspect", "-", input=index.read_bytes())
    assert ran.returncode == 3 and b"index of a sharded checkpoint" in ran.stderr


divisions = st.dictionaries(st.text(max_size=5), st.integers(0, 3), max_size=8)


@given(divisions, st.data())
def test_any_division_is_read_and_any_other_index_refused(division: dict[str, int], data: Any) -> None:
    shards: dict[str, State] = {}
    for key, at in division.items():
        shards.setdefault(f"s{at}.safetensors", {})[key] = torch.tensor([float(len(key)), float(at)])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = {key: tensor for shard in shards.values() for key, tensor in shard.items()}
        assert_is_whole(ckpttool.open(sharded(folder, shards)), whole)
        if division:
            told = {key: name for name, shard in shards.items() for key in shard}
            key = data.draw(st.sampled_from(sorted(division)))
            change = data.draw(st.sampled_from(["left out", "renamed", "moved"]))
            if change == "moved" and len(shards) > 1:
                told[key] = next(name for name in shards if name != told[key])
            elif change == "left out" and len(shards[told[key]]) > 1:
                del told[key]
            else:
                told[key + "+" + "".join(told)] = told.pop(key)
            with pytest.raises(CkptToolError):
                ckpttool.open(sharded(folder, shards, weight_map=told))


# What a folder leads to.


def too_large(path: Path) -> None:
    path.write_bytes(b"\x80")
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("name", [FIRST, "model.safetensors.index.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), too_large])
@pytest.mark.timeout(20)
def test_what_a_folder_names_is_of_bounded_size(make: Any, name: str, tmp_path: Path, cli: Cli) -> None:
    folder = sharded(tmp_path / "m", SAFE)
    if "_" in name or name == ".metadata":
        ckpttool.convert(folder, folder := tmp_path / "dcp", to="dcp")
    (folder / name).unlink()
    make(folder / name)
    ran = cli("inspect", folder)
    assert ran.code == 3 and ran.err.startswith("error: ")
    torch.save(ONE, tmp_path / "in.pt")
    ran = cli("convert", tmp_path / "in.pt", folder, "--force")  # which looks at what it would replace
    assert ran.code in (0, 2)


MANY = """
import resource, sys
from ckpttool.core import cli
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
sys.exit(cli.run(sys.argv[3:]))
"""


@pytest.fixture(scope="module", params=["safetensors-sharded", "dcp"])
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 150 files."""
    folder = tmp_path_factory.mktemp("many") / "m"
    state = {f"t{i:03d}": torch.full((2,), float(i)) for i in range(150)}
    torch.save(state, folder.parent / "in.pt")
    if request.param == "dcp":
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save(state, storage_writer=writer, no_dist=True)
    else:
        ckpttool.save(ckpttool.open(folder.parent / "in.pt"), folder, to=request.param, shard_size=8)
    return folder


def limited(soft: int, hard: int, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MANY, soft, hard, *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT)


def test_more_files_than_may_be_open_raise_the_limit(many: Path, tmp_path: Path) -> None:
    ran = limited(100, 4096, "convert", many, f"{tmp_path}/out/", "--shard-size", "8B")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "in 150 shards" in ran.stdout
    assert len(ckpttool.open(tmp_path / "out").state().tensors) == 150


def test_a_limit_that_can_not_be_raised_is_named(many: Path) -> None:
    ran = limited(100, 100, "inspect", many)
    assert ran.returncode == 3
    assert "consists of 150 files, and this process may open only 100 at once" in ran.stderr
    assert "hint: raise the limit first: ulimit -n " in ran.stderr
    assert ran.stderr.count("\n") == 2


def test_more_inputs_than_may_be_open_raise_the_limit_too(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "in.safetensors")
    inputs = [tmp_path / "in.safetensors"] * 150
    ran = limited(100, 4096, "average", *inputs, tmp_path / "out.safetensors")
    assert ran.returncode == 0, ran.stderr
    ran = limited(100, 100, "average", *inputs, tmp_path / "other.safetensors")
    assert ran.returncode == 3 and "hint: raise the limit first: ulimit -n " in ran.stderr


SIZES = {"5GB": 5 * 10**9, "1G": 10**9, "1.5k": 1500, "2 MiB": 2 << 20, "1Ti": 1 << 40, "7": 7}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_a_size_has_a_unit_with_or_without_its_byte(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "GB", "0.1B", "5 apples"])
def test_a_size_that_no_shard_can_have_is_a_fault_of_usage(text: str) -> None:
    with pytest.raises(UsageFault, match="is not a shard size"):
        parse_size(text)


# Without an index.


def unindexed(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Write a tensor into each file; return all of them."""
    folder.mkdir()
    state = {f"w{number}": torch.full((3,), float(number)) for number in range(len(names))}
    for key, name in zip(state, names, strict=True):
        (torch.save if name.endswith("pt") else save_file)({key: state[key]}, folder / name)  # type: ignore[operator]
    return state


THREE = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


TORCHTUNE = ["hf_model_0001_0.pt", "hf_model_0002_0.pt"]


@pytest.mark.parametrize("names", [THREE, TORCHTUNE, [f"ft-{name}" for name in THREE]])
def test_shards_whose_index_is_lost_are_joined_by_numbers(names: list[str], tmp_path: Path, cli: Cli) -> None:
    state = unindexed(tmp_path / "in", names)
    for number, inputs in enumerate([[tmp_path / "in"], sorted((tmp_path / "in").iterdir(), reverse=True)]):
        ran = cli("merge", *inputs, out := tmp_path / f"{number}.safetensors")
        assert (ran.code, ran.err) == (0, "")
        assert_same(load_file(out), state)
    assert cli("verify", tmp_path / "in").code == 0


W0 = {"w0": torch.zeros(3)}
SECOND_OF_THREE = {
    "missing": (Path.unlink, ("has no index, and of its 3 shards model-*.safetensors it lacks number 2",)),
    "a name of the first": (lambda path: save_file(W0, path), ("'w0' is in the shard '", "' and in another")),
    "a pointer": (lambda path: path.write_text(POINTER), (f"its shard '{THREE[1]}' is a Git LFS pointer",)),
}


@pytest.mark.parametrize("how", SECOND_OF_THREE)
def test_shards_without_an_index_that_are_not_whole_are_refused(how: str, tmp_path: Path) -> None:
    spoil, said = SECOND_OF_THREE[how]
    unindexed(tmp_path / "in", THREE)
    spoil(tmp_path / "in" / THREE[1])  # type: ignore[operator]
    refusal = refused(tmp_path / "in", *said)
    assert how != "a pointer" or "git lfs pull" in str(refusal.hint)


def test_two_series_without_an_index_get_a_command_each(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "in"
    unindexed(folder, [*TORCHTUNE, "hf_model_0001_1.pt"])
    caught = refused(folder, "several series", error=Unreadable)
    assert f"ckpttool merge {folder}/hf_model_*_0.pt OUTPUT" in str(caught.hint)
    assert cli("merge", *folder.glob("hf_model_*_0.pt"), tmp_path / "out.safetensors").code == 0


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_index_of_an_older_save_is_named_with_the_file_beside_it(
    cli: Cli, here: Path, is_gone: bool
) -> None:
    """`save_pretrained` of a model that is small enough leaves the index of a larger one where it was."""
    Path("m").mkdir()
    save_file({"a": torch.ones(2)}, "m/model.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    Path("m/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in () if is_gone else weight_map.values():
        save_file({"c": torch.ones(2)}, f"m/{name}")
    for file in ("m", "m/model.safetensors.index.json"):
        ran = cli("inspect", file)
        assert ran.code == 3
        command = ran.err.partition("take the file beside it: ckpttool ")[2].strip()
        assert cli(*command.split()).code == 0
    Path("m/model.safetensors").unlink()
    assert "older save" not in cli("inspect", "m").err
