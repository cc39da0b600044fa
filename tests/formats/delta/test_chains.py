"""`BASE+DELTA…`, and a delta whose base lies beside it, wherever a checkpoint stands; and what is no base."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Damaged, Refused, Unreadable, UsageFault
from ckpttool.formats.delta import applying, reading
from ckpttool.words import show_bytes
from tests.support.running import Cli, assert_says

STEPS = 4


@pytest.fixture
def chain(here: Path) -> list[str]:
    """Write 0.safetensors, what it became in steps, and the delta of each: d1.safetensors, …"""
    state = {"w": torch.randn(3000).bfloat16(), "b": torch.randn(40)}
    for number in range(STEPS):
        save_file(state, f"{number}.safetensors")
        state = {name: torch.where(torch.rand(len(t)) < 0.1, t * 1.5, t) for name, t in state.items()}
    before = "0.safetensors"
    for number in range(1, STEPS):
        ckpttool.delta(before, f"{number}.safetensors", f"d{number}.safetensors")
        before = f"d{number}.safetensors"  # so each is a delta of a delta
    return [f"d{number}.safetensors" for number in range(1, STEPS)]


@pytest.mark.parametrize(
    "name",
    [
        "d3.safetensors",
        "0.safetensors+d1.safetensors+d2.safetensors+d3.safetensors",
        "d2.safetensors+d3.safetensors",
    ],
)
def test_every_reading_command_takes_a_chain(chain: list[str], cli: Cli, name: str) -> None:
    assert cli("inspect", name, "--json").json["format"] == "delta"
    assert cli("diff", name, "3.safetensors", "--json").json["same"]
    assert cli("verify", name, "--against", "3.safetensors").code == 0
    assert cli("digest", name, "-q").out == cli("digest", "3.safetensors", "-q").out
    assert cli("convert", name, "out.safetensors", "-q").code == 0
    assert Path("out.safetensors").read_bytes() == Path("3.safetensors").read_bytes()
    with ckpttool.open(name) as checkpoint:
        loaded, expected = checkpoint.state().load(), load_file("3.safetensors")
        assert all(
            torch.equal(loaded[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected
        )
        assert checkpoint.state()["b"].numpy().tobytes() == expected["b"].numpy().tobytes()


def test_each_piece_of_a_chain_may_be_a_url_of_a_file(chain: list[str]) -> None:
    pieces = ["0.safetensors", chain[0]]
    name = "+".join(Path(piece).absolute().as_uri() for piece in pieces)
    assert ckpttool.diff(name, "1.safetensors").identical


def test_inspect_names_the_size_of_each_delta_and_of_its_base(chain: list[str], cli: Cli) -> None:
    files = ["d2.safetensors", "d1.safetensors", "0.safetensors"]
    sizes = {name: Path(name).stat().st_size for name in files}
    said = cli("inspect", "d2.safetensors", "--json").json
    assert said["made_of"] == sizes and [*said["made_of"]] == files
    assert said["bytes"] == sum(sizes.values())
    shown = ", ".join(f"{name} ({show_bytes(size)})" for name, size in sizes.items())
    assert f"\n  made of     {shown}\n" in cli("inspect", "d2.safetensors").out
    assert "made_of" not in cli("inspect", "0.safetensors", "--json").json


def test_apply_takes_several_deltas(chain: list[str], cli: Cli) -> None:
    ran = cli("apply", "0.safetensors", *chain, "out.safetensors")
    assert ran.code == 0 and ran.out.startswith("applied 3 deltas -> out.safetensors")
    assert Path("out.safetensors").read_bytes() == Path("3.safetensors").read_bytes()
    assert_says(cli("apply", "0.safetensors", "d2.safetensors", "x.safetensors"), 3, "is not the base of d2")
    assert_says(
        cli("apply", "0.safetensors", "d1.safetensors", "d3.safetensors", "x.safetensors"), 3, "not the base"
    )
    assert not Path("x.safetensors").exists()


def test_a_plus_in_a_name_is_part_of_it_where_the_name_exists(chain: list[str], cli: Cli) -> None:
    shutil.copy("0.safetensors", "0+a.safetensors")
    shutil.copy("0.safetensors", "0.safetensors+d1.safetensors")
    assert cli("inspect", "0.safetensors+d1.safetensors", "--json").json["format"] == "safetensors"
    os.remove("0.safetensors+d1.safetensors")
    assert cli("inspect", "0+a.safetensors+d1.safetensors", "--json").json["format"] == "delta"
    assert_says(cli("inspect", "0.safetensors+missing.safetensors"), 3, "no such file")


def test_a_delta_without_its_base_beside_it_says_what_to_name(chain: list[str], cli: Cli, here: Path) -> None:
    (here / "away").mkdir()
    shutil.move("d1.safetensors", "away/d1.safetensors")
    what = "away/d1.safetensors: is a delta, and its base, '0.safetensors', does not lie beside it"
    assert_says(cli("inspect", "away/d1.safetensors"), 3, what, "BASE+away/d1.safetensors")
    assert cli("verify", "0.safetensors+away/d1.safetensors", "--against", "1.safetensors").code == 0


def test_another_base_is_refused_by_name_before_anything_is_written(chain: list[str], cli: Cli) -> None:
    ran = cli("apply", "1.safetensors", "d1.safetensors", "out.safetensors")
    assert_says(ran, 3, "1.safetensors: is not the base of d1.safetensors", "'0.safetensors'")
    assert sorted(path.name for path in Path().iterdir() if path.name.startswith(("out", "."))) == []
    for words in (
        "convert 1.safetensors+d1.safetensors out.safetensors",
        "digest 1.safetensors+d1.safetensors",
    ):
        assert_says(cli(*words.split()), 3, "1.safetensors")
    assert cli("verify", "1.safetensors+d1.safetensors").code == 1
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "value"])
def test_a_base_of_another_form_is_refused(chain: list[str], change: str) -> None:
    state = load_file("0.safetensors")
    b = state.pop("b")
    other = {"name": {"c": b}, "shape": {"b": b[:39]}, "dtype": {"b": b.half()}, "value": {"b": b + 1}}
    save_file(state | other[change], "base.safetensors")
    save_file({"w": state["w"], "b": b}, "new.safetensors")
    ckpttool.delta("0.safetensors", "new.safetensors", "d.safetensors")
    for lazily in (False, True):
        with pytest.raises(
            Refused, match=r"base\.safetensors: is not the base of d\.safetensors: .*'b'"
        ) as told:
            ckpttool.apply("base.safetensors", ["d.safetensors"], lazily=lazily)
        assert "'0.safetensors'" in (told.value.hint or "")


def test_a_base_needs_no_more_than_is_taken_of_it(chain: list[str]) -> None:
    state = load_file("0.safetensors")
    save_file({"w": state["w"], "b": torch.arange(40) + 0.1, "c": state["b"]}, "new.safetensors")
    ckpttool.delta("0.safetensors", "new.safetensors", "d.safetensors")
    save_file({"w": state["w"]}, "base.safetensors")
    with ckpttool.apply("base.safetensors", ["d.safetensors"], lazily=True) as checkpoint:
        ckpttool.save(checkpoint, "out.safetensors")
    assert Path("out.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


def test_a_base_that_changes_after_it_was_compared_makes_nothing(chain: list[str]) -> None:
    checkpoint = ckpttool.apply("0.safetensors", ["d1.safetensors"], lazily=True)
    raw = bytearray(Path("0.safetensors").read_bytes())
    raw[-9] ^= 1
    with open("0.safetensors", "r+b") as file:  # the same file, which is open already
        file.write(raw)
    with checkpoint, pytest.raises(Damaged, match="do not match their digest"):
        ckpttool.save(checkpoint, "out.safetensors")
    assert not Path("out.safetensors").exists()


def test_a_pt_with_other_values_is_refused_when_it_is_opened(here: Path) -> None:
    for number in range(3):
        torch.save({"w": torch.arange(300.0) + number * (torch.arange(300) % 9 == 0)}, f"{number}.pt")
    ckpttool.delta("0.pt", "1.pt", "d.safetensors")
    with pytest.raises(Refused, match="'w' has other values"):
        ckpttool.open("2.pt+d.safetensors")


def test_a_delta_in_the_place_of_another_is_refused(chain: list[str]) -> None:
    save_file({name: t + 1 for name, t in load_file("1.safetensors").items()}, "other.safetensors")
    ckpttool.delta("0.safetensors", "other.safetensors", "d1.safetensors", force=True)
    with pytest.raises(Refused, match=r"is not the base of \S*d2\.safetensors"):
        ckpttool.open("d2.safetensors")


def with_base(path: str, name: str) -> None:
    """Let a delta name another base."""
    with safe_open(path, "pt") as file:
        texts, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    said = json.loads(texts["ckpttool.delta"])
    said["base"]["name"] = name
    save_file(tensors, path, metadata={**texts, "ckpttool.delta": json.dumps(said)})


@pytest.mark.parametrize("name", ["d2.safetensors", "d3.safetensors"])
def test_a_circle_is_refused(chain: list[str], name: str) -> None:
    with_base("d2.safetensors", name)
    with pytest.raises(Unreadable, match="is its own base, by way of others"):
        ckpttool.open("d3.safetensors")


@pytest.mark.parametrize("name", ["../0.safetensors", "/0.safetensors", "..", "a/b", "0\0.safetensors"])
def test_a_base_in_another_folder_is_not_followed(chain: list[str], name: str) -> None:
    with_base("d1.safetensors", name)
    with pytest.raises(Damaged, match="is no name of a file beside it"):
        ckpttool.open("d1.safetensors")


def test_a_chain_has_an_end(chain: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading.LONGEST == 64
    monkeypatch.setattr(reading, "LONGEST", 2)
    monkeypatch.setattr(applying, "LONGEST", 2)
    ckpttool.open("d2.safetensors").close()
    with pytest.raises(Unreadable, match="has too many deltas below"):
        ckpttool.open("d3.safetensors")
    with pytest.raises(Unreadable, match="is a chain of more than 2 deltas"):
        ckpttool.open("d2.safetensors+d3.safetensors")
    with pytest.raises(UsageFault, match="3 deltas were given"):
        ckpttool.apply("0.safetensors", chain)


def test_what_is_no_delta_is_refused(chain: list[str], cli: Cli) -> None:
    assert_says(cli("inspect", "0.safetensors+1.safetensors"), 3, "1.safetensors: is no delta")
    assert_says(cli("apply", "0.safetensors", "1.safetensors", "out.pt"), 3, "1.safetensors: is no delta")
    torch.save({"w": torch.ones(1)}, "x.pt")
    assert_says(cli("apply", "0.safetensors", "x.pt", "out.pt"), 3, "x.pt: is no delta")
