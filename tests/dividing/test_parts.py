"""Outputs that several processes write: the bytes of one process, and nothing before all is there."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.files import copying, meeting, parts
from tests.support.range_server import RangeServer
from tests.support.running import Cli, assert_says
from tests.support.writing_jobs import (
    JOBS,
    OTHERS,
    STACKING,
    inputs,
    run,
    write_adapter,
    write_gptq,
    write_packed,
)

Write = Callable[..., None]
__all__ = ["inputs"]  # a fixture
pytestmark = pytest.mark.usefixtures("small_blocks")


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of an output's files by name; nothing may lie beside it."""
    files = sorted(path.rglob("*"))
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


@pytest.fixture
def folders(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Return folders for the output of one process and of parts, from both of which the inputs are seen."""
    both = tmp_path / "one", tmp_path / "parts"
    for each in both:
        each.mkdir()
    monkeypatch.chdir(inputs)
    yield both


COUNTS = (1, 2, 3, 7)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("words", JOBS.values(), ids=JOBS)
def test_the_bytes_are_those_of_one_process(
    words: str, count: int, folders: tuple[Path, Path], cli: Cli
) -> None:
    alone, divided = folders
    assert run(cli, words, alone).code == 0
    for number in random.Random(count).sample(range(1, count + 1), count):
        assert not [name for name in os.listdir(divided) if name.startswith("out")]
        ran = run(cli, words, divided, "--part", f"{number}/{count}", "--json")
        assert ran.code == 0, ran
    assert "part" not in ran.json and ran.json["bytes"] > 0
    assert contents(divided) == contents(alone)


TYPES = [torch.float32, torch.float16, torch.bool, torch.int64, torch.float64]
STATES = st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 40), max_size=3)), max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    shapes=STATES,
    count=st.sampled_from([1, 2, 3, 7, 50]),
    out=st.sampled_from(["o.pt", "o.safetensors", "o/"]),
)
def test_any_checkpoint_in_any_number_of_parts(
    shapes: list[tuple[torch.dtype, list[int]]], count: int, out: str, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    state = {f"t{n}": torch.ones(shape, dtype=dtype) * n for n, (dtype, shape) in enumerate(shapes)}
    torch.save(state, folder / "in.pt")
    for name in ("one", "parts"):
        (folder / name).mkdir()
    given: dict[str, Any] = {"shard_size": 3000} if out == "o/" else {}
    with ckpttool.open(folder / "in.pt") as checkpoint:
        ckpttool.save(checkpoint, f"{folder}/one/{out}", **given)
        for number in range(count, 0, -1):
            ckpttool.save(checkpoint, f"{folder}/parts/{out}", part=f"{number}/{count}", **given)
    assert contents(folder / "parts") == contents(folder / "one")


Made = Callable[[Path, Callable[[Any], Any]], str]


def of_shapes(folder: Path, draw: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """Write random tensors as in.pt, and as in.safetensors without their prefix."""
    drawn = enumerate(draw(STATES))
    state = {f"t{n}.w": torch.ones(shape, dtype=dtype) * (n + 1) for n, (dtype, shape) in drawn}
    state["a.w"] = torch.randn(11, 7)
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, folder / "in.pt")
    save_file(state, folder / "in.safetensors")
    return state


def matrices(folder: Path, draw: Callable[[Any], Any], *names: str, least: int = 1) -> None:
    """Write files of the same random matrices with other values."""
    sides = st.integers(least, least + 70)
    shapes = draw(st.lists(st.tuples(sides, sides), min_size=1, max_size=5))
    for name in names:
        save_file({f"{n}.weight": torch.randn(shape) for n, shape in enumerate(shapes)}, folder / name)


def renamed(words: str) -> Made:
    def make(folder: Path, draw: Callable[[Any], Any]) -> str:
        of_shapes(folder, draw)
        return words

    return make


def mapped(folder: Path, draw: Callable[[Any], Any]) -> str:
    matrices(folder, draw, "in.safetensors")
    (folder / "rules.toml").write_text(STACKING.format("0.weight", "1.weight"))
    return "convert in.safetensors out.safetensors --map rules.toml"


def packed(folder: Path, draw: Callable[[Any], Any]) -> str:
    sizes = draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    if draw(st.booleans()):
        write_packed(folder / "q", *sizes)
    else:
        write_gptq(folder / "q", 1 + sizes[0] % 5, 8 * (1 + sizes[1] % 20))
    return "convert q/model.safetensors out.safetensors --dequantize"


def quantized(folder: Path, draw: Callable[[Any], Any]) -> str:
    matrices(folder, draw, "in.safetensors", least=64)
    return "convert in.safetensors out.safetensors --quantize fp8"


def conformed(folder: Path, draw: Callable[[Any], Any]) -> str:
    state = of_shapes(folder, draw)
    save_file({f"x.{name}": tensor for name, tensor in state.items()}, folder / "like.safetensors")
    return "conform in.pt out.safetensors --like like.safetensors"


def of_ranks(folder: Path, draw: Callable[[Any], Any]) -> str:
    matrices(folder, draw, "in.safetensors")
    with ckpttool.open(folder / "in.safetensors") as checkpoint:
        ckpttool.split(checkpoint, folder / "ranks", draw(st.integers(1, 4)))
    return f"merge ranks {draw(st.sampled_from(['out.pt', 'out.safetensors']))}"


def adapted(folder: Path, draw: Callable[[Any], Any]) -> str:
    rows, columns, rank = draw(st.tuples(*[st.integers(1, 70)] * 2, st.integers(1, 8)))
    save_file({"0.weight": torch.randn(rows, columns), "1": torch.ones(3)}, folder / "in.safetensors")
    factors = {"A": torch.randn(rank, columns), "B": torch.randn(rows, rank)}
    write_adapter(folder / "adapter", factors)
    return "merge-lora in.safetensors adapter out.safetensors"


def averaged(folder: Path, draw: Callable[[Any], Any]) -> str:
    matrices(folder, draw, "a.safetensors", "b.safetensors", "c.safetensors")
    return "average a.safetensors b.safetensors c.safetensors out.safetensors"


def applied(folder: Path, draw: Callable[[Any], Any]) -> str:
    matrices(folder, draw, "a.safetensors", "b.safetensors")
    ckpttool.delta(folder / "a.safetensors", folder / "b.safetensors", folder / "d.safetensors")
    return "apply a.safetensors d.safetensors out.safetensors"


RANDOM: dict[str, Made] = {
    "strip-prefix": renamed("strip-prefix in.pt out.pt"),
    "rename-keys": renamed("rename-keys in.pt out.safetensors --map module=model"),
    "dtype": renamed("convert in.pt out.safetensors --dtype bf16"),
    "shards": renamed("convert in.pt out/ --shard-size 3KB"),
    "map": mapped,
    "dequantize": packed,
    "quantize": quantized,
    "conform": conformed,
    "merge": of_ranks,
    "merge-lora": adapted,
    "average": averaged,
    "apply": applied,
}


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=-(-settings.default.max_examples // 24),
)
@given(data=st.data())
def test_any_checkpoint_by_each_command(make: Made, data: Any, cli: Cli, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = make(folder, data.draw)
        for each in ("one", *map(str, COUNTS)):
            (folder / each).mkdir()
        alone = run(cli, words, folder / "one")
        assert alone.code == 0, alone
        for count in COUNTS:
            for number in range(count, 0, -1):
                ran = run(cli, words, folder / str(count), "--part", f"{number}/{count}")
                assert ran.code == 0, ran
            assert contents(folder / str(count)) == contents(folder / "one"), words


# What is refused


@pytest.mark.parametrize("part", ["0/4", "5/4", "4", "1/0", "-1/4", "1/4/2", "a/b", "1/9999999", ""])
def test_what_is_no_part_is_refused(part: str, folders: tuple[Path, Path], cli: Cli) -> None:
    ran = run(cli, JOBS["strip-prefix"], folders[1], "--part", part)
    assert_says(ran, 2, f"'{part}' is not a part", "--part 3/16")
    assert os.listdir(folders[1]) == []


@pytest.mark.parametrize(("words", "what"), OTHERS.values(), ids=OTHERS)
def test_a_part_of_another_plan_is_refused(
    words: str, what: str, folders: tuple[Path, Path], cli: Cli
) -> None:
    first = "strip-prefix in.pt out.safetensors"
    assert run(cli, first, folders[1], "--part", "1/2").code == 0
    ran = run(cli, words, folders[1])
    assert_says(ran, 2, "is being written in parts of another plan", f"the {what} differs", "rm -r")
    assert run(cli, first, folders[1], "--part", "2/2").code == 0


def test_parts_that_compare_checksums_go_with_none_that_do_not(tmp_path: Path, cli: Cli) -> None:
    torch.save({"module.w": torch.randn(50_000)}, tmp_path / "in.pt")
    words = ("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt")
    assert cli(*words, "--no-verify", "--part", "1/2").code == 0
    assert_says(cli(*words, "--part", "2/2"), 2, "parts of another plan")
    assert cli(*words, "--no-verify", "--part", "2/2").code == 0


def test_an_input_that_changed_between_two_parts_is_named(tmp_path: Path, cli: Cli) -> None:
    source, out = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({"module.w": torch.ones(5000)}, source)
    assert cli("strip-prefix", source, out, "--part", "1/2").code == 0
    torch.save({"module.w": torch.zeros(5000)}, source)
    assert_says(cli("strip-prefix", source, out, "--part", "2/2"), 2, f"input {source} differs")
    assert not out.exists()


@pytest.mark.parametrize("changed", ["rules.toml", "config.json"])
def test_rules_or_settings_that_changed_between_two_parts_are_named(
    changed: str, tmp_path: Path, cli: Cli
) -> None:
    save_file({"w": torch.randn(64, 64)}, tmp_path / "in.safetensors")
    (tmp_path / "rules.toml").write_text(PERMUTING)
    (tmp_path / "config.json").write_text('{"n_heads": 4}')
    words = ("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    words = (*words, "--map", tmp_path / "rules.toml")
    assert cli(*words, "--part", "1/2").code == 0
    other = (tmp_path / changed).read_text().replace("4}", "8}").replace("halves", "pairs")
    (tmp_path / changed).write_text(other)
    assert_says(cli(*words, "--part", "2/2"), 2, "parts of another plan", changed)


PERMUTING = """from = "a"
to = "b"
numbers = { heads = "n_heads" }
[[rule]]
from = "w"
to = "x"
steps = [{ permute-heads = "heads", size = "64 // heads", to = "halves" }]
"""


def test_another_version_of_ckpttool_is_refused(
    folders: tuple[Path, Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(cli, JOBS["cast"], folders[1], "--part", "1/2").code == 0
    monkeypatch.setattr("ckpttool.core.formats.saving.__version__", "99")
    assert_says(run(cli, JOBS["cast"], folders[1], "--part", "2/2"), 2, "version of ckpttool differs")


PLACES = {
    "stdout": ("strip-prefix in.pt - --part 1/2", "no place where parts can meet"),
    "dcp": ("convert in.pt outdcp --to dcp --part 1/2", "written by torch's library"),
    "a URL": ("strip-prefix in.pt hf://me/model/out.pt --part 1/2", "no place where parts can meet"),
    "Google's": ("strip-prefix in.pt gs://b/out.pt --part 1/2", "no place where parts can meet"),
}


@pytest.mark.parametrize(("words", "what"), PLACES.values(), ids=PLACES)
def test_what_can_not_be_divided_is_refused(
    words: str, what: str, folders: tuple[Path, Path], cli: Cli
) -> None:
    assert_says(run(cli, words, folders[1]), 2, what, "leave out --part")
    assert os.listdir(folders[1]) == []


def test_an_output_that_exists_is_replaced_with_force_alone(folders: tuple[Path, Path], cli: Cli) -> None:
    alone, divided = folders
    assert run(cli, JOBS["cast"], alone).code == 0
    out = divided / "out.safetensors"
    out.write_bytes(b"old")
    assert_says(run(cli, JOBS["cast"], divided, "--part", "1/2"), 2, "already exists", "--force")
    for number in (1, 2):
        assert out.read_bytes() == b"old"
        assert run(cli, JOBS["cast"], divided, "--part", f"{number}/2", "--force").code == 0
    assert contents(divided) == contents(alone)


def test_a_file_that_appears_before_the_last_part_stays(folders: tuple[Path, Path], cli: Cli) -> None:
    assert run(cli, JOBS["cast"], folders[1], "--part", "1/2").code == 0
    (folders[1] / "out.safetensors").write_bytes(b"theirs")
    assert_says(run(cli, JOBS["cast"], folders[1], "--part", "2/2"), 2, "already exists")
    assert (folders[1] / "out.safetensors").read_bytes() == b"theirs"


# Damage


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_flipped_bit_of_an_input_is_found_whichever_part_reads_it(
    at: float, tmp_path: Path, cli: Cli
) -> None:
    """The tensor lies in all parts, so its checksum is compared where all sums come together."""
    source, out = tmp_path / "in.pt", tmp_path / "out.safetensors"
    torch.save({"module.w": torch.randn(50_000)}, source)
    content = bytearray(source.read_bytes())
    content[int(len(content) * at)] ^= 1
    source.write_bytes(content)
    codes = [cli("strip-prefix", source, out, "--part", f"{n}/3").code for n in (1, 2)]
    assert_says(cli("strip-prefix", source, out, "--part", "3/3"), 3, "do not match their checksum")
    assert (codes, out.exists()) == ([0, 0], False)


def without_files(record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), "files": {}}))


HARMS: dict[str, Callable[[Path], None]] = {
    "no staged output": lambda there: (there / parts.STAGED).unlink(),
    "a record cut short": lambda there: (there / "1-of-2.json").write_text('{"files"'),
    "a record of nothing": lambda there: without_files(there / "1-of-2.json"),
    "a plan that is none": lambda there: (there / meeting.PLAN).write_text("[]"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_place_that_was_tampered_with_is_no_output(
    harm: Callable[[Path], None], folders: tuple[Path, Path], cli: Cli
) -> None:
    assert run(cli, JOBS["cast"], folders[1], "--part", "1/2").code == 0
    harm(Path(meeting.folder_of(str(folders[1] / "out.safetensors"))))
    ran = run(cli, JOBS["cast"], folders[1], "--part", "2/2")
    assert ran.code in (2, 3) and "rm -r" in ran.err, ran
    assert not (folders[1] / "out.safetensors").exists()


# Parts that are written twice, late, or not at all


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
@pytest.mark.parametrize(
    "linked", ["staged.ckpttool.part", "staged.ckpttool.part/pytorch_model-00001-of-00002.bin"]
)
def test_a_link_that_waits_where_parts_are_staged_is_not_written_through(
    linked: str, tmp_path: Path, cli: Cli
) -> None:
    torch.save({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "in.pt")
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    is_folder = "/" in linked
    place = tmp_path / f".out{'' if is_folder else '.pt'}.ckpttool.parts" / linked
    place.parent.mkdir(parents=True)
    place.symlink_to(mine)
    how = ["--to", "torch-sharded", "--shard-size", "400"] if is_folder else []
    ran = cli(
        "convert", tmp_path / "in.pt", tmp_path / ("out" if is_folder else "out.pt"), *how, "--part", "1/2"
    )
    assert_says(ran, 3, "is a link, which no part has made")
    assert mine.read_bytes() == b"mine"


def test_a_staged_output_that_was_changed_is_begun_again(folders: tuple[Path, Path], cli: Cli) -> None:
    alone, divided = folders
    assert run(cli, JOBS["cast"], alone).code == 0
    assert run(cli, JOBS["cast"], divided, "--part", "1/2").code == 0
    staged = Path(meeting.folder_of(str(divided / "out.safetensors"))) / parts.STAGED
    with staged.open("r+b") as file:
        file.seek(20_000)
        file.write(b"other")
    ran = run(cli, JOBS["cast"], divided, "--part", "2/2", "--verify")
    assert_says(ran, 3, "does not read back as intended, and was not kept")
    assert os.listdir(divided) == []
    for number in (2, 1):
        assert run(cli, JOBS["cast"], divided, "--part", f"{number}/2", "--verify").code == 0
    assert contents(divided) == contents(alone)


def test_a_part_that_is_missing_is_named_by_finish(folders: tuple[Path, Path], cli: Cli) -> None:
    alone, divided = folders
    out = divided / "out.pt"
    assert run(cli, JOBS["cast to .pt"], alone).code == 0
    assert_says(cli("finish", out), 2, "no part of it is here")
    assert run(cli, JOBS["cast to .pt"], divided, "--part", "2/3").code == 0
    assert_says(cli("finish", out), 1, f"error: {out}: lacks parts 1/3, 3/3", "--part 1/3")
    assert run(cli, JOBS["cast to .pt"], divided, "--part", "1/3").code == 0
    with pytest.MonkeyPatch.context() as patch:  # the last part ends before it can finish
        patch.setattr(parts.OutputParts, "waiting", lambda _: [parts.OutputPart(1, 2)])
        assert run(cli, JOBS["cast to .pt"], divided, "--part", "3/3").code == 0
    assert not out.exists()
    assert cli("finish", out, "--json").json["output"] == str(out)
    assert contents(divided) == contents(alone)
    assert_says(cli("finish", out), 2, "is in place, and no part of it is left")


def test_finish_believes_no_plan_that_was_tampered_with(folders: tuple[Path, Path], cli: Cli) -> None:
    out = folders[1] / "out.pt"
    Path("evil.py").write_text("open('ran', 'w')\ndef net(): ...\n")
    assert run(cli, JOBS["cast to .pt"], folders[1], "--part", "1/2").code == 0
    place = Path(meeting.folder_of(str(out))) / meeting.PLAN
    for model in (["--model", "evil.py:net"], ["--model=evil.py:net"]):
        words = ["optimizer", "net.pt", str(out), "--to", "names", *model]
        place.write_text(json.dumps({**json.loads(place.read_text()), "words": words}))
        assert_says(cli("finish", out), 2, "--model", "--part finish")
    assert not Path("ran").exists()
    for count in ("x", -1, 10**9):
        words = ["convert", "in.pt", str(out)]
        place.write_text(json.dumps({"number of parts": count, "words": words}))
        assert_says(cli("finish", out), 2, "is not a part")


def test_a_part_written_again_reads_nothing(folders: tuple[Path, Path], cli: Cli, tmp_path: Path) -> None:
    alone, divided = folders
    words = ["strip-prefix", "in.pt", divided / "out.pt", "--part"]
    for part in ("1/2", "1/2"):
        assert cli(*words, part).code == 0
    record = Path(meeting.folder_of(str(divided / "out.pt"))) / "1-of-2.json"
    written = record.stat().st_mtime_ns
    assert cli(*words, "1/2").code == 0 and record.stat().st_mtime_ns == written
    assert cli(*words, "2/2").code == 0
    assert run(cli, JOBS["strip-prefix to .pt"], alone).code == 0
    assert contents(divided) == contents(alone)


def started(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckpttool", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **more)


KILLED = ["out.pt --dtype bf16", "out.safetensors --dtype bf16", "out/ --shard-size 9MB", "out.pt"]


def assert_survives_kills(large: tuple[Path, bytes], folder: Path, rounds: int) -> None:
    """Kill parts at any moment, two of each output at once; then write what is missing."""
    source, chance, taken = large[0], random.Random(rounds), 0.0
    for number, job in enumerate(KILLED):
        alone, divided = folder / f"{number} alone", folder / f"{number} in parts"
        alone.mkdir()
        divided.mkdir()
        out, *flags = job.split()
        words = ["convert", str(source), f"{alone}/{out}", *flags]
        began = time.monotonic()
        assert started(words).wait(60) == 0
        taken, words[2] = max(time.monotonic() - began, taken), f"{divided}/{out}"
        for _ in range(rounds):
            running = [started([*words, "--part", f"{chance.randint(1, 3)}/3"]) for _ in range(2)]
            moments = sorted(chance.uniform(0.3, 1.3) * taken for _ in running)
            for each, after in zip(running, (moments[0], moments[1] - moments[0]), strict=True):
                time.sleep(after)
                each.send_signal(signal.SIGKILL)
                each.communicate()
            if contents(divided).keys() & contents(alone).keys():
                assert contents_in_place(divided) == contents(alone)
                shutil.rmtree(divided)
                divided.mkdir()
        for part in (1, 2, 3):
            if not contents_in_place(divided):
                ran = started([*words, "--part", f"{part}/3"])
                _, said = ran.communicate(timeout=60)
                assert ran.returncode == 0, said
        assert contents(divided) == contents(alone)


def contents_in_place(folder: Path) -> dict[str, bytes]:
    """Return the bytes of what has its name."""
    return {name: data for name, data in contents(folder).items() if not name.startswith(".")}


def test_no_kill_damages_an_output(large: tuple[Path, bytes], tmp_path: Path) -> None:
    assert_survives_kills(large, tmp_path, 1)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_kill_of_two_hundred_damages_an_output(large: tuple[Path, bytes], tmp_path: Path) -> None:
    assert_survives_kills(large, tmp_path, 25)


def test_parts_at_once_and_twice_make_one_output(large: tuple[Path, bytes], tmp_path: Path) -> None:
    source, _ = large
    words = ["convert", str(source), f"{tmp_path}/out.pt", "--dtype", "bf16", "--part"]
    running = [started([*words, f"{number}/3"]) for number in (1, 2, 3, 1, 2, 3)]
    said = [each.communicate(timeout=120)[1].decode() for each in running]
    # One that comes after the end finds the output there.
    failed = [err for each, err in zip(running, said, strict=True) if each.returncode]
    assert all("already exists" in err for err in failed), failed
    assert ckpttool.digest(tmp_path / "out.pt") == ckpttool.digest(source.parent / "out.pt")


def test_a_part_that_outlives_its_place_does_not_count_in_the_next(
    folders: tuple[Path, Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote went away with the place, so its record says nothing of the new one."""
    alone, divided = folders
    assert run(cli, JOBS["cast"], alone).code == 0
    note = parts.OutputParts.note

    def late(part: parts.OutputParts, *, done: bool = False) -> None:
        monkeypatch.undo()
        monkeypatch.chdir(alone.parent)
        shutil.rmtree(meeting.folder_of(str(divided / "out.safetensors")))
        monkeypatch.chdir(here)
        assert run(cli, JOBS["cast"], divided, "--part", "2/2").code == 0
        note(part, done=done)

    here = os.getcwd()
    monkeypatch.setattr(parts.OutputParts, "note", late)
    run(cli, JOBS["cast"], divided, "--part", "1/2")
    assert not (divided / "out.safetensors").exists()
    assert run(cli, JOBS["cast"], divided, "--part", "1/2").code == 0
    assert contents(divided) == contents(alone)


def test_a_full_disk_in_one_part_leaves_the_others(folders: tuple[Path, Path], cli: Cli) -> None:
    alone, divided = folders
    assert run(cli, JOBS["cast"], alone).code == 0
    assert run(cli, JOBS["cast"], divided, "--part", "1/2").code == 0
    with pytest.MonkeyPatch.context() as patch:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(copying.system, "pwrite", full)
        assert_says(run(cli, JOBS["cast"], divided, "--part", "2/2"), 3, "no space left")
    assert run(cli, JOBS["cast"], divided, "--part", "2/2").code == 0
    assert contents(divided) == contents(alone)


# Engines


def test_torchrun_starts_the_parts(large: tuple[Path, bytes], tmp_path: Path) -> None:
    source, _ = large
    out = tmp_path / "out.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "ckpttool", "convert", str(source), str(out), "--dtype", "bf16"]
    ran = subprocess.run(command, capture_output=True, timeout=120, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "wrote part" in ran.stdout
    assert ckpttool.digest(out) == ckpttool.digest(source.parent / "out.pt")


def test_what_has_no_parts_is_done_by_rank_0_and_a_script_of_ranks_runs_whole_commands(
    large: tuple[Path, bytes], tmp_path: Path
) -> None:
    source, _ = large
    lines = f"""
import os, subprocess, sys
command = [sys.executable, "-m", "ckpttool", "strip-prefix", {str(source)!r}]
subprocess.run([*command, f"{tmp_path}/{{os.environ['RANK']}}.safetensors"], check=True)
"""
    (tmp_path / "script.py").write_text(lines)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for words in (["-m", "ckpttool", "digest", str(source)], [str(tmp_path / "script.py")]):
        ran = subprocess.run([*torchrun, *words], capture_output=True, timeout=120, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count(ckpttool.digest(source)) == int("digest" in words)
    for rank in range(2):
        assert ckpttool.open(tmp_path / f"{rank}.safetensors").state().tensors.keys() == {*map(str, range(8))}


REMOTE = {
    "copied": "strip-prefix {}/in.pt out.safetensors",
    "to .pt": "strip-prefix {}/in.pt out.pt",
    "cast": "convert {}/in.pt out.pt --dtype bf16",
    "merged": "merge {}/shards/model.safetensors.index.json out.safetensors",
    "cut": "convert {}/in.pt out/ --shard-size 9MB",
}


@pytest.mark.parametrize("words", REMOTE.values(), ids=REMOTE)
def test_a_part_asks_a_server_for_its_own_bytes_alone(
    words: str,
    large: tuple[Path, bytes],
    folders: tuple[Path, Path],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "BUFFER", 1 << 20)
    there, size = large[0].parent, large[0].stat().st_size
    if "shards" in words and not (there / "shards").exists():
        ckpttool.convert(there / "in.pt", f"{there}/shards/", shard_size=9 << 20)
    alone, divided = folders
    with RangeServer(there) as server:
        words = words.format(server.url)
        assert run(cli, words, alone).code == 0
        for number in (3, 1, 2):
            ran = run(cli, words, divided, "--part", f"{number}/3", "--json")
            assert ran.code == 0, ran
            assert ran.json["bytes_read"] < 0.45 * size, number
            assert ran.json["requests"] < 14, "it is read ahead, many blocks by a request"
    assert contents(divided) == contents(alone)
