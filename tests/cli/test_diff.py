"""ckpttool diff, as people and scripts use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.running import Ran

Cli = Callable[..., Ran]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    state = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "gone": torch.ones(1)}
    other = {"w": state["w"].clone(), "n": torch.tensor(9), "new": torch.ones(1)}
    other["w"][1, 0] += 0.5
    torch.save({"model": state, "epoch": 3}, tmp_path / "a.pt")
    torch.save({"model": other, "epoch": 4}, tmp_path / "b.pt")
    return tmp_path / "a.pt", tmp_path / "b.pt"


def test_each_difference_is_a_line_and_the_last_line_counts_them(files: tuple[Path, Path], cli: Cli) -> None:
    a, b = files
    ran = cli("diff", a, b)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.splitlines() == [
        "~ w  float32 [2, 3]: 1 of 6 differs, by up to 0.5 (relative 0.143), at [1, 0]: 3 -> 3.5",
        "~ n  int64 []: 1 of 1 differs, by up to 2 (relative 0.222): 7 -> 9",
        "~ epoch  3 -> 4",
        "- gone",
        "+ new",
        f"{a} and {b} differ: 3 changed, 1 only in {a}, 1 only in {b} (2 tensors compared)",
    ]


def test_json_has_the_fields_that_scripts_rely_on(files: tuple[Path, Path], cli: Cli) -> None:
    ran = cli("diff", *files, "--json", "--sort", "size")
    assert (ran.code, ran.json["same"]) == (1, False)
    assert (ran.json["only_a"], ran.json["only_b"]) == (["gone"], ["new"])
    assert [change["name"] for change in ran.json["changed"]] == ["epoch", "n", "w"]
    change = ran.json["changed"][2]
    assert (change["why"], change["max_abs"], change["differ"], change["of"]) == ("values", 0.5, 1, 6)
    assert (change["index"], change["max_ulp"]) == ([1, 0], 1 << 21)
    ran = cli("diff", files[0], files[0], "--json")
    assert (ran.code, ran.json["same"], ran.json["changed"]) == (0, True, [])


def test_the_same_contents_are_exit_0_and_names_that_were_not_compared_are_listed(
    files: tuple[Path, Path], cli: Cli, tmp_path: Path
) -> None:
    other = tmp_path / "c.safetensors"
    assert cli("convert", files[0], other).code == 0
    ran = cli("diff", files[0], other)
    assert (ran.code, ran.err) == (0, f"not compared, as {other} holds only tensors: epoch\n")
    assert ran.out == f"{files[0]} and {other} are the same (3 tensors compared)\n"
    assert cli("diff", "-q", files[0], other).out == ""


def test_tolerances(files: tuple[Path, Path], cli: Cli) -> None:
    a, b = files
    assert "~ w" in cli("diff", a, b, "--atol", "0.4").out
    assert "~ w" not in cli("diff", a, b, "--atol", "0.5").out
    assert "~ epoch" not in cli("diff", a, b, "--rtol", "0.25").out
    assert cli("diff", a, b, "--atol", "-1").code == 2
    assert "nan is not a tolerance" in cli("diff", a, b, "--rtol", "nan").err
    assert cli("diff", a, b, "--model-only", "--sort", "name").out.startswith("- gone\n~ n")


def test_names_that_differ_in_a_prefix_get_a_hint_and_match_on_request(cli: Cli, tmp_path: Path) -> None:
    state = {"fc.w": torch.ones(2), "fc.b": torch.ones(2)}
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "ddp.pt")
    save_file(state, tmp_path / "plain.safetensors")
    ran = cli("diff", tmp_path / "ddp.pt", tmp_path / "plain.safetensors")
    assert ran.code == 1
    assert ran.err == "2 names are in both files except for a wrapper's prefix: --ignore-prefix\n"
    assert cli("diff", tmp_path / "ddp.pt", tmp_path / "plain.safetensors", "--ignore-prefix").code == 0


def test_nan_and_signed_zeros_are_reported(cli: Cli, tmp_path: Path) -> None:
    torch.save({"z": torch.tensor([0.0, 1.0]), "w": torch.tensor([1.0, 2.0])}, tmp_path / "a.pt")
    torch.save({"z": torch.tensor([-0.0, 1.0]), "w": torch.tensor([float("nan"), 2.5])}, tmp_path / "b.pt")
    lines = cli("diff", tmp_path / "a.pt", tmp_path / "b.pt").out.splitlines()
    assert lines[0].startswith(
        "~ z  float32 [2]: 1 of 2 differs only in bits (NaN, or the sign of zero), at [0]"
    )
    assert lines[1].startswith("~ w  float32 [2]: 2 of 2 differ, 1 by NaN on one side, by up to 0.5")
    assert lines[1].endswith(", at [0]: 1 -> nan")


def test_a_missing_or_damaged_file_is_exit_3(files: tuple[Path, Path], cli: Cli, tmp_path: Path) -> None:
    assert cli("diff", files[0], tmp_path / "none.pt").code == 3
    files[1].write_bytes(files[1].read_bytes()[:-10])
    ran = cli("diff", *files, "--json")
    assert (ran.code, set(ran.json)) == (3, {"error"})


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.tensor(3000001), torch.tensor(3000000.5), "3000001 -> 3000000.5"),
        (torch.tensor(16777217), torch.tensor(16777216.0).bfloat16(), "16777217 -> 16777216"),
        (
            torch.tensor(2**63 - 1),
            torch.tensor(2.0**63).double(),
            "9223372036854775807 -> 9.2233720368547758e+18",
        ),
    ],
    ids=str,
)
def test_integers_and_floats_are_shown_in_digits_that_differ(
    a: torch.Tensor, b: torch.Tensor, said: str, cli: Cli, tmp_path: Path
) -> None:
    torch.save({"n": a}, tmp_path / "a.pt")
    torch.save({"n": b}, tmp_path / "b.pt")
    ran = cli("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--atol", "0")
    assert ran.out.splitlines()[0].endswith(f": {said}")
