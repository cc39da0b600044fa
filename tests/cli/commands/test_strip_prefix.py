"""ckpttool strip-prefix: the way from a wrapped model's file to a plain one."""

from __future__ import annotations

import io
import json
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from tests.support.comparing import assert_same
from tests.support.zips import assert_whole


def wrapped() -> OrderedDict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return OrderedDict((f"module.{key}", value) for key, value in net.state_dict().items())


def plain(prefix: str = "module.") -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in wrapped().items()}


@pytest.fixture
def ddp(tmp_path: Path) -> Path:
    torch.save(wrapped(), tmp_path / "ddp.pt")
    return tmp_path / "ddp.pt"


@pytest.fixture
def training(tmp_path: Path) -> Path:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4))
    net.load_state_dict({key: value for key, value in plain().items() if key.startswith("0.")})
    wrapper = torch.nn.Module()
    wrapper.module = net
    optimizer = torch.optim.AdamW(wrapper.named_parameters())
    tree = {"epoch": 3, "model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def test_the_result_is_one_line(ddp: Path, cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    ran = cli("strip-prefix", ddp, out)
    assert (ran.code, ran.err) == (0, "")
    (line,) = ran.out.splitlines()
    assert line.startswith(f"stripped 'module.' from 9 of 9 keys -> {out} (")
    assert line.endswith(" s)")


def test_safetensors_gets_the_bytes_of_save_file(ddp: Path, cli: Any, tmp_path: Path) -> None:
    cli("strip-prefix", ddp, tmp_path / "out.safetensors")
    save_file(plain(), tmp_path / "oracle")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "oracle").read_bytes()


@pytest.mark.parametrize("ending", [".pt", ".pth", ".th", ".bin", ".ckpt", ".PT"])
def test_a_pt_keeps_all_and_its_names_follow(ending: str, training: Path, cli: Any, tmp_path: Path) -> None:
    out = tmp_path / f"out{ending}"
    assert cli("strip-prefix", training, out).code == 0
    assert_whole(out)
    before, after = torch.load(training, weights_only=True), torch.load(out, weights_only=True)
    assert list(after) == ["epoch", "model", "optimizer"]
    assert list(after["model"]) == ["0.weight", "0.bias"]
    assert after["optimizer"]["param_groups"][0]["param_names"] == ["0.weight", "0.bias"]
    assert list(after["model"]._metadata) == ["", "0"]
    assert_same(before["optimizer"]["state"], after["optimizer"]["state"])


def test_what_safetensors_can_t_hold_is_named(training: Path, cli: Any, tmp_path: Path) -> None:
    ran = cli("strip-prefix", training, tmp_path / "out.safetensors")
    assert "left out, as safetensors holds only tensors: " in ran.err
    assert all(name in ran.err for name in ("epoch", "optimizer"))
    found = cli("strip-prefix", training, tmp_path / "out.safetensors", "--force", "--json")
    assert found.json["left_out"] == ["model._metadata", "epoch", "optimizer"]


