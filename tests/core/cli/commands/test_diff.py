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

import ckpttool
from ckpttool.diffing.command import details, page
from ckpttool.diffing.compare_values import Change, Comparison, Norms
from ckpttool.diffing.distances import Distance


def save_pair(a: object, b: object) -> None:
    torch.save(a, "a.pt")
    torch.save(b, "b.pt")


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "gone": torch.ones(1)}
    other = {"w": state["w"].clone(), "n": torch.tensor(9), "new": torch.ones(1)}
    other["w"][1, 0] += 0.5
    save_pair({"model": state, "epoch": 3}, {"model": other, "epoch": 4})


def test_each_difference_is_a_row_and_the_last_line_counts_them(cli: Any) -> None:
    ran = cli("diff a.pt b.pt")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.splitlines() == [
        "         differ  relative    cosine  largest",
        "~ w       16.7%    0.0655  0.998204      0.5",
        "~ n      7 -> 9",
        "~ epoch  3 -> 4",
        "- gone",
        "+ new",
        "a.pt and b.pt differ: 2 tensors and 1 other value changed, 1 only in a.pt, 1 only in b.pt "
        "(2 tensors compared)",
    ]


def test_verbose_lines_say_all_that_is_known(cli: Any) -> None:
    lines = cli("diff -v", "a.pt", "b.pt").out.splitlines()
    assert lines[0] == (
        "~ w  float32 [2×3]: 1 of 6 differs, by up to 0.5, at [1, 0]: 3 -> 3.5; "
        "relative 0.0655, cosine 0.998204"
    )
    assert lines[1] == "~ n  int64 []: 1 of 1 differs, by up to 2: 7 -> 9; relative 0.222, cosine 1.000000"
    assert lines[2:5] == ["~ epoch  3 -> 4", "- gone", "+ new"]


def test_types_and_shapes_say_once_what_both_sides_have(cli: Any) -> None:
    a = {"shape": torch.ones(2, 3), "type": torch.ones(2, 3), "both": torch.ones(2, 3), "axes": torch.ones(6)}
    b = {"shape": torch.ones(4, 3), "type": a["type"].half(), "both": torch.ones(6).half()}
    save_pair(a, b | {"axes": torch.tensor(1.0)})
    assert cli("diff a.pt b.pt").out.splitlines()[:4] == [
        "~ shape  float32 [2×3] -> [4×3]",
        "~ type   float32 -> float16 of [2×3]",
        "~ both   float32 [2×3] -> float16 [6]",
        "~ axes   float32 [6] -> []",
    ]
    assert cli("diff -v --atol 0 a.pt b.pt").out.splitlines()[0] == "~ shape  float32 [2×3] -> [4×3]"
    assert cli("diff a.pt b.pt --json").json["changed"][0]["a"] == "float32 [2, 3]"


def page_of(width: int, *names: str) -> list[str]:
    """Return the lines of a page about tensors that differ, without colours."""
    found = Distance(1, 2, max_abs=1.0), None, Norms(1.0, 1.0, 1.0, 0.5)
    changes = tuple(Change(name, "values", "float32 [2]", "float32 [2]", *found) for name in names)
    return [click.unstyle(line) for line in page(Comparison((), (), changes, 1), sort=None, width=width)]


def test_a_narrow_terminal_shows_fewer_figures_and_no_line_that_is_cut_in_a_number() -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    for width, heads in ((40, ["differ", "relative"]), (50, ["differ", "relative", "cosine"])):
        lines = page_of(width, *names)
        assert lines[0].split() == heads
        assert max(map(len, lines)) <= width
        assert [line.split()[2:4] for line in lines[1:3]] == [["50%", "1"]] * 2
        assert lines[3].startswith("without ")


