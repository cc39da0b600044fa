"""ckpttool diff, as people and scripts use it."""

from __future__ import annotations

import os
import pty
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file

from ckpttool.analysis.compare import Change, Comparison
from ckpttool.analysis.compare_values import Norms
from ckpttool.analysis.distances import Distance
from ckpttool.cli.diff_page import page


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    state = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "gone": torch.ones(1)}
    other = {"w": state["w"].clone(), "n": torch.tensor(9), "new": torch.ones(1)}
    other["w"][1, 0] += 0.5
    torch.save({"model": state, "epoch": 3}, tmp_path / "a.pt")
    torch.save({"model": other, "epoch": 4}, tmp_path / "b.pt")
    return tmp_path / "a.pt", tmp_path / "b.pt"


def test_each_difference_is_a_row_and_the_last_line_counts_them(files: tuple[Path, Path], cli: Any) -> None:
    a, b = files
    ran = cli("diff", a, b)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.splitlines() == [
        "         differ  relative    cosine  largest",
        "~ w       16.7%    0.0655  0.998204      0.5",
        "~ n      7 -> 9",
        "~ epoch  3 -> 4",
        "- gone",
        "+ new",
        f"{a} and {b} differ: 3 changed, 1 only in {a}, 1 only in {b} (2 tensors compared)",
    ]


def test_verbose_lines_say_all_that_is_known(files: tuple[Path, Path], cli: Any) -> None:
    lines = cli("diff", "-v", *files).out.splitlines()
    assert lines[0] == (
        "~ w  float32 [2, 3]: 1 of 6 differs, by up to 0.5, at [1, 0]: 3 -> 3.5; "
        "relative 0.0655, cosine 0.998204"
    )
    assert lines[1] == "~ n  int64 []: 1 of 1 differs, by up to 2: 7 -> 9; relative 0.222, cosine 1.000000"
    assert lines[2:5] == ["~ epoch  3 -> 4", "- gone", "+ new"]


def pair_of(folder: Path, a: object, b: object) -> tuple[Path, Path]:
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    return folder / "a.pt", folder / "b.pt"