def test_json_has_the_fields_that_scripts_rely_on(ddp: Path, cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    ran = cli("strip-prefix", ddp, out, "--json")
    assert ran.err == ""
    counts = {"keys": 9, "renamed": 9, "bytes": out.stat().st_size}
    assert ran.json | {"output": str(out), "left_out": [], **counts} == ran.json
    assert ran.json["seconds"] >= 0


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_a_dry_run_tells_the_exact_size_and_writes_nothing(
    name: str, training: Path, cli: Any, tmp_path: Path
) -> None:
    said = cli("strip-prefix", training, tmp_path / name, "--dry-run").out
    assert said.startswith("would have stripped 'module.'")
    dry = cli("strip-prefix", training, tmp_path / name, "--dry-run", "--json").json
    assert not (tmp_path / name).exists()
    wet = cli("strip-prefix", training, tmp_path / name, "--json").json
    assert dry.pop("dry_run")
    assert {**dry, "seconds": 0} == {**wet, "seconds": 0}
    assert dry["bytes"] == (tmp_path / name).stat().st_size


def test_an_existing_output_needs_force(ddp: Path, cli: Any, tmp_path: Path) -> None:
    (tmp_path / "out.pt").write_bytes(b"old")
    ran = cli("strip-prefix", ddp, tmp_path / "out.pt")
    assert (ran.code, (tmp_path / "out.pt").read_bytes()) == (2, b"old")
    assert "hint: write it anyway with --force" in ran.err
    assert cli("strip-prefix", ddp, tmp_path / "out.pt", "--dry-run").code == 2
    assert cli("strip-prefix", ddp, tmp_path / "out.pt", "--force").code == 0
    assert list(torch.load(tmp_path / "out.pt")) == list(plain())


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_the_output_may_be_the_input(ending: str, cli: Any, tmp_path: Path) -> None:
    path = tmp_path / f"model{ending}"
    save_file(dict(wrapped()), path) if ending == ".safetensors" else torch.save(wrapped(), path)
    assert cli("strip-prefix", path, path).code == 2
    assert cli("strip-prefix", path, path, "--force").code == 0
    found = load_file(path) if ending == ".safetensors" else torch.load(path)
    assert_same(dict(sorted(plain().items())), dict(sorted(found.items())))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_output_may_be_a_link_to_the_input(ddp: Path, cli: Any, tmp_path: Path) -> None:
    (tmp_path / "link.pt").symlink_to(ddp)
    assert cli("strip-prefix", ddp, tmp_path / "link.pt", "--force").code == 0
    assert (tmp_path / "link.pt").is_symlink()
    assert list(torch.load(ddp)) == list(plain())


def test_the_input_is_never_changed(training: Path, cli: Any, tmp_path: Path) -> None:
    before = training.read_bytes()
    cli("strip-prefix", training, tmp_path / "out.pt")
    cli("strip-prefix", training, tmp_path / "out.safetensors")
    assert training.read_bytes() == before


def test_a_new_file_has_the_permissions_of_the_umask(ddp: Path, cli: Any, tmp_path: Path) -> None:
    """Not 0600, which safetensors itself leaves."""
    old = os.umask(0o022)
    try:
        cli("strip-prefix", ddp, tmp_path / "out.safetensors")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "out.safetensors").stat().st_mode) == 0o644


def test_nothing_to_strip_exits_1_and_names_the_prefix_there_is(cli: Any, tmp_path: Path) -> None:
    torch.save({"_orig_mod.a": torch.ones(1)}, tmp_path / "in.pt")
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt")
    assert (ran.code, ran.out) == (1, "")
    assert "no key begins with 'module.'" in ran.err
    assert "--prefix _orig_mod." in ran.err
    assert not (tmp_path / "out.pt").exists()
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt", "--json")
    assert ran.json["error"]["kind"] == "nothing-to-do"


def test_keys_without_the_prefix_are_named(cli: Any, tmp_path: Path) -> None:
    state = {f"{'module.' if i % 2 else ''}k{i}": torch.ones(1) for i in range(12)}
    torch.save(state, tmp_path / "in.pt")
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt")
    assert "stripped 'module.' from 6 of 12 keys" in ran.out
    assert "kept as they were: k0, k2, k4, k6 and 2 more" in ran.err
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt", "--force", "-v")
    assert "kept as they were: k0, k2, k4, k6, k8, k10" in ran.err
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt", "--force", "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], {"module.a", "0._orig_mod.b"}),
        (["--repeat"], {"a", "0._orig_mod.b"}),
        (["--prefix", "_orig_mod.", "--anywhere"], {"module.module.a", "0.b"}),
        (["--prefix", "module.module."], {"a", "0._orig_mod.b"}),
    ],
)
def test_the_flags_of_renaming(flags: list[str], expected: set[str], cli: Any, tmp_path: Path) -> None:
    torch.save({"module.module.a": torch.ones(1), "0._orig_mod.b": torch.ones(1)}, tmp_path / "in.pt")
    assert cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt", *flags).code == 0
    assert set(torch.load(tmp_path / "out.pt")) == expected


def test_the_chosen_state_is_named_and_state_selects_another(cli: Any, tmp_path: Path) -> None:
    tree = {"model": {"module.a": torch.ones(1)}, "ema": {"module.b": torch.ones(1)}}
    torch.save(tree, tmp_path / "in.pt")
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert "state: 'model'; also available: --state ema" in ran.err
    ran = cli("strip-prefix", tmp_path / "in.pt", tmp_path / "ema.safetensors", "--state", "ema")
    assert "also available" not in ran.err
    assert list(load_file(tmp_path / "ema.safetensors")) == ["b"]
    assert cli("strip-prefix", tmp_path / "in.pt", tmp_path / "x.pt", "--state", "teacher").code == 3