def blocks(count: int) -> dict[str, torch.Tensor]:
    """Return a state of as many blocks of two layers, each with a counter."""
    state = {"head.weight": torch.ones(4)}
    for i in range(count):
        for layer in ("attention", "mlp"):
            state[f"blocks.{i}.{layer}.weight"] = torch.ones(8)
            state[f"blocks.{i}.{layer}.num_batches_tracked"] = torch.tensor(1000)
    return state


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
def test_many_differences_are_at_most_40_rows(count: int, expected: Any, cli: Any) -> None:
    state, other = blocks(count), blocks(count)
    for name, value in other.items():
        if name.startswith("blocks"):
            value += 1 + int(name.split(".")[1])
    save_pair(state, other)
    ran = cli("diff a.pt b.pt")
    assert rows(ran.out) == expected
    said = "  -v shows every tensor" if count < 60 else "  and 20 more that differ"
    assert ran.out.splitlines()[-2].startswith(said)
    assert len(rows(cli("diff -v a.pt b.pt").out)) == 4 * count


def test_a_module_s_row_joins_its_tensors_without_counters(cli: Any) -> None:
    """A counter of 1000 batches would outweigh all weights."""
    other = blocks(30)
    for name, value in other.items():
        if name.startswith("blocks"):
            value += 1 if "num" in name else torch.tensor([3, 0, 0, 0, 0, 0, 0, 0])
    save_pair(blocks(30), other)
    cosine = (4 + 7) / (8**0.5 * (16 + 7) ** 0.5)
    row = f"~ blocks.0.* 22.2% {3 / 23**0.5:.3g} {cosine:.6f} 3"
    assert cli("diff a.pt b.pt").out.splitlines()[1].split() == row.split()


def test_names_of_one_file_alone_are_grouped_too(cli: Any) -> None:
    save_pair(blocks(30), {"head.weight": torch.ones(4)})
    ran = cli("diff a.pt b.pt")
    assert ran.out.splitlines()[0] == "- blocks.0.*   4 names"
    assert len(rows(ran.out)) == 30


def test_relative_differences_are_not_those_of_elements_near_zero(cli: Any) -> None:
    a, b = torch.ones(100), torch.ones(100)
    a[0], b[0] = 1e-3, 1e-12
    save_pair({"w": a, "v": a}, {"w": b, "v": a + 1})
    ran = cli("diff a.pt b.pt --sort size")
    assert rows(ran.out) == ["v", "w"]
    assert ran.out.splitlines()[2].split() == ["~", "w", "1%", "0.000101", "1.000000", "0.001"]


def test_names_are_cut_in_their_middle_for_a_terminal() -> None:
    lines = page_of(80, "model.layers.10.self_attn.q_proj.weight.original")
    assert max(map(len, lines)) == 80
    assert lines[1].startswith("~ model.layers.10.sel")
    assert "…proj.weight.original  " in lines[1]


@pytest.mark.parametrize("off", [{"NO_COLOR": "1"}, {}])
def test_marks_are_coloured_on_a_terminal_alone(off: dict[str, str], process: Any) -> None:
    assert b"\x1b" not in process("diff", "a.pt", "b.pt", env=off).stdout
    theirs, ours = pty.openpty()
    process("diff", "a.pt", "b.pt", env=off, stdout=ours, stderr=ours)
    os.close(ours)
    assert (b"\x1b" in os.read(theirs, 1 << 16)) == (not off)


def test_json_has_the_fields_that_scripts_rely_on(cli: Any) -> None:
    ran = cli("diff a.pt b.pt --json --sort size")
    assert (ran.code, ran.json["same"]) == (1, False)
    assert (ran.json["only_a"], ran.json["only_b"]) == (["gone"], ["new"])
    assert [change["name"] for change in ran.json["changed"]] == ["epoch", "n", "w"]
    change = ran.json["changed"][2]
    assert (change["why"], change["max_abs"], change["differ"], change["of"]) == ("values", 0.5, 1, 6)
    assert (change["index"], change["max_ulp"]) == ([1, 0], 1 << 21)
    assert (change["norm_difference"], change["norm_b"]) == (0.5, pytest.approx(58.25**0.5))
    assert change["relative"] == pytest.approx(0.5 / 58.25**0.5)
    assert 0.998 < change["cosine"] < 0.999
    ran = cli("diff a.pt a.pt --json")
    assert (ran.code, ran.json["same"], ran.json["changed"]) == (0, True, [])


def test_the_same_contents_are_exit_0(cli: Any) -> None:
    other = "c.safetensors"
    assert cli("convert a.pt", other).code == 0
    ran = cli("diff a.pt", other)
    assert (ran.code, ran.err) == (0, f"not compared, as {other} holds only tensors: epoch\n")
    assert ran.out == f"a.pt and {other} are the same (3 tensors compared)\n"
    assert cli("diff -q", "a.pt", other).out == ""


