"""Damage is refused and never given a new checksum, by whatever command reads the bytes."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.checkpoint.checksums import Checksums
from ckpttool.core.checkpoint.keys import strip_prefix
from ckpttool.core.tensors.values import stream
from ckpttool.errors import Damaged
from tests.support.comparing import assert_same, saved
from tests.support.running import Cli

WEIGHT = torch.arange(90_000.0).reshape(300, 300)
LONG = -torch.arange(700_000.0)
STATE = {"module.fc.weight": WEIGHT, "module.long": LONG, "module.bias": torch.arange(50.0)}
NAMED = {"params": [0], "param_names": ["module.fc.weight"], "lr": 0.1}
RUN = {"model": STATE, "optimizer": {"state": {0: {"momentum_buffer": WEIGHT + 1}}, "param_groups": [NAMED]}}


def damage(path: Path, tensor: torch.Tensor) -> Path:
    """Change one bit in the middle of a tensor's bytes."""
    raw = bytearray(path.read_bytes())
    values = tensor.contiguous().numpy().tobytes()
    assert raw.count(values) == 1
    raw[raw.index(values) + len(values) // 2] ^= 4
    path.write_bytes(raw)
    return path


COMMANDS: dict[str, str] = {
    "convert to .safetensors": "convert IN out.safetensors",
    "convert to .pt": "convert IN out.pt",
    "convert to shards": "convert IN out/ --shard-size 1MB",
    "convert to DCP": "convert IN out --to dcp",
    "convert --full": "convert IN out.safetensors --full",
    "convert --dtype": "convert IN out.safetensors --dtype bf16",
    "convert --dtype to .pt": "convert IN out.pt --dtype fp16",
    "convert --only": "convert IN out.pt --only *fc.weight",
    "convert --permute": "convert IN out.safetensors --permute *fc.weight=1,0",
    "strip-prefix": "strip-prefix IN out.safetensors",
    "strip-prefix to .pt": "strip-prefix IN out.pt",
    "add-prefix": "add-prefix IN out.pt",
    "rename-keys": "rename-keys IN out.pt --map fc=head",
    "slim": "slim IN out.pt",
    "optimizer": "optimizer IN out.pt --to names",
    "split": "split IN out --ranks 2 --as dtensor",
    "average, first": "average IN whole.pt out.pt",
    "average, last": "average whole.pt IN out.pt",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A folder with a whole and a damaged file, which the commands run in."""
    saved(RUN, tmp_path / "whole.pt")
    damage(saved(RUN, tmp_path / "in.pt"), WEIGHT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(command: str) -> list[str]:
    return COMMANDS[command].replace("IN", "in.pt").split()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_damage_and_takes_a_whole_file(command: str, files: Path, cli: Cli) -> None:
    before = sorted(os.listdir(files))
    ran = cli(*arguments(command))
    assert ran.code == 3, ran.err
    assert "in.pt: the bytes of '" in ran.err
    assert ("head.weight'" if command == "rename-keys" else "fc.weight'") in ran.err
    assert "do not match their checksum" in ran.err
    assert "ckpttool verify in.pt" in ran.err
    assert sorted(os.listdir(files)) == before
    assert cli(*arguments(command), "--no-verify").code == 0
    (files / "in.pt").write_bytes((files / "whole.pt").read_bytes())
    assert cli(*arguments(command), "--verify", "--force").code == 0


@pytest.mark.parametrize("command", ["digest in.pt", "diff in.pt whole.pt", "diff whole.pt in.pt"])
def test_damage_is_refused_by_commands_that_only_read(command: str, files: Path, cli: Cli) -> None:
    ran = cli(*command.split())
    assert ran.code == 3, ran.err
    assert "in.pt: the bytes of 'module.fc.weight' do not match their checksum" in ran.err
    assert cli(*command.split(), "--no-verify").code == (1 if command.startswith("diff") else 0)


def test_the_old_output_stays_whole(files: Path, cli: Cli) -> None:
    (files / "out.pt").write_bytes(b"old")
    assert cli("strip-prefix", "in.pt", "out.pt", "--force").code == 3
    assert (files / "out.pt").read_bytes() == b"old"
    damaged = (files / "in.pt").read_bytes()
    assert cli("strip-prefix", "in.pt", "in.pt", "--force").code == 3
    assert (files / "in.pt").read_bytes() == damaged


def test_damage_in_what_is_not_written_is_no_reason_to_refuse(files: Path, cli: Cli) -> None:
    assert cli("convert", "in.pt", "out.pt", "--only", "*long", "--drop", "optimizer").code == 0
    assert cli("convert", "in.pt", "other.safetensors", "--exclude", "*fc.weight").code == 0


def test_a_dry_run_reads_no_values_unless_it_is_asked_to_verify(files: Path, cli: Cli) -> None:
    assert cli("strip-prefix", "in.pt", "out.pt", "--dry-run").code == 0
    assert cli("strip-prefix", "in.pt", "out.pt", "--dry-run", "--verify").code == 3


@pytest.mark.parametrize("command", [*list(COMMANDS)[:2], "convert --dtype", "average, last"])
def test_a_file_without_checksums_is_not_damaged(command: str, files: Path, cli: Cli) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        damage(saved(RUN, files / "in.pt"), WEIGHT)
    finally:
        torch.serialization.set_crc32_options(True)
    assert cli(*arguments(command)).code == 0


LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "turned": lambda t: {"w": t.t()},
    "a row": lambda t: {"w": t[7]},
    "every other": lambda t: {"w": t[:, ::2]},
    "rows of one storage": lambda t: {"a": t[:100], "w": t[100:200], "c": t[200:]},
    "tied": lambda t: {"w": t, "v": t},
    "a view of a part": lambda t: {"w": t[100:200, 5:]},
    "a parameter": lambda t: {"w": torch.nn.Parameter(t)},
}


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_found_whatever_part_of_a_storage_is_read(layout: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    saved(LAYOUTS[layout](WEIGHT), path)
    with ckpttool.open(path) as checkpoint:
        ckpttool.save(checkpoint, tmp_path / f"whole{ending}")
    damage(path, WEIGHT)
    with ckpttool.open(path) as checkpoint, pytest.raises(Damaged, match="do not match their checksum"):
        ckpttool.save(checkpoint, tmp_path / f"out{ending}")
    assert not (tmp_path / f"out{ending}").exists()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_every_byte_of_a_large_tensor_counts(place: str, tmp_path: Path) -> None:
    path = saved({"long": LONG}, tmp_path / "in.pt")
    raw = bytearray(path.read_bytes())
    start, nbytes = raw.index(LONG.numpy().tobytes()), LONG.nbytes
    raw[start + {"first": 0, "middle": nbytes // 2, "last": nbytes - 1}[place]] ^= 1
    path.write_bytes(raw)
    for ending in (".safetensors", ".pt"):
        with ckpttool.open(path) as checkpoint, pytest.raises(Damaged, match="'long'"):
            ckpttool.save(checkpoint, tmp_path / f"out{ending}")


def test_shards_and_dcp_folders_are_held_to_the_checksums_of_their_files(files: Path, cli: Cli) -> None:
    for kind, part in (("torch-sharded", "pytorch_model-*.bin"), ("dcp", "__0_0.distcp")):
        assert cli("convert", "whole.pt", f"{kind}/", "--to", kind).code == 0
        (file,) = (files / kind).glob(part)
        damage(file, WEIGHT)
        which = ["--state", "model"] if kind == "dcp" else []
        ran = cli("convert", f"{kind}/", f"from-{kind}.safetensors", *which)
        assert ran.code == 3, ran.err
        assert f"{file.relative_to(files)}: the bytes of" in ran.err
        assert not (files / f"from-{kind}.safetensors").exists()


def test_a_torchscript_archive_is_held_to_its_checksums(tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(WEIGHT.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    torch.jit.script(Layer()).save(tmp_path / "in.pt")
    damage(tmp_path / "in.pt", WEIGHT)
    with ckpttool.open(tmp_path / "in.pt") as checkpoint, pytest.raises(Damaged, match="'weight'"):
        ckpttool.save(checkpoint, tmp_path / "out.safetensors")


def test_a_checkpoint_can_be_saved_twice_and_to_two_places(tmp_path: Path) -> None:
    path = saved(STATE, tmp_path / "in.pt")
    with ckpttool.open(path) as checkpoint:
        new, _ = strip_prefix(checkpoint)
        for name in ("a.pt", "b.safetensors", "a.pt"):
            ckpttool.save(new, tmp_path / name, force=True)
    damage(path, WEIGHT)
    with ckpttool.open(path) as checkpoint:
        for name in ("c.pt", "d.safetensors"):
            with pytest.raises(Damaged):
                ckpttool.save(checkpoint, tmp_path / name)
        ckpttool.save(checkpoint, tmp_path / "e.pt", verify=False)


def test_damage_sent_to_standard_output_is_not_sent(files: Path, process: Callable[..., Any]) -> None:
    ran = process("strip-prefix", "in.pt", "-")
    assert (ran.returncode, ran.stdout) == (3, b"")


def test_statistics_of_damaged_values_are_refused_unless_asked_for(files: Path, cli: Cli) -> None:
    ran = cli("inspect", "in.pt", "--stats")
    assert ran.code == 3
    assert "do not match their checksum" in ran.err
    assert cli("inspect", "in.pt", "--stats", "--no-verify").code == 0
    assert cli("inspect", "in.pt").code == 0  # values are not read


def test_verify_lists_the_damage_of_its_file_and_refuses_a_damaged_other(files: Path, cli: Cli) -> None:
    ran = cli("verify", "in.pt", "--against", "whole.pt", "--json")
    assert ran.code == 1
    assert {problem["kind"] for problem in ran.json["problems"]} == {"checksum", "values"}
    other = cli("verify", "whole.pt", "--against", "in.pt")
    assert other.code == 3
    assert "in.pt" in other.err


def test_only_the_bytes_between_views_are_read_again(tmp_path: Path) -> None:
    whole = torch.arange(1_000_000.0)
    path = tmp_path / "views.pt"
    torch.save({"a": whole[1:400_000], "b": whole[400_002:-3]}, path)
    raw = bytearray(path.read_bytes())
    at = raw.index(whole[400_000:400_002].numpy().tobytes())
    for damaged in (False, True):
        raw[at] ^= damaged
        path.write_bytes(raw)
        with ckpttool.open(path) as checkpoint:
            read: list[int] = []
            checkpoint.source.observers.append(lambda _, data, read=read: read.append(len(data)))
            with Checksums(checkpoint, checkpoint.storages()) as checksums:
                for _, tensor in checkpoint.tensors():
                    for _ in stream(tensor):
                        pass
                with pytest.raises(Damaged) if damaged else nullcontext():
                    checksums.finish()
            assert sum(read) == whole.nbytes


# ---- Where values are read for use


class Layers(torch.nn.Module):
    """A model of STATE."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(300, 300, bias=False)
        self.long = torch.nn.Parameter(torch.zeros(LONG.shape))
        self.bias = torch.nn.Parameter(torch.zeros(50))


def loaded(path: Path, verify: bool) -> object:
    with ckpttool.open(path) as checkpoint:
        return checkpoint.state().load(verify=verify)


def arrays(path: Path, verify: bool) -> object:
    with ckpttool.open(path) as checkpoint:
        return [tensor.numpy(verify=verify) for tensor in checkpoint.state().tensors.values()]


def reloaded(path: Path, verify: bool) -> object:
    return ckpttool.reload(path, Layers(), verify=verify)


def assigned(path: Path, verify: bool) -> object:
    return ckpttool.reload(path, Layers(), assign=True, verify=verify)


def diagnosed(path: Path, verify: bool) -> object:
    return ckpttool.doctor(path, Layers(), verify=verify)


def in_pt(folder: Path) -> tuple[Path, Path]:
    return folder / "in.pt", folder / "in.pt"


def in_shards(folder: Path) -> tuple[Path, Path]:
    ckpttool.convert(folder / "whole.pt", folder / "shards", to="torch-sharded", shard_size=500_000)
    (damaged,) = [p for p in (folder / "shards").glob("*.bin") if WEIGHT.numpy().tobytes() in p.read_bytes()]
    return folder / "shards", damage(damaged, WEIGHT)


def in_dcp(folder: Path) -> tuple[Path, Path]:
    saved(STATE, folder / "alone.pt")
    ckpttool.convert(folder / "alone.pt", folder / "dcp", to="dcp")
    return folder / "dcp", damage(folder / "dcp" / "__0_0.distcp", WEIGHT)


def in_delta(folder: Path) -> tuple[Path, Path]:
    saved({**STATE, "module.fc.weight": WEIGHT + torch.rand(300, 300)}, folder / "new.pt")
    saved(STATE, folder / "base.pt")
    ckpttool.delta(folder / "base.pt", folder / "new.pt", folder / "d.safetensors")
    raw = bytearray((folder / "d.safetensors").read_bytes())
    raw[-5] ^= 4
    (folder / "d.safetensors").write_bytes(raw)
    return Path(f"{folder}/base.pt+{folder}/d.safetensors"), folder / "d.safetensors"


def in_base(folder: Path) -> tuple[Path, Path]:
    saved({**STATE, "module.fc.weight": WEIGHT + 1}, folder / "new.pt")
    saved(STATE, folder / "base.pt")
    ckpttool.delta(folder / "base.pt", folder / "new.pt", folder / "d.safetensors")
    return Path(f"{folder}/base.pt+{folder}/d.safetensors"), damage(folder / "base.pt", LONG)


def in_arrays(folder: Path) -> tuple[Path, Path]:
    np.savez(folder / "in.npz", **{name: tensor.numpy() for name, tensor in STATE.items()})  # type: ignore[arg-type]
    return folder / "in.npz", damage(folder / "in.npz", WEIGHT)


USES = (loaded, arrays, reloaded, assigned, diagnosed)
PLACES = (in_pt, in_shards, in_dcp, in_delta, in_base, in_arrays)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_values_are_compared_with_their_checksums_where_they_are_used(
    use: Callable[[Path, bool], object], place: Callable[[Path], tuple[Path, Path]], files: Path
) -> None:
    path, damaged = place(files)
    with pytest.raises(Damaged) as caught:
        use(path, True)
    assert caught.value.path == str(damaged)
    if place not in (in_delta, in_base):  # the values that a delta makes are never given out unseen
        use(path, False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_view_the_whole_storage_is_compared(layout: str, tmp_path: Path) -> None:
    path = saved(LAYOUTS[layout](WEIGHT), tmp_path / "in.pt")
    arrays(path, True)
    damage(path, WEIGHT)
    for use in (loaded, arrays):
        with pytest.raises(Damaged, match="do not match their checksum"):
            use(path, True)
        use(path, False)


def test_a_storage_is_read_once_however_often_and_in_whatever_parts_it_is_used(tmp_path: Path) -> None:
    path = saved({f"{n}": row for n, row in enumerate(WEIGHT)}, tmp_path / "in.pt")
    with ckpttool.open(path) as checkpoint:
        read: list[int] = []
        checkpoint.source.observers.append(lambda _, data: read.append(len(data)))
        state = checkpoint.state()
        for _ in range(2):
            for tensor in state.tensors.values():
                tensor.numpy()
        assert sum(read) <= WEIGHT.nbytes + 2 * WEIGHT.nbytes
        before = sum(read)
        state.load()
        assert sum(read) == before  # mapped, and compared already


def test_a_model_keeps_its_values_when_the_file_is_damaged(files: Path) -> None:
    model = Layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Damaged):
        ckpttool.reload(files / "in.pt", model)
    assert_same(dict(model.state_dict()), before)


def test_doctor_and_reload_of_a_damaged_file_print_no_command_that_would_fail(files: Path, cli: Cli) -> None:
    spec = f"{__file__}:Layers"
    for command in ("reload", "doctor"):
        ran = cli(command, "in.pt", "--model", spec)
        assert (ran.code, ran.out) == (3, ""), ran.err
        assert "ckpttool verify in.pt" in ran.err
        assert cli(command, "in.pt", "--model", spec, "--no-verify").code == (command == "doctor")
    assert cli("doctor", "in.pt", "--like", "whole.pt").code == 3


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_file_without_checksums_is_used_as_it_is(use: Callable[[Path, bool], object], files: Path) -> None:
    for path in (files / "old.pt", files / "plain.safetensors"):
        if path.suffix == ".pt":
            torch.save(STATE, path, _use_new_zipfile_serialization=False)
        else:
            save_file(STATE, path)
        use(damage(path, WEIGHT), True)


def test_damage_behind_4_gib_is_found(tmp_path: Path) -> None:
    path, gap = saved(STATE, tmp_path / "in.pt"), 5 << 30
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "far.pt", "w", allowZip64=True) as new:
        pickle, *others = old.infolist()
        new.writestr(pickle.filename, old.read(pickle))
        assert new.fp is not None
        new.start_dir = new.fp.seek(gap)  # a hole: it takes no room
        for record in others:
            new.writestr(record.filename, old.read(record))
    assert len(loaded(tmp_path / "far.pt", True)) == 3  # type: ignore[arg-type]
    with open(tmp_path / "far.pt", "r+b") as file:
        file.seek(gap)
        rest = file.read()
        at = gap + rest.index(WEIGHT.numpy().tobytes())
        file.seek(at + 1000)
        file.write(b"\xff")
    for use in USES:
        with pytest.raises(Damaged, match=r"far\.pt: the bytes of"):
            use(tmp_path / "far.pt", True)