def test_a_state_under_a_key_with_dots_is_the_one_that_is_written(cli: Any, tmp_path: Path) -> None:
    """The dotted name fits another dict first."""
    tree = {"a": {"b": {"x": 1}}, "a.b": {"module.w": torch.ones(1)}}
    torch.save(tree, tmp_path / "in.pt")
    assert cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.safetensors").code == 0
    assert list(load_file(tmp_path / "out.safetensors")) == ["w"]


def test_a_legacy_file_becomes_safetensors(resnet20: Path, cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "r20.safetensors"
    assert "from 97 of 97 keys" in cli("strip-prefix", resnet20, out).out
    theirs = torch.load(resnet20, map_location="cpu", weights_only=False)["state_dict"]
    expected = {key.removeprefix("module."): value.contiguous() for key, value in theirs.items()}
    save_file(expected, tmp_path / "oracle")
    assert out.read_bytes() == (tmp_path / "oracle").read_bytes()


def test_the_file_goes_to_standard_output_and_words_elsewhere(ddp: Path, process: Any) -> None:
    ran = process("strip-prefix", ddp, "-")
    assert list(torch.load(io.BytesIO(ran.stdout), weights_only=True)) == list(plain())
    assert ran.stderr.startswith(b"stripped 'module.' from 9 of 9 keys -> - (")
    ran = process("strip-prefix", ddp, "-", "--json")
    assert json.loads(ran.stderr)["output"] == "-"
    torch.load(io.BytesIO(ran.stdout), weights_only=True)


def test_a_pipe_in_and_a_pipe_out(process: Any, tmp_path: Path) -> None:
    save_file(dict(wrapped()), tmp_path / "in.safetensors")
    ran = process("strip-prefix", "-", "-", input=(tmp_path / "in.safetensors").read_bytes())
    assert load(ran.stdout).keys() == plain().keys()


def test_a_name_ending_in_slash_is_a_folder_of_shards(ddp: Path, cli: Any, tmp_path: Path) -> None:
    assert cli("strip-prefix", ddp, f"{tmp_path}/shards/").code == 0
    assert (tmp_path / "shards").is_dir()


@pytest.fixture
def lightning(tmp_path: Path) -> Path:
    """A file with the entries of Lightning."""
    net = torch.nn.Linear(2, 2)
    torch.save(
        {
            "epoch": 2,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": {f"model.{key}": value for key, value in net.state_dict().items()},
            "loops": {"fit_loop": {}},
            "optimizer_states": [torch.optim.SGD(net.parameters(), 0.1).state_dict()],
            "hyper_parameters": {"lr": 0.1, "classes": ["cat", "dog"]},
        },
        tmp_path / "lit.ckpt",
    )
    return tmp_path / "lit.ckpt"


def test_keep_writes_plain_keys_and_what_is_named(lightning: Path, cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    ran = cli("strip-prefix", lightning, out, "--prefix", "model.", "--keep", "hyper_parameters", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["left_out"] == ["epoch", "pytorch-lightning_version", "loops", "optimizer_states"]
    found = torch.load(out)
    assert list(found) == ["state_dict", "hyper_parameters"]
    assert list(found["state_dict"]) == ["weight", "bias"]
    assert found["hyper_parameters"] == {"lr": 0.1, "classes": ["cat", "dog"]}
    torch.nn.Linear(2, 2).load_state_dict(found["state_dict"])


def test_keep_of_several_names(lightning: Path, cli: Any, tmp_path: Path) -> None:
    more = ["--keep", "epoch", "--keep", "hyper_parameters"]
    assert cli("strip-prefix", lightning, tmp_path / "out.pt", "--prefix", "model.", *more).code == 0
    assert list(torch.load(tmp_path / "out.pt")) == ["epoch", "state_dict", "hyper_parameters"]


def test_keep_of_a_missing_name_hints_those_there_are(lightning: Path, cli: Any, tmp_path: Path) -> None:
    ran = cli("strip-prefix", lightning, tmp_path / "out.pt", "--prefix", "model.", "--keep", "hparams")
    said = f"nothing to do: {lightning}: holds nothing named 'hparams' outside the state"
    hint = "hint: there are: epoch, pytorch-lightning_version, loops, optimizer_states and 1 more"
    assert (ran.code, ran.err.splitlines()) == (1, [said, hint])
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("output", ["out.safetensors", "out/"])
def test_keep_is_refused_where_the_format_holds_only_tensors(
    output: str, lightning: Path, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("strip-prefix", lightning, output, "--prefix", "model.", "--keep", "hyper_parameters")
    assert (ran.code, ran.err.splitlines()[1]) == (2, "hint: name a .pt file, which holds what --keep names")