def test_the_same_within_a_tolerance_is_said_as_such(cli: Any) -> None:
    mine = {"model": {"w": torch.ones(2), "n": torch.ones(2)}, "lr": 0.1}
    theirs = {"model": {"w": torch.full((2,), 5.0), "n": torch.ones(2)}, "lr": 0.2}
    save_pair(mine, theirs)
    ran = cli("diff a.pt b.pt --rtol 10")
    said = "a.pt and b.pt are the same within rtol 10 (2 tensors compared, 2 values differ by less)\n"
    assert (ran.code, ran.out) == (0, said)
    data = cli("diff a.pt b.pt --rtol 10 --json").json
    assert (data["same"], data["identical"], data["tolerated"]) == (True, False, ["w", "lr"])
    assert (data["rtol"], data["atol"]) == (10.0, None)
    same = cli("diff a.pt a.pt --rtol 10 --atol 1")
    assert same.out == "a.pt and a.pt are the same (2 tensors compared)\n"
    assert cli("diff a.pt a.pt --rtol 10 --json").json["identical"] is True
    data = cli("diff a.pt b.pt --json").json
    assert (data["same"], data["identical"], data["tolerated"]) == (False, False, [])


def test_zeros_of_either_sign_and_other_types_are_tolerated(cli: Any) -> None:
    zeros = {"z": torch.zeros(3), "h": torch.ones(3, dtype=torch.float16), "e": torch.ones(0)}
    others = {"z": -torch.zeros(3), "h": torch.ones(3), "e": torch.ones(0)}
    save_pair(zeros, others)
    found = cli("diff a.pt b.pt --atol 0 --json").json
    assert (found["same"], found["identical"], sorted(found["tolerated"])) == (True, False, ["h", "z"])


def test_tolerances(cli: Any) -> None:
    assert "~ w" in cli("diff a.pt b.pt --atol 0.4").out
    assert "~ w" not in cli("diff a.pt b.pt --atol 0.5").out
    assert "~ epoch" not in cli("diff a.pt b.pt --rtol 0.25").out
    assert cli("diff a.pt b.pt --atol -1").code == 2
    assert "nan is not a tolerance" in cli("diff a.pt b.pt --rtol nan").err
    assert rows(cli("diff a.pt b.pt --model-only --sort name").out) == ["gone", "n", "new", "w"]


def test_names_that_differ_in_a_prefix_get_a_hint_and_match_on_request(cli: Any) -> None:
    state = {"fc.w": torch.ones(2), "fc.b": torch.ones(2)}
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, "ddp.pt")
    save_file(state, "plain.safetensors")
    ran = cli("diff ddp.pt plain.safetensors")
    assert ran.code == 1
    assert ran.err == "2 names are in both files except for a wrapper's prefix: --ignore-prefix\n"
    assert cli("diff ddp.pt plain.safetensors --ignore-prefix").code == 0


def test_nan_and_signed_zeros_are_reported(cli: Any) -> None:
    a = {"z": torch.tensor([0.0, 1.0]), "w": torch.tensor([1.0, 2.0])}
    save_pair(a, {"z": torch.tensor([-0.0, 1.0]), "w": torch.tensor([float("nan"), 2.5])})
    lines = cli("diff a.pt b.pt").out.splitlines()
    assert lines[1].endswith("only in bits")
    assert lines[2].endswith("1 NaN on one side")
    lines = cli("diff -v", "a.pt", "b.pt").out.splitlines()
    said = "~ z  float32 [2]: 1 of 2 differs only in bits (NaN, or the sign of zero), at [0]"
    assert lines[0].startswith(said)
    assert lines[1].startswith("~ w  float32 [2]: 2 of 2 differ, 1 by NaN on one side, by up to 0.5")
    assert ", at [0]: 1 -> nan; relative 0.2" in lines[1]


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
    a: torch.Tensor, b: torch.Tensor, said: str, cli: Any
) -> None:
    save_pair({"n": a}, {"n": b})
    ran = cli("diff a.pt b.pt --atol 0")
    assert ran.out.splitlines()[0] == f"~ n  {said}"