def blocks(count: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a state of as many blocks of two layers, each with a counter."""
    state = {"head.weight": torch.ones(4)}
    for i in range(count):
        for layer in ("attention", "mlp"):
            state[f"blocks.{i}.{layer}.weight"] = torch.ones(8)
            state[f"blocks.{i}.{layer}.num_batches_tracked"] = torch.tensor(1000)
    return state | more


def rows(out: str) -> list[str]:
    """Return the names of the rows."""
    return [line.split()[1] for line in out.splitlines() if line[:2] in ("~ ", "- ", "+ ")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (12, [f"blocks.{i}.{layer}.*" for i in range(12) for layer in ("attention", "mlp")]),
        (30, [f"blocks.{i}.*" for i in range(30)]),
        (60, [f"blocks.{i}.*" for i in range(20, 60)]),
    ],
    ids=["by layer", "by block", "the most different blocks"],
)
def test_many_differences_are_at_most_40_rows(count: int, expected: Any, cli: Any, tmp_path: Path) -> None:
    state, other = blocks(count), blocks(count)
    for name, value in other.items():
        if name.startswith("blocks"):
            value += 1 + int(name.split(".")[1])
    ran = cli("diff", *pair_of(tmp_path, state, other))
    assert rows(ran.out) == expected
    said = "  -v shows every tensor" if count < 60 else "  and 20 more that differ"
    assert ran.out.splitlines()[-2].startswith(said)
    assert len(rows(cli("diff", "-v", *pair_of(tmp_path, state, other)).out)) == 4 * count


def test_a_module_s_row_joins_its_tensors_without_counters(cli: Any, tmp_path: Path) -> None:
    """A counter of 1000 batches would outweigh all weights."""
    other = blocks(30)
    for name, value in other.items():
        if name.startswith("blocks"):
            value += 1 if "num" in name else torch.tensor([3, 0, 0, 0, 0, 0, 0, 0])
    ran = cli("diff", *pair_of(tmp_path, blocks(30), other))
    cosine = (4 + 7) / (8**0.5 * (16 + 7) ** 0.5)
    row = f"~ blocks.0.* 22.2% {3 / 23**0.5:.3g} {cosine:.6f} 3"
    assert ran.out.splitlines()[1].split() == row.split()


def test_names_of_one_file_alone_are_grouped_too(cli: Any, tmp_path: Path) -> None:
    ran = cli("diff", *pair_of(tmp_path, blocks(30), {"head.weight": torch.ones(4)}))
    assert ran.out.splitlines()[0] == "- blocks.0.*   4 names"
    assert len(rows(ran.out)) == 30


def test_relative_differences_are_not_those_of_elements_near_zero(cli: Any, tmp_path: Path) -> None:
    a, b = torch.ones(100), torch.ones(100)
    a[0], b[0] = 1e-3, 1e-12
    ran = cli("diff", *pair_of(tmp_path, {"w": a, "v": a}, {"w": b, "v": a + 1}), "--sort", "size")
    assert rows(ran.out) == ["v", "w"]
    assert ran.out.splitlines()[2].split() == ["~", "w", "1%", "0.000101", "1.000000", "0.001"]


def test_names_are_cut_in_their_middle_for_a_terminal() -> None:
    name = "model.layers.10.self_attn.q_proj.weight.original"
    norms = Norms(1.0, 1.0, 1.0, 0.5)
    change = Change(name, "values", "float32 [2]", "float32 [2]", Distance(1, 2, max_abs=1.0), None, norms)
    lines = [click.unstyle(line) for line in page(Comparison((), (), (change,), 1), sort=None, width=80)]
    assert max(map(len, lines)) == 80
    assert lines[1].startswith("~ model.layers.10.sel")
    assert "…proj.weight.original  " in lines[1]


@pytest.mark.parametrize("off", [{"NO_COLOR": "1"}, {}])
def test_marks_are_coloured_on_a_terminal_alone(off: dict[str, str], files: Any, process: Any) -> None:
    assert b"\x1b" not in process("diff", *files, env=off).stdout
    theirs, ours = pty.openpty()
    process("diff", *files, env=off, stdout=ours, stderr=ours)
    os.close(ours)
    assert (b"\x1b" in os.read(theirs, 1 << 16)) == (not off)


def test_json_has_the_fields_that_scripts_rely_on(files: tuple[Path, Path], cli: Any) -> None:
    ran = cli("diff", *files, "--json", "--sort", "size")
    assert (ran.code, ran.json["same"]) == (1, False)
    assert (ran.json["only_a"], ran.json["only_b"]) == (["gone"], ["new"])
    assert [change["name"] for change in ran.json["changed"]] == ["epoch", "n", "w"]
    change = ran.json["changed"][2]
    assert (change["why"], change["max_abs"], change["differ"], change["of"]) == ("values", 0.5, 1, 6)
    assert (change["index"], change["max_ulp"]) == ([1, 0], 1 << 21)
    assert (change["norm_difference"], change["norm_b"]) == (0.5, pytest.approx(58.25**0.5))
    assert change["relative"] == pytest.approx(0.5 / 58.25**0.5)
    assert 0.998 < change["cosine"] < 0.999
    ran = cli("diff", files[0], files[0], "--json")
    assert (ran.code, ran.json["same"], ran.json["changed"]) == (0, True, [])


def test_the_same_contents_are_exit_0(files: tuple[Path, Path], cli: Any, tmp_path: Path) -> None:
    other = tmp_path / "c.safetensors"
    assert cli("convert", files[0], other).code == 0
    ran = cli("diff", files[0], other)
    assert (ran.code, ran.err) == (0, f"not compared, as {other} holds only tensors: epoch\n")
    assert ran.out == f"{files[0]} and {other} are the same (3 tensors compared)\n"
    assert cli("diff", "-q", files[0], other).out == ""


def test_the_states_that_were_chosen_are_said_if_only_states_are_compared(cli: Any, tmp_path: Path) -> None:
    tree = {name: {"w": torch.ones(2), "b": torch.ones(2)} for name in ("model", "teacher")}
    a, b = pair_of(tmp_path, tree, {**tree, "epoch": 1})
    assert cli("diff", a, b).err == ""  # everything is compared
    said = "state: 'model'; also available: --state teacher\n"
    assert cli("diff", a, b, "--model-only").err == f"{a}: {said}{b}: {said}"
    assert cli("diff", a, b, "--model-only", "--state", "teacher").err == ""
    save_file(tree["model"], tmp_path / "c.safetensors")
    assert f"{b}: {said}" in cli("diff", b, tmp_path / "c.safetensors").err


def test_the_same_within_a_tolerance_is_said_as_such(cli: Any, tmp_path: Path) -> None:
    mine = {"model": {"w": torch.ones(2), "n": torch.ones(2)}, "lr": 0.1}
    theirs = {"model": {"w": torch.full((2,), 5.0), "n": torch.ones(2)}, "lr": 0.2}
    a, b = pair_of(tmp_path, mine, theirs)
    ran = cli("diff", a, b, "--rtol", 10)
    said = f"{a} and {b} are the same within rtol 10 (2 tensors compared, 2 values differ by less)\n"
    assert (ran.code, ran.out) == (0, said)
    data = cli("diff", a, b, "--rtol", 10, "--json").json
    assert (data["same"], data["identical"], data["tolerated"]) == (True, False, ["w", "lr"])
    assert (data["rtol"], data["atol"]) == (10.0, None)
    same = cli("diff", a, a, "--rtol", 10, "--atol", 1)
    assert same.out == f"{a} and {a} are the same (2 tensors compared)\n"
    assert cli("diff", a, a, "--rtol", 10, "--json").json["identical"] is True
    data = cli("diff", a, b, "--json").json
    assert (data["same"], data["identical"], data["tolerated"]) == (False, False, [])


def test_zeros_of_either_sign_and_other_types_are_tolerated(cli: Any, tmp_path: Path) -> None:
    zeros = {"z": torch.zeros(3), "h": torch.ones(3, dtype=torch.float16), "e": torch.ones(0)}
    others = {"z": -torch.zeros(3), "h": torch.ones(3), "e": torch.ones(0)}
    a, b = pair_of(tmp_path, zeros, others)
    data = cli("diff", a, b, "--atol", 0, "--json").json
    assert (data["same"], data["identical"], sorted(data["tolerated"])) == (True, False, ["h", "z"])


def test_tolerances(files: tuple[Path, Path], cli: Any) -> None:
    a, b = files
    assert "~ w" in cli("diff", a, b, "--atol", "0.4").out
    assert "~ w" not in cli("diff", a, b, "--atol", "0.5").out
    assert "~ epoch" not in cli("diff", a, b, "--rtol", "0.25").out
    assert cli("diff", a, b, "--atol", "-1").code == 2
    assert "nan is not a tolerance" in cli("diff", a, b, "--rtol", "nan").err
    assert rows(cli("diff", a, b, "--model-only", "--sort", "name").out) == ["gone", "n", "new", "w"]


def test_names_that_differ_in_a_prefix_get_a_hint_and_match_on_request(cli: Any, tmp_path: Path) -> None:
    state = {"fc.w": torch.ones(2), "fc.b": torch.ones(2)}
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "ddp.pt")
    save_file(state, tmp_path / "plain.safetensors")
    ran = cli("diff", tmp_path / "ddp.pt", tmp_path / "plain.safetensors")
    assert ran.code == 1
    assert ran.err == "2 names are in both files except for a wrapper's prefix: --ignore-prefix\n"
    assert cli("diff", tmp_path / "ddp.pt", tmp_path / "plain.safetensors", "--ignore-prefix").code == 0


def test_nan_and_signed_zeros_are_reported(cli: Any, tmp_path: Path) -> None:
    a = {"z": torch.tensor([0.0, 1.0]), "w": torch.tensor([1.0, 2.0])}
    files = pair_of(tmp_path, a, {"z": torch.tensor([-0.0, 1.0]), "w": torch.tensor([float("nan"), 2.5])})
    lines = cli("diff", *files).out.splitlines()
    assert lines[1].endswith("only in bits")
    assert lines[2].endswith("1 NaN on one side")
    lines = cli("diff", "-v", *files).out.splitlines()
    said = "~ z  float32 [2]: 1 of 2 differs only in bits (NaN, or the sign of zero), at [0]"
    assert lines[0].startswith(said)
    assert lines[1].startswith("~ w  float32 [2]: 2 of 2 differ, 1 by NaN on one side, by up to 0.5")
    assert ", at [0]: 1 -> nan; relative 0.2" in lines[1]


def test_a_missing_or_damaged_file_is_exit_3(files: tuple[Path, Path], cli: Any, tmp_path: Path) -> None:
    assert cli("diff", files[0], tmp_path / "none.pt").code == 3
    files[1].write_bytes(files[1].read_bytes()[:-10])
    ran = cli("diff", *files, "--json")
    assert (ran.code, set(ran.json)) == (3, {"error"})


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.tensor(3000001), torch.tensor(3000000.5), "3000001 -> 3000000.5"),
        (torch.tensor(16777217), torch.tensor(16777216.0).bfloat16(), "16777217 -> 16777216"),
        (torch.tensor(2**63 - 1), torch.tensor(2.0**63).double(), f"{2**63 - 1} -> 9.2233720368547758e+18"),
    ],
    ids=str,
)
def test_integers_and_floats_are_shown_in_digits_that_differ(
    a: torch.Tensor, b: torch.Tensor, said: str, cli: Any, tmp_path: Path
) -> None:
    ran = cli("diff", *pair_of(tmp_path, {"n": a}, {"n": b}), "--atol", "0")
    assert ran.out.splitlines()[0] == f"~ n  {said}"


def test_a_tensor_that_became_infinite_or_nan_comes_first_among_many(cli: Any, tmp_path: Path) -> None:
    """Norms leave out elements that are not finite, so the norm alone would put these tensors last."""
    state = {f"layer{i}.x0.weight": torch.rand(4, 4) + 1 for i in range(60)}
    other = {name: tensor * 1.001 for name, tensor in state.items()}
    for name, value in (("layer58.x0.weight", torch.inf), ("layer59.x0.weight", torch.nan)):
        other[name] = state[name].clone()
        other[name][0, 0] = value
    files = pair_of(tmp_path, state, other)
    page = cli("diff", *files).out
    assert "layer58" in page and "layer59" in page
    first = cli("diff", *files, "--sort", "size", "--json").json["changed"][:2]
    assert {change["name"] for change in first} == {"layer58.x0.weight", "layer59.x0.weight"}


def test_both_sides_are_grouped_at_one_depth(cli: Any, tmp_path: Path) -> None:
    """Of each part one file has one block, the other three: the rows of the first are no deeper for that."""
    old = {f"p{i}.block.0.{name}": torch.ones(2) for i in range(15) for name in ("a", "b", "c")}
    paths = [f"p{i}.block.{j}" for i in range(15) for j in (0, 1, 2)]
    new = {f"{path}.{name}": torch.ones(2) for path in paths for name in ("d", "e")}
    lines = cli("diff", *pair_of(tmp_path, old, new)).out.splitlines()
    names = {line[0]: line.split()[1] for line in lines if ".*" in line}
    assert names["-"].count(".") == names["+"].count("."), lines
