"""ckpttool convert, as people and scripts use it."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from tests.support.comparing import assert_same

base = torch.linspace(-1, 1, 12).reshape(3, 4)
STATE = OrderedDict(
    {"stem.weight": base, "stem.bias": base[0].clone(), "head.weight": base + 1}
    | {"head.count": torch.tensor(7)}
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    optimizer = {"state": {0: {"m": base + 2}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": STATE, "optimizer": optimizer, "epoch": 3, "best": math.inf}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def test_the_result_is_one_line(path: Path, cli: Any) -> None:
    out = path.parent / "out.pt"
    ran = cli("convert", path, out)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"converted torch-zip -> {out} (")
    assert ran.out.endswith(" s)\n") and ran.out.count("\n") == 1
    assert_same(torch.load(path), torch.load(out))


def test_what_safetensors_can_t_hold_is_named(path: Path, cli: Any) -> None:
    ran = cli("convert", path, path.parent / "out.safetensors")
    assert (ran.code, ran.err) == (0, "left out, as safetensors holds only tensors: optimizer, epoch, best\n")
    assert list(load_file(path.parent / "out.safetensors")) == sorted(STATE)


def test_json_has_the_fields_that_scripts_rely_on(path: Path, cli: Any) -> None:
    out = path.parent / "out.safetensors"
    ran = cli("convert", path, out, "--exclude", "head.*", "--dtype", "bf16", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert 0 <= ran.json["seconds"] < 60
    left_out = ["head.weight", "head.count", "optimizer", "epoch", "best"]
    counts = {"keys": 2, "renamed": 0, "bytes": out.stat().st_size, "seconds": 0, "overflows": 0}
    nothing: dict[str, Any] = {key: [] for key in ("kept", "tied", "copied", "mentions", "devices")}
    written = {"output": str(out), "format": "safetensors", "also_renamed": {}, "left_out": left_out}
    assert ran.json | {"seconds": 0} == written | counts | nothing


def test_a_whole_checkpoint_goes_into_safetensors_and_back(path: Path, cli: Any) -> None:
    flat, back = path.parent / "flat.safetensors", path.parent / "back.pt"
    ran = cli("convert", path, flat, "--full")
    assert (ran.code, ran.err) == (0, "")
    assert "optimizer.state.0.m" in load_file(flat)
    assert cli("convert", flat, back).code == 0
    assert_same(torch.load(path), torch.load(back))


# --dtype


def test_floats_are_cast_and_counted(path: Path, cli: Any) -> None:
    ran = cli("convert", path, path.parent / "out.safetensors", "--dtype", "bf16")
    assert "converted torch-zip, 3 tensors cast to bfloat16 -> " in ran.out
    loaded = load_file(path.parent / "out.safetensors")
    assert torch.equal(loaded["stem.weight"], base.bfloat16())
    assert loaded["head.count"].dtype == torch.int64


@pytest.mark.parametrize(
    ("values", "said"),
    [([1e5, 1.0], "1 finite value became infinite"), ([1e5, -1e6], "2 finite values became infinite")],
)
def test_overflows_are_counted(values: list[float], said: str, cli: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([*values, math.inf, math.nan])}, tmp_path / "in.pt")
    words = ["convert", tmp_path / "in.pt", tmp_path / "out.pt", "--dtype", "fp16"]
    ran = cli(*words)
    assert (ran.code, ran.err) == (0, said + "\n")
    assert cli(*words, "--force", "--verify", "--json").json["overflows"] == int(said[0])


def test_no_overflow_is_not_mentioned_and_a_dry_run_does_not_know(path: Path, cli: Any) -> None:
    ran = cli("convert", path, path.parent / "out.pt", "--dtype", "fp16", "--dry-run", "--json")
    assert "overflows" not in ran.json
    assert cli("convert", path, path.parent / "out.pt", "--dtype", "fp16").err == ""


# --only, --exclude, --drop


def test_keys_are_selected_and_the_others_are_named(path: Path, cli: Any) -> None:
    patterns = ["--only", "stem.*", "--only", "head.w*", "--exclude", "*.bias"]
    ran = cli("convert", path, path.parent / "out.pt", *patterns)
    assert (ran.code, ran.err) == (0, "left out: stem.bias, head.count\n")
    assert list(torch.load(path.parent / "out.pt")["model"]) == ["stem.weight", "head.weight"]


def test_entries_are_dropped_by_name(path: Path, cli: Any) -> None:
    drop = ["--drop", "optimizer", "--drop", "model.head.count"]
    ran = cli("convert", path, path.parent / "out.pt", *drop, "--json")
    assert ran.json["left_out"] == ["optimizer", "model.head.count"]
    loaded = torch.load(path.parent / "out.pt")
    assert list(loaded) == ["model", "epoch", "best"]
    assert "head.count" not in loaded["model"]


def test_state_selects_what_is_converted(cli: Any, tmp_path: Path) -> None:
    torch.save({"model": {"w": base}, "ema": {"w": base + 1}}, tmp_path / "in.pt")
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "a.safetensors")
    assert "state: 'model'; also available: --state ema" in ran.err
    cli("convert", tmp_path / "in.pt", tmp_path / "b.safetensors", "--state", "ema", "--dtype", "fp16")
    assert torch.equal(load_file(tmp_path / "b.safetensors")["w"], (base + 1).half())
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "c.safetensors", "--state", "emma")
    assert ran.code == 3 and "no state named 'emma'" in ran.err and "model, ema" in ran.err


# --complex


def test_complex_tensors_are_split_and_joined(cli: Any, tmp_path: Path) -> None:
    phases = torch.complex(base, -base)
    torch.save({"z": phases.conj(), "wide": phases.to(torch.complex128), "w": base}, tmp_path / "in.pt")
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "split.safetensors", "--complex", "split")
    assert "converted torch-zip, 2 complex tensors split -> " in ran.out
    parts = load_file(tmp_path / "split.safetensors")
    assert sorted(parts) == ["w", "wide.imag", "wide.real", "z.imag", "z.real"]
    assert torch.equal(parts["z.imag"], base)
    ran = cli("convert", tmp_path / "split.safetensors", tmp_path / "joined.pt", "--complex", "join")
    assert "2 complex tensors joined" in ran.out
    loaded = torch.load(tmp_path / "joined.pt")
    assert torch.equal(loaded["z"], phases.conj().resolve_conj())
    assert torch.equal(loaded["wide"], phases.to(torch.complex128))


def test_complex_parts_are_cast(cli: Any, tmp_path: Path) -> None:
    torch.save({"z": torch.complex(base, -base).conj()}, tmp_path / "in.pt")
    change = ["--complex", "split", "--dtype", "bf16"]
    assert cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors", *change).code == 0
    assert torch.equal(load_file(tmp_path / "out.safetensors")["z.imag"], base.bfloat16())


# Ties.


def test_ties_and_copies_are_named(cli: Any, tmp_path: Path) -> None:
    torch.save({"embed": base, "head": base, "row": base[0]}, tmp_path / "in.pt")
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors", "--json")
    assert ran.json["tied"] == ["head"]
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors", "--force")
    assert "written once, with the tie in the metadata: head" in ran.err
    assert "written once per name, though they share memory: row" in ran.err
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors", "--force", "--keep-copies")
    assert ran.err == "written once per name, though they share memory: head, row\n"


# Where from and where to.


def test_a_dry_run_reports_what_the_run_with_verify_reports(path: Path, cli: Any) -> None:
    dry = cli("convert", path, path.parent / "out.safetensors", "--dry-run", "--json").json
    assert dry["dry_run"] is True
    assert sorted(file.name for file in path.parent.iterdir()) == ["in.pt"]
    ran = cli("convert", path, path.parent / "out.safetensors", "--verify", "--json").json
    assert {**dry, "seconds": 0} == {**ran, "seconds": 0, "dry_run": True}


def test_to_sets_the_format(path: Path, cli: Any) -> None:
    assert cli("convert", path, path.parent / "weights", "--to", "safetensors").code == 0
    assert sorted(load_file(path.parent / "weights")) == sorted(STATE)
    assert cli("convert", path, path.parent / "out", "--to", "onnx").code == 2


def test_a_file_is_converted_from_pipe_to_pipe(path: Path, process: Any, tmp_path: Path) -> None:
    ran = process("convert", path, "-", "--full", "--to", "safetensors")
    assert "optimizer.state.0.m" in load(ran.stdout)
    back = process("convert", "-", "-", "--to", "torch-zip", input=ran.stdout)
    assert_same(torch.load(path), torch.load(io.BytesIO(back.stdout)))


def test_a_safetensors_file_stays_as_it_is_and_becomes_a_pt_file(cli: Any, tmp_path: Path) -> None:
    save_file(dict(STATE), tmp_path / "in.safetensors", metadata={"format": "pt"})
    assert cli("convert", tmp_path / "in.safetensors", tmp_path / "same.safetensors").code == 0
    assert (tmp_path / "same.safetensors").read_bytes() == (tmp_path / "in.safetensors").read_bytes()
    assert cli("convert", tmp_path / "in.safetensors", tmp_path / "out.pt").code == 0
    assert torch.equal(torch.load(tmp_path / "out.pt")["stem.weight"], base)


def test_permute_reshape_and_tie_change_the_layout(cli: Any, tmp_path: Path) -> None:
    torch.save({"a.weight": base, "b.weight": base + 1, "c": torch.arange(6)}, tmp_path / "in.pt")
    flags = ["--permute", "*.weight=1,0", "--reshape", "c=2,3,1", "--tie", "head=a.weight"]
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.pt", *flags)
    assert ran.code == 0 and "2 tensors permuted, 1 tensor reshaped, 1 name tied" in ran.out
    found = torch.load(tmp_path / "out.pt")
    assert list(found) == ["a.weight", "b.weight", "c", "head"]
    assert torch.equal(found["a.weight"], base.T) and torch.equal(found["b.weight"], base.T + 1)
    assert torch.equal(found["c"], torch.arange(6).reshape(2, 3, 1))
    assert found["head"].data_ptr() == found["a.weight"].data_ptr()
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors", *flags)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["b.weight"], base.T + 1)
    assert "written once, with the tie in the metadata: head" in ran.err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--dtype int8", 2, ["--dtype int8: not a dtype to cast to", "bf16"]),
        ("--dtype fp32", 1, ["no tensor to cast"]),
        ("--only body.*", 1, ["no key matches 'body.*'", "first key is 'w'"]),
        ("--drop scheduler", 1, ["holds nothing named 'scheduler'", "ckpttool inspect"]),
        ("--complex both", 2, ["--complex"]),
        ("--complex split", 3, ["'z' would be split into 'z.real', which already exists"]),
        ("--permute w=0,0", 2, ["0,0 is not a permutation of the 2 axes of 'w'"]),
        ("--permute w=1,x", 2, ["'1,x' is not a shape"]),
        ("--reshape w", 2, ["'w' is not two parts separated by ="]),
        ("--reshape w=5", 2, ["'w' has 12 elements, and 5 5"]),
        ("--tie w=w", 3, ["'w' would be another name of 'w', but already exists"]),
        ("--tie x=y", 1, ["no tensor is named 'y'"]),
        ("--permute x*=1,0", 1, ["no tensor's key matches 'x*'"]),
    ],
)
def test_an_impossible_change_is_refused(flags: str, code: int, said: Any, cli: Any, tmp_path: Path) -> None:
    torch.save({"w": base, "z": torch.complex(base, base), "z.real": base}, tmp_path / "in.pt")
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.pt", *flags.split())
    assert (ran.code, ran.out) == (code, "") and all(words in ran.err for words in said)
    assert not (tmp_path / "out.pt").exists()


def test_naming_a_state_is_refused_if_everything_is_kept(cli: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in 1.pt", tmp_path / "out.pt"
    torch.save({"model": {"w": base}, "ema": {"w": base}}, source)
    assert cli("convert", source, out).err == ""
    assert "--state ema" in cli("convert", source, out, "--force", "--dtype", "fp16").err
    ran = cli("convert", source, out, "--force", "--state", "ema")
    hint = f"hint: for that state alone: ckpttool slim --state ema '{source}' {out}"
    assert (ran.code, ran.err.splitlines()[1]) == (2, hint)
    assert cli("convert", source, out, "--force", "--state", "ema", "--dtype", "fp16").code == 0


def test_types_and_formats_are_accepted_in_any_case(cli: Any, tmp_path: Path) -> None:
    torch.save({"w": base}, tmp_path / "in.pt")
    flags = ["--dtype", "BF16", "--to", "Safetensors", "--json"]
    assert cli("convert", tmp_path / "in.pt", tmp_path / "out", *flags).json["format"] == "safetensors"
    assert load_file(tmp_path / "out")["w"].dtype == torch.bfloat16


# The text of a safetensors header.


@pytest.mark.parametrize("output", ["out.safetensors", "shards/"])
def test_text_is_added_to_the_header(output: str, cli: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "in.safetensors", tmp_path / output
    save_file({"w": torch.ones(2)}, path, metadata={"who": "me", "when": "then"})
    ran = cli(
        "convert",
        path,
        f"{out}/" if output[-1] == "/" else out,
        "--metadata",
        "format=pt",
        "--metadata",
        "who=a=b",
    )
    assert (ran.code, ran.err) == (0, "")
    (file,) = out.glob("*.safetensors") if out.is_dir() else [out]
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "who": "a=b", "when": "then"}


def test_a_file_with_metadata_equals_that_of_save_file(cli: Any, tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    torch.save(state, tmp_path / "in.pt")
    assert cli("convert", tmp_path / "in.pt", tmp_path / "o.safetensors", "--metadata", "format=pt").code == 0
    save_file(state, tmp_path / "oracle", metadata={"format": "pt"})
    assert (tmp_path / "o.safetensors").read_bytes() == (tmp_path / "oracle").read_bytes()


@pytest.mark.parametrize(
    ("output", "given", "said"),
    [
        ("o.pt", "format=pt", "--metadata: torch-zip has no place for it"),
        ("o.safetensors", "format", "'format' is not two parts separated by ="),
        ("o.safetensors", "head=w", "'head' would be read as another name of the tensor 'w'"),
        ("o.safetensors", "ckpttool.full={}", "is what --full keeps"),
    ],
)
def test_metadata_that_has_no_place_or_another_meaning_is_refused(
    output: str, given: str, said: str, cli: Any, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    ran = cli("convert", tmp_path / "in.pt", tmp_path / output, "--metadata", given)
    assert ran.code == 2 and said in ran.err
    assert not (tmp_path / output).exists()