def test_a_tensor_that_became_infinite_or_nan_comes_first_among_many(cli: Any) -> None:
    """Norms leave out elements that are not finite, so the norm alone would put these tensors last."""
    state = {f"layer{i}.x0.weight": torch.rand(4, 4) + 1 for i in range(60)}
    other = {name: tensor * 1.001 for name, tensor in state.items()}
    for name, value in (("layer58.x0.weight", torch.inf), ("layer59.x0.weight", torch.nan)):
        other[name] = state[name].clone()
        other[name][0, 0] = value
    save_pair(state, other)
    shown = cli("diff a.pt b.pt").out
    assert "layer58" in shown and "layer59" in shown
    first = cli("diff a.pt b.pt --sort size --json").json["changed"][:2]
    assert {change["name"] for change in first} == {"layer58.x0.weight", "layer59.x0.weight"}


def test_both_sides_are_grouped_at_one_depth(cli: Any) -> None:
    """Of each part one file has one block, the other three: the rows of the first are no deeper for that."""
    old = {f"p{i}.block.0.{name}": torch.ones(2) for i in range(15) for name in ("a", "b", "c")}
    paths = [f"p{i}.block.{j}" for i in range(15) for j in (0, 1, 2)]
    new = {f"{path}.{name}": torch.ones(2) for path in paths for name in ("d", "e")}
    save_pair(old, new)
    lines = cli("diff a.pt b.pt").out.splitlines()
    names = {line[0]: line.split()[1] for line in lines if ".*" in line}
    assert names["-"].count(".") == names["+"].count("."), lines


def on_terminal(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], width: int, *, verbose: bool
) -> list[str]:
    """Return the lines of the page about two states, without colours."""
    save_pair(a, b)
    comparison = ckpttool.diff("a.pt", "b.pt")
    lines = details(comparison, None, width) if verbose else page(comparison, None, width)
    return [click.unstyle(line) for line in lines]


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("verbose", [False, True])
def test_words_that_do_not_fit_beside_a_name_stand_below_it(width: int, verbose: bool, here: Path) -> None:
    name = "encoder.layers.0.attention.self.query.weight"
    a = {name: torch.ones(64, 64), "head.weight": torch.ones(10, 64), "moved": torch.ones(3)}
    b = {name: a[name].bfloat16(), "head.weight": torch.ones(12, 64), "moved": torch.zeros(3)}
    lines = on_terminal(a, b, width, verbose=verbose)
    assert max(len(line) for line in lines if name not in line) <= width
    said = " ".join(" ".join(lines).split())
    assert "float32 -> bfloat16 of [64×64]" in said and "float32 [10×64] -> [12×64]" in said
    below = [line for line in lines if line.startswith("    ") and "float32" in line]
    assert bool(below) == (width == 40)


def test_figures_that_do_not_fit_are_named(here: Path) -> None:
    a, b = {"layer.weight": torch.ones(3)}, {"layer.weight": torch.tensor([1.0, 2.0, 3.0])}
    narrow, wide = (on_terminal(a, b, width, verbose=False) for width in (40, 80))
    note = "without cosine, largest, for which the terminal is too narrow; | cat has them"
    assert " ".join(narrow[2:]) == note
    assert len(wide) == 2 and wide[0].split() == ["differ", "relative", "cosine", "largest"]


@pytest.mark.parametrize("command", ["diff a.pt b.pt", "verify a.pt --against b.pt"])
def test_an_optimizer_keyed_by_text_is_noted_as_torch_finds_nothing_there(command: str, cli: Any) -> None:
    a = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"step": 1}}, "param_groups": []}}
    save_pair(a, {**a, "optimizer": {"state": {"0": {"step": 1}}, "param_groups": []}})
    ran = cli(command)
    assert ran.code == 0
    assert "keyed by text in b.pt and by numbers in a.pt" in ran.err
    assert "load_state_dict finds nothing there" in ran.err and "optimizer.state" in ran.err
    field = "text_keys_b" if command.startswith("diff") else "text_keys_there"
    assert cli(f"{command} --json").json[field] == ["optimizer.state"]
