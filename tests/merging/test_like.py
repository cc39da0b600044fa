"""`merge --like`: the files of a model as another's are, so that only what changed has another hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Refused, UsageFault
from tests.support.running import Cli, assert_says

FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = "model.safetensors.index.json"


def tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of two shards, whose names and types are not in one order."""
    torch.manual_seed(0)
    first = {
        "embed.weight": torch.randn(8, 4).bfloat16(),
        "z": torch.arange(5),
        "layers.0.w": torch.randn(6, 3),
    }
    return first, {"layers.1.w": torch.randn(5, 3), "a.norm": torch.randn(4).half(), "n": torch.tensor(2.0)}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Return a model in two shards, as the library of safetensors and transformers write them."""
    folder = tmp_path / "original"
    folder.mkdir()
    weight_map = {}
    for name, shard in zip((FIRST, SECOND), tensors(), strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in tensors() for tensor in shard.values())
    index = {"metadata": {"total_parameters": 77, "total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))  # not as ckpttool writes it
    return folder


@pytest.fixture
def ranks(original: Path, cli: Cli) -> Path:
    """Return the same model as DTensors of two ranks."""
    folder = original.parent / "ranks"
    assert cli("split", original, folder, "--ranks", "2", "--as", "dtensor").code == 0
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_model_that_ranks_had_becomes_the_same_files(original: Path, ranks: Path, cli: Cli) -> None:
    out = ranks.parent / "out"
    assert cli("merge", ranks, f"{out}/", "--like", original).code == 0
    assert hashes(out) == hashes(original)


def test_only_the_file_of_what_changed_has_another_hash(original: Path, cli: Cli, tmp_path: Path) -> None:
    state = tensors()[0] | tensors()[1]
    state["layers.1.w"] = state["layers.1.w"] + 1
    save_file(state, tmp_path / "tuned.safetensors")
    ranks, out = tmp_path / "ranks", tmp_path / "out"
    assert cli("split", tmp_path / "tuned.safetensors", ranks, "--ranks", "3", "--as", "dtensor").code == 0
    assert cli("merge", ranks, f"{out}/", "--like", original / INDEX).code == 0
    new, old = hashes(out), hashes(original)
    assert {name for name in old if new[name] != old[name]} == {SECOND}
    assert torch.equal(load_file(out / SECOND)["layers.1.w"], state["layers.1.w"])


def test_a_model_in_one_file_keeps_its_header_whoever_wrote_it(ranks: Path, tmp_path: Path, cli: Cli) -> None:
    state = tensors()[1] | tensors()[0]
    header, payload = {"__metadata__": {"by": "hand"}}, b""
    for name, tensor in state.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = {"bfloat16": "BF16", "int64": "I64", "float32": "F32", "float16": "F16"}[str(tensor.dtype)[6:]]
        place = [len(payload), len(payload) + len(raw)]
        header[name] = {"shape": [*tensor.shape], "data_offsets": place, "dtype": kind}  # type: ignore[dict-item]
        payload += raw
    text = json.dumps(header, indent=1).encode()
    (tmp_path / "by-hand.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + payload)
    out = tmp_path / "out.safetensors"
    assert cli("merge", ranks, out, "--like", tmp_path / "by-hand.safetensors").code == 0
    assert out.read_bytes() == (tmp_path / "by-hand.safetensors").read_bytes()


def test_parts_write_the_same_bytes(original: Path, ranks: Path, cli: Cli) -> None:
    out = ranks.parent / "out"
    for part in ("1/2", "2/2"):
        assert cli("merge", ranks, f"{out}/", "--like", original, "--part", part).code == 0
    assert hashes(out) == hashes(original)


def test_another_type_or_shape_keeps_the_files_and_is_told(original: Path, ranks: Path, cli: Cli) -> None:
    out = ranks.parent / "out"
    ran = cli("merge", ranks, f"{out}/", "--like", original, "--dtype", "fp32")
    assert_says(ran, 0, "2 of 6 tensors have another type or shape", "'embed.weight' float32 [8, 4]")
    assert {name: [*load_file(out / name)] for name in (FIRST, SECOND)}.keys() == {FIRST, SECOND}
    assert load_file(out / FIRST).keys() == tensors()[0].keys()
    said = json.loads((out / INDEX).read_text())
    assert said["metadata"]["total_size"] == sum(
        tensor.nbytes for name in (FIRST, SECOND) for tensor in load_file(out / name).values()
    )


@pytest.mark.parametrize("less", [True, False])
def test_a_name_that_one_side_lacks_is_refused(less: bool, ranks: Path, tmp_path: Path, cli: Cli) -> None:
    state = tensors()[0] | tensors()[1]
    state = (
        {name: value for name, value in state.items() if name != "a.norm"} if less else state | {"x": WORD}
    )
    save_file(state, tmp_path / "other.safetensors")
    ran = cli("merge", ranks, tmp_path / "out.safetensors", "--like", tmp_path / "other.safetensors")
    words = ("has 'a.norm'", "lacks it") if less else ("lacks 'x'", "has it")
    assert_says(ran, 3, *words, "ckpttool diff")
    assert not (tmp_path / "out.safetensors").exists()


WORD = torch.ones(3)


def test_a_tied_name_that_the_original_lacks_is_not_written_twice(tmp_path: Path, cli: Cli) -> None:
    weight = torch.randn(6, 4)
    save_file({"embed.weight": weight}, tmp_path / "original.safetensors", metadata={"format": "pt"})
    torch.save({"embed.weight": weight, "head.weight": weight}, tmp_path / "tied.pt")
    ranks, out = tmp_path / "ranks", tmp_path / "out.safetensors"
    assert cli("split", tmp_path / "tied.pt", ranks, "--ranks", "2", "--as", "dtensor").code == 0
    ran = cli("merge", ranks, out, "--like", tmp_path / "original.safetensors")
    assert_says(ran, 0, "'head.weight' is 'embed.weight', and is not written twice")
    assert out.read_bytes() == (tmp_path / "original.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["tied.safetensors", "tied/"])
def test_a_tie_that_the_original_s_files_record_is_kept(name: str, tmp_path: Path, cli: Cli) -> None:
    weight = torch.randn(6, 4)
    torch.save({"embed.weight": weight, "head.weight": weight}, tmp_path / "tied.pt")
    original = tmp_path / name
    assert cli("convert", tmp_path / "tied.pt", f"{tmp_path}/{name}").code == 0
    ranks, out = tmp_path / "ranks", tmp_path / f"out-{name}"
    assert cli("split", tmp_path / "tied.pt", ranks, "--ranks", "2", "--as", "dtensor").code == 0
    assert cli("merge", ranks, f"{tmp_path}/out-{name}", "--like", original).code == 0
    if original.is_file():
        assert out.read_bytes() == original.read_bytes()
    else:
        assert hashes(out) == hashes(original)


@pytest.mark.parametrize(
    ("output", "more", "words"),
    [
        ("out.pt", [], "would be torch-zip"),
        ("out.safetensors", [], "2 files of safetensors"),
        ("out/", ["--full"], "--full"),
        ("out/", ["--shard-size", "1MB"], "so does another option"),
    ],
)
def test_an_output_that_can_t_be_like_the_original_is_a_usage_fault(
    output: str, more: list[str], words: str, original: Path, ranks: Path, tmp_path: Path, cli: Cli
) -> None:
    ran = cli("merge", ranks, f"{tmp_path}/{output}", "--like", original, *more)
    assert_says(ran, 2, words)


def test_an_original_in_another_format_is_a_usage_fault(ranks: Path, tmp_path: Path, cli: Cli) -> None:
    torch.save(tensors()[0], tmp_path / "original.bin")
    assert_says(cli("merge", ranks, f"{tmp_path}/out/", "--like", tmp_path / "original.bin"), 2, "--like")


def test_the_original_is_not_replaced(original: Path, ranks: Path, cli: Cli) -> None:
    before = hashes(original)
    assert cli("merge", ranks, f"{original}/", "--like", original, "--force").code == 2
    assert hashes(original) == before


def test_names_that_a_map_changes_come_under_the_original_s(original: Path, tmp_path: Path, cli: Cli) -> None:
    state = {f"model.{name}": value for name, value in (tensors()[1] | tensors()[0]).items()}
    save_file(state, tmp_path / "other.safetensors")
    ranks, out = tmp_path / "ranks", tmp_path / "out"
    assert cli("split", tmp_path / "other.safetensors", ranks, "--ranks", "2", "--as", "dtensor").code == 0
    (tmp_path / "rules.toml").write_text(RULES)
    assert_says(cli("merge", ranks, f"{out}/", "--like", original), 3, "--map NAME")
    assert cli("merge", ranks, f"{out}/", "--like", original, "--map", tmp_path / "rules.toml").code == 0
    assert hashes(out) == hashes(original)


RULES = """
from = "mine"
to = "theirs"
[[rule]]
from = "model.{m:embed.weight|z|layers.0.w|layers.1.w|a.norm|n}"
to = "{m}"
"""


def test_the_library_merges_like_another_model(original: Path, ranks: Path, tmp_path: Path) -> None:
    ckpttool.merge(ranks, f"{tmp_path}/out/", like=original)
    assert hashes(tmp_path / "out") == hashes(original)
    with pytest.raises(UsageFault):
        ckpttool.merge(ranks, tmp_path / "out.pt", like=original)
    save_file({"x": WORD}, tmp_path / "x.safetensors")
    with pytest.raises(Refused):
        ckpttool.merge(ranks, tmp_path / "out.safetensors", like=tmp_path / "x.safetensors")
