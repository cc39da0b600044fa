"""What is verified: every byte of a checkpoint, another file's contents, and the record of a run."""

from __future__ import annotations

import importlib
import os
import pickle
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.checkpoint.checkpoint import Checkpoint
from ckpttool.core.formats.pytorch.zip_entries import read_directory
from ckpttool.errors import CkptToolError, Damaged, NoState, Refused
from ckpttool.proving import replay
from ckpttool.verifying.verify import Verified, verify
from tests.support.crafting import dict_of, storage, tensor, torch_zip
from tests.support.run_log import BEGIN, STEP, record
from tests.support.running import Cli

# ---- Every byte of a checkpoint is read: checksums, non-finite values, and another file's contents ----


base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
STATE = {"w": base, "row": base[1], "n": torch.tensor(7), "e": torch.empty(0), "own": torch.ones(3).half()}


def opened(value: Any, folder: Path, name: str = "in.pt") -> Checkpoint:
    torch.save(value, folder / name)
    return ckpttool.open(folder / name)


def problems(found: Verified) -> list[tuple[str, str]]:
    return [(problem.kind, problem.name) for problem in found.problems]


# Checksums.


def test_an_intact_file_is_ok_and_every_byte_is_read(tmp_path: Path) -> None:
    found = verify(opened({"model": STATE, "epoch": 3}, tmp_path))
    assert found.ok
    assert (found.unsummed, found.non_finite) == (0, {})
    with zipfile.ZipFile(tmp_path / "in.pt") as archive:
        assert found.checked_bytes == sum(info.file_size for info in archive.infolist())


def payload_bytes(path: Path) -> dict[str, range]:
    """The place of each record's bytes in the file."""
    with ckpttool.open(path) as checkpoint:
        records = read_directory(checkpoint.source).values()
        return {r.name: range(r.data.offset, r.data.offset + r.data.nbytes) for r in records}


def with_a_flipped_bit(path: Path, position: int, bit: int) -> Path:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    flipped = path.parent / f"flipped{path.suffix}"
    flipped.write_bytes(raw)
    return flipped


def is_found_wrong(path: Path) -> bool:
    try:
        with ckpttool.open(path) as checkpoint:
            return not verify(checkpoint).ok
    except CkptToolError:  # the pickle's checksum is checked when the file is opened
        return True


@given(st.data())
def test_every_flipped_bit_of_a_payload_is_found(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.pt"
        torch.save({"model": STATE, "epoch": 3}, path)
        places = [position for record in payload_bytes(path).values() for position in record]
        position = data.draw(st.sampled_from(places))
        assert is_found_wrong(with_a_flipped_bit(path, position, data.draw(st.integers(0, 7))))


def test_a_bit_flipped_in_a_storage_is_reported_under_the_tensor_name(tmp_path: Path) -> None:
    opened(STATE, tmp_path).close()
    for stored, name in (("in/data/0", "w"), ("in/data/1", "n"), ("in/data/3", "own")):
        for position in payload_bytes(tmp_path / "in.pt")[stored]:
            found = verify(ckpttool.open(with_a_flipped_bit(tmp_path / "in.pt", position, position % 8)))
            assert problems(found) == [("checksum", name)]
            assert "do not match their checksum" in found.problems[0].message


def test_every_record_is_checked_even_if_no_tensor_uses_it(tmp_path: Path) -> None:
    more = {"archive/data/7": b"spare storage", "archive/code/x.py": b"pass", "archive/.data/id": b"1"}
    path = torch_zip(tmp_path / "in.pt", dict_of({"w": tensor(storage())}), {"0": bytes(16)}, more=more)
    assert verify(ckpttool.open(path)).ok
    for stored in (*more, "archive/version"):
        position = payload_bytes(path)[stored][0]
        found = verify(ckpttool.open(with_a_flipped_bit(path, position, 3)))
        # A changed version is also one that torch does not write.
        wrong = [name for kind, name in problems(found) if kind == "checksum"]
        assert wrong == [f"record {stored}"]


@pytest.mark.parametrize("record", ["archive/data.pkl", "archive/byteorder"])
def test_records_that_opening_reads_are_checked_when_the_file_is_opened(record: str, tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "in.pt", dict_of({"w": tensor(storage())}), {"0": bytes(16)})
    for position in payload_bytes(path)[record]:
        with pytest.raises(Damaged):
            ckpttool.open(with_a_flipped_bit(path, position, 0))


def test_every_byte_of_a_compressed_file_is_checked(tmp_path: Path) -> None:
    spare: dict[str, Any] = {"more": {"archive/spare": b"abc" * 100}, "compression": zipfile.ZIP_DEFLATED}
    path = torch_zip(tmp_path / "in.pt", dict_of({"w": tensor(storage())}), {"0": bytes(16)}, **spare)
    assert verify(ckpttool.open(path)).ok
    where = payload_bytes(path)["archive/spare"]
    found = [verify(ckpttool.open(with_a_flipped_bit(path, at, 1))).ok for at in where]
    assert not any(found)


def test_a_view_of_a_storage_does_not_hide_the_rest_of_it(tmp_path: Path) -> None:
    opened({"row": base[1]}, tmp_path).close()
    last = payload_bytes(tmp_path / "in.pt")["in/data/0"][-1]
    flipped = ckpttool.open(with_a_flipped_bit(tmp_path / "in.pt", last, 7))
    assert problems(verify(flipped)) == [("checksum", "row")]


def test_files_without_checksums_say_how_many_bytes_no_checksum_covers(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        found = verify(opened(STATE, tmp_path))
    finally:
        torch.serialization.set_crc32_options(True)
    assert found.ok
    assert found.unsummed == 3  # of four storages one has no byte
    save_file({"w": base, "e": torch.empty(0)}, tmp_path / "f.safetensors")
    assert verify(ckpttool.open(tmp_path / "f.safetensors")).unsummed == 1
    torch.save(STATE, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert verify(ckpttool.open(tmp_path / "legacy.pt")).unsummed == 3


def test_each_shard_of_torch_is_checked(tmp_path: Path) -> None:
    checkpoint = opened({"a": base, "b": base + 1}, tmp_path)
    ckpttool.save(checkpoint, tmp_path / "out", to="torch-sharded", shard_size=100)
    assert verify(ckpttool.open(tmp_path / "out")).ok
    shard = sorted((tmp_path / "out").glob("*.bin"))[1]
    position = payload_bytes(shard)[f"{shard.stem}/data/0"][5]
    with_a_flipped_bit(shard, position, 2).rename(shard)
    assert problems(verify(ckpttool.open(tmp_path / "out"))) == [("checksum", "b")]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_each_flipped_bit_of_a_zip_is_found_or_its_byte_is_counted(seed: int, tmp_path: Path) -> None:
    """The bytes that may change unseen are no more than the count of those that no checksum covers."""
    torch.save({"w": torch.arange(5.0), "b": torch.ones(3)}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        free = verify(checkpoint).free
    assert set(free) == {"header fields"}
    size = (tmp_path / "in.pt").stat().st_size
    bits = np.random.default_rng(seed).integers(0, 8, size)
    flipped = (with_a_flipped_bit(tmp_path / "in.pt", at, bits[at]) for at in range(size))
    unseen = [at for at, path in enumerate(flipped) if not is_found_wrong(path)]
    assert len(unseen) <= sum(free.values()) < size / 10


def test_padding_and_descriptors_are_checked(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5.0)}, tmp_path / "in.pt")
    raw = (tmp_path / "in.pt").read_bytes()
    for place in (raw.index(b"ZZZZ") + 1, raw.index(b"PK\x07\x08") + 5):
        found = verify(ckpttool.open(with_a_flipped_bit(tmp_path / "in.pt", place, 0)))
        assert [problem.kind for problem in found.problems] == ["frame"]


def test_what_no_checksum_covers_is_counted_in_every_format(tmp_path: Path) -> None:
    checkpoint = opened({"w": base}, tmp_path)
    ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    ckpttool.save(checkpoint, tmp_path / "out.pt")
    assert set(verify(ckpttool.open(tmp_path / "out.pt")).free) == {"header fields"}
    found = verify(ckpttool.open(tmp_path / "out.safetensors")).free
    size = (tmp_path / "out.safetensors").stat().st_size
    assert found == {"values": 96, "contents": size - 96}
    torch.save({"w": base}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    found = verify(ckpttool.open(tmp_path / "legacy.pt")).free
    assert sum(found.values()) == (tmp_path / "legacy.pt").stat().st_size


def test_bytes_hidden_between_records_and_behind_the_zip_are_counted(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "in.pt", dict_of({"w": tensor(storage())}), {"0": bytes(16)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"a secret"
    assert verify(ckpttool.open(path)).free["comments"] == len(b"a secret")


def test_a_file_that_is_cut_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    checkpoint = opened({"w": torch.zeros(100_000)}, tmp_path)
    with open(tmp_path / "in.pt", "r+b") as file:
        file.truncate(50_000)
    with pytest.raises(Damaged, match="became shorter"):
        verify(checkpoint)


def test_progress_counts_the_bytes_of_every_pass(tmp_path: Path) -> None:
    state = {"a": torch.ones(100), "n": torch.ones(30, dtype=torch.int64)}
    moved: list[int] = []
    checkpoint = opened(state, tmp_path)
    verify(checkpoint, progress=moved.append)
    assert sum(moved) == 400 + 240  # read once, for checksums and for NaN
    moved.clear()
    verify(checkpoint, against=checkpoint, progress=moved.append)
    assert sum(moved) == 2 * (400 + 240)


# Non-finite values.


nan, inf = float("nan"), float("inf")
ODD = torch.tensor([1.0, nan, inf, -inf, -0.0, 3.0])
KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_non_finite_values_are_counted_and_a_problem_if_asked(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = opened({"w": ODD.to(dtype), "fine": torch.ones(2), "n": torch.tensor(3)}, tmp_path)
    found = verify(checkpoint)
    assert found.ok
    assert found.non_finite == {"w": 3}
    assert problems(verify(checkpoint, finite=True)) == [("non-finite", "w")]


def test_non_finite_values_that_count_are_those_of_each_view_of_each_tensor(tmp_path: Path) -> None:
    kinds = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz")  # without infinities
    model = {name: torch.tensor([1.0, nan, -2.0]).to(getattr(torch, name)) for name in kinds}
    model["z"] = torch.complex(torch.tensor([nan, 1.0, inf]), torch.tensor([nan, inf, 2.0]))
    views = {"part": ODD[3:], "turned": torch.stack([ODD, ODD]).t()[:2], "parameter": torch.nn.Parameter(ODD)}
    wide, twice = ODD.expand(1 << 20, 6), torch.tensor([[nan], [1.0]])
    views |= {"wide": wide, "huge": twice.expand(1 << 10, 2, 1 << 30)}
    found = verify(opened({"model": model, "other": {0: views}, "rng": torch.ones(3)}, tmp_path)).non_finite
    wanted = {f"model.{name}": 1 for name in kinds} | {"model.z": 4}
    counts = {"part": 1, "turned": 2, "parameter": 3, "wide": 3 << 20, "huge": 1 << 40}
    assert found == wanted | {f"other.0.{name}": count for name, count in counts.items()}


def test_a_tensor_of_two_names_is_read_once_and_named_twice(tmp_path: Path) -> None:
    read: list[int] = []
    checkpoint = opened({"a": ODD, "b": ODD}, tmp_path)
    found = verify(checkpoint, progress=read.append)
    assert found.non_finite == {"a": 3, "b": 3}
    assert sum(read) == ODD.nbytes


def test_an_overlapping_view_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    checkpoint = opened({"w": torch.as_strided(ODD, (3, 3), (1, 1))}, tmp_path)
    assert verify(checkpoint).non_finite.keys() == {"w"}
    monkeypatch.setattr(importlib.import_module("ckpttool.verifying.verify"), "MAX_REPEATED", 1)
    with pytest.raises(Refused, match="'w' is a view that expands"):
        verify(checkpoint)


def test_big_endian_values_are_read_in_their_byte_order(tmp_path: Path) -> None:
    numbers = np.array([np.nan, np.inf, 1.0, 2.0], ">f4").tobytes()
    path = torch_zip(tmp_path / "in.pt", dict_of({"w": tensor(storage())}), {"0": numbers}, byteorder="big")
    assert verify(ckpttool.open(path)).non_finite == {"w": 2}


# Against another file.


DIFFERENCES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], list[tuple[str, str]]]] = {
    "a name": (lambda s: s.update(m=s.pop("n")), [("only-here", "n"), ("only-there", "m")]),
    "a shape": (lambda s: s.update(w=s["w"].reshape(6, 4)), [("form", "w")]),
    "values of a view": (lambda s: s["w"][1].add_(1), [("values", "w"), ("values", "row")]),
    "all at once": (
        lambda s: s.update(x=s.pop("n"), own=s["own"] + 1, w=s["w"].double()),
        [("only-here", "n"), ("only-there", "x"), ("form", "w"), ("values", "own")],
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_each_difference_is_reported_by_name(what: str, tmp_path: Path) -> None:
    change, wanted = DIFFERENCES[what]
    checkpoint = opened(STATE, tmp_path)
    other = torch.load(tmp_path / "in.pt")
    change(other)
    assert problems(verify(checkpoint, against=opened(other, tmp_path, "other.pt"))) == wanted


def test_a_state_of_one_file_is_compared_with_a_file_that_is_that_state(tmp_path: Path) -> None:
    whole = opened({"model": {"w": base}, "ema": {"w": base + 1}}, tmp_path)
    part = opened({"w": base + 1}, tmp_path, "part.pt")
    assert verify(whole, against=part, state="ema").ok
    assert verify(part, against=whole, state="ema").ok
    assert problems(verify(part, against=whole)) == [("values", "w")]


def test_a_state_that_neither_file_has_is_refused(tmp_path: Path) -> None:
    checkpoint, other = opened(STATE, tmp_path), opened(STATE, tmp_path, "other.pt")
    with pytest.raises(NoState, match="no state named 'ema'"):
        verify(checkpoint, against=other, state="ema")


# When both files hold more than a state, everything is compared.

GROUPS = [{"lr": 0.1, "betas": (0.9, 0.99)}]
OPTIMIZER = {"state": {0: {"m": base + 1}}, "param_groups": GROUPS}
TRAINING = {"model": OrderedDict({"w": base}), "optimizer": OPTIMIZER, "epoch": 3, "seen": {"a", "b"}}


def change_momentum(tree: dict[str, Any]) -> None:
    tree["optimizer"]["state"][0]["m"] = base + 2


TRAINING_DIFFERENCES: dict[str, tuple[Callable[[dict[str, Any]], Any], list[tuple[str, str]]]] = {
    "nothing": (lambda tree: None, []),
    "a counter": (lambda tree: tree.update(epoch=4), [("values", "epoch")]),
    "an entry more": (lambda tree: tree.update(best=0.5), [("only-there", "best")]),
    "a momentum": (change_momentum, [("values", "optimizer.state.0.m")]),
}


@pytest.mark.parametrize("what", TRAINING_DIFFERENCES)
@pytest.mark.parametrize("format", ["out.pt", "out.safetensors"])
def test_two_training_checkpoints_are_compared_whole(format: str, what: str, tmp_path: Path) -> None:
    change, wanted = TRAINING_DIFFERENCES[what]
    checkpoint = opened(TRAINING, tmp_path)
    other = torch.load(tmp_path / "in.pt")
    change(other)
    ckpttool.save(opened(other, tmp_path, "other.pt"), tmp_path / format, full=True)
    found = verify(checkpoint, against=ckpttool.open(tmp_path / format))
    assert (found.compared, problems(found)) == ("everything", wanted)


def test_a_named_state_and_a_file_of_a_state_alone_are_compared_as_states(tmp_path: Path) -> None:
    checkpoint = opened(TRAINING, tmp_path)
    other = opened({**TRAINING, "epoch": 4}, tmp_path, "other.pt")
    alone = opened(TRAINING["model"], tmp_path, "alone.pt")
    assert verify(checkpoint, against=other, state="model").compared == "state"
    assert verify(checkpoint, against=other, state="model").ok
    assert verify(checkpoint, against=alone).ok


def test_names_that_differ_only_in_a_prefix_come_with_the_command_that_strips_it(tmp_path: Path) -> None:
    plain = opened({"w": base, "b": base + 1}, tmp_path, "plain one.pt")
    wrapped = opened({"module.w": base, "module.b": base + 1}, tmp_path, "a b.pt")
    command = f"ckpttool strip-prefix '{tmp_path}/a b.pt' plain.safetensors --prefix module."
    assert str(verify(plain, against=wrapped).hint).endswith(command)
    assert str(verify(wrapped, against=plain).hint).endswith(command)
    assert verify(plain, against=opened({"module.w": base}, tmp_path)).hint is None
    assert verify(plain, against=plain).hint is None


ONE = {"model": {"w": torch.ones(1)}}
FORM = ("form", "w", "float32 [4, 6], there float64 [4, 6]")
TWO = {**ONE, "x": {"k": 1.0}, "x.k": 2.0}  # two paths of one name


@pytest.mark.parametrize(
    ("mine", "theirs", "wanted"),
    [
        ({"w": base}, {"w": base.double()}, [FORM]),
        ({"epoch": 1}, {"w": base}, [("only-here", "epoch", ""), ("only-there", "w", "")]),
        (TWO, {**TWO, "x.k": 3.0}, [("values", "x.k", "2.0, there 3.0")]),
        ({**ONE, "epoch": 3, "loops": {}}, {**ONE, "epoch": 3}, [("only-here", "loops", "")]),
    ],
    ids=["a form", "a state", "one of two paths", "an empty dict"],
)
def test_what_differs_is_said(mine: Any, theirs: Any, wanted: Any, tmp_path: Path) -> None:
    found = verify(opened(mine, tmp_path), against=opened(theirs, tmp_path, "other.pt")).problems
    assert [(p.kind, p.name, p.message if p.kind in ("form", "values") else "") for p in found] == wanted


def test_records_that_nothing_refers_to_are_named_with_no_code(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "empty": torch.ones(0)}, tmp_path / "m.pt")
    assert verify(ckpttool.open(tmp_path / "m.pt"), no_code=True).ok
    with zipfile.ZipFile(tmp_path / "m.pt", "a") as archive:
        archive.writestr("m/evil.pkl", pickle.dumps(print))
        archive.writestr("m/data/99", b"anything else")
    found = verify(ckpttool.open(tmp_path / "m.pt"), no_code=True)
    assert {(problem.kind, problem.name, problem.message) for problem in found.problems} == {
        ("code", "record m/evil.pkl", "is a pickle that nothing in the file refers to"),
        ("code", "record m/data/99", "is a record that nothing in the file refers to"),
    }
    assert verify(ckpttool.open(tmp_path / "m.pt")).ok


# ---- A record of a run that was damaged, or made by somebody else, is refused in words, by line and field


def without(entry: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != name}


@pytest.mark.parametrize("name", [key for key in BEGIN if key != "kind"])
def test_a_field_that_is_missing_is_named(name: str, cli: Cli, tmp_path: Path) -> None:
    folder = record(tmp_path, without(BEGIN, name), STEP)
    for flags in (["--no-replay"], ["--dry-run", "--from", "0"]):
        ran = cli("prove", folder, *flags)
        assert ran.code == 3
        said = f"line 1 is no entry of a run: 'begin' lacks '{name}'\n"
        assert ran.err.startswith(f"error: {folder}/run.jsonl: {said}")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (without(STEP, "weights"), "'step' lacks 'weights'"),
        ({**STEP, "samples": [1]}, "'samples' of 'step' is a list"),
        ({**STEP, "step": "2"}, "'step' of 'step' is a str"),
        ({**STEP, "step": True}, "'step' of 'step' is a bool"),
        ({"kind": "checkpoint", "step": 2, "digests": 7}, "'digests' of 'checkpoint' is a int"),
        ({"kind": "epoch", "step": 2, "epoch": 1}, "'epoch' lacks 'plan'"),
        ({**BEGIN, "source": {"step": 1}}, "'source' of 'begin' lacks 'digests'"),
    ],
)
def test_an_entry_of_other_form_is_named(entry: dict[str, Any], said: str, cli: Cli, tmp_path: Path) -> None:
    ran = cli("prove", record(tmp_path, BEGIN, entry), "--no-replay")
    assert ran.code == 3
    assert f"run.jsonl: line 2 is no entry of a run: {said}\n" in ran.err


def test_entries_of_other_kinds_are_left_alone(cli: Cli, tmp_path: Path) -> None:
    folder = record(tmp_path, BEGIN, STEP, {"kind": "note", "text": "mine"}, {"kind": ["x"], "step": 1})
    assert cli("prove", folder, "--no-replay").code == 0


TRAINER = """
import pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
for step in range(1, 4):
    with open(out / "run.jsonl", "a") as file:
        file.write('{"n": 1, "prev": "", "kind": "step", "step": %d}\\n' % (2 * step))
    time.sleep(0.3)
print("error: nothing can be replayed here", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def replayed_by(tmp_path: Path, monkeypatch: MonkeyPatch) -> Callable[[str], replay.Replay]:
    """Return a function that makes a replay by a program in place of the trainer's."""
    monkeypatch.setattr(replay, "POLL", 0.05)
    program = tmp_path / "train" / "main.py"
    program.parent.mkdir()

    def of(source: str) -> replay.Replay:
        program.write_text(source)
        return replay.Replay(start=0, program=str(program))

    return of


def test_a_replay_shows_how_far_it_is_and_why_it_ended(replayed_by: Any, tmp_path: Path) -> None:
    folder = record(tmp_path, BEGIN, STEP, {**STEP, "step": 6})
    seen: list[tuple[int, int]] = []
    proved = ckpttool.prove(folder, replay=replayed_by(TRAINER), progress=lambda *steps: seen.append(steps))
    (finding,) = proved.findings
    assert finding.message == "the replay ended with exit code 3: nothing can be replayed here"
    assert {(2, 6), (4, 6), (6, 6)} <= {*seen}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_interrupted_replay_leaves_no_trainer_behind(replayed_by: Any, tmp_path: Path) -> None:
    def interrupt(done: int, of: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    says = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    again = replayed_by(f"import os, pathlib, time\n{says}\ntime.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        ckpttool.prove(record(tmp_path, BEGIN, STEP), replay=again, progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
