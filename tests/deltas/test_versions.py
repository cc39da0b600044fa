"""A folder of versions: which can be made, what stands in the way, and a reader that follows a writer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.deltas import versions
from ckpttool.errors import CkptToolError, Refused, Unreadable, UsageFault
from tests.support.running import ROOT, Cli, assert_says
from tests.support.sparse_updates import prime_rl, trl

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")


def model(version: int) -> dict[str, torch.Tensor]:
    weights = torch.arange(5000.0)
    weights[version * 7 :: 501] = float(version)
    return {"w": weights, "step": torch.tensor(version)}


def write(
    folder: Path, *numbers: int, layout: str = "weight-v", name: str = "weight_v{:06d}", whole: int = -1
) -> None:
    """Write versions after the first number, of which one may be whole, and each as whole/N.safetensors."""
    Path("whole").mkdir(exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        save_file(model(number), f"whole/{number}.safetensors")
        if number == whole:
            ckpttool.save(
                ckpttool.open(f"whole/{number}.safetensors"),
                folder / name.format(number),
                to="safetensors-sharded",
            )
        elif number != numbers[0]:
            before = f"whole/{number - 1}.safetensors"
            ckpttool.delta(before, f"whole/{number}.safetensors", folder / name.format(number), layout=layout)


def is_version(made: ckpttool.Checkpoint, number: int) -> bool:
    return ckpttool.digest(made) == ckpttool.digest(f"whole/{number}.safetensors")


@pytest.mark.parametrize(("layout", "name"), [("weight-v", "weight_v{:06d}"), ("skyrl", "delta-{:08d}")])
def test_a_chain_of_twenty(here: Path, layout: str, name: str, cli: Cli) -> None:
    write(Path("sync"), *range(21), layout=layout, name=name)
    found = versions.in_folder("sync")
    assert [(each.version, each.base, each.complete) for each in found] == [
        (n, n - 1, True) for n in range(1, 21)
    ]
    for number in (1, 12, 20):
        with ckpttool.apply("whole/0.safetensors", ["sync"], version=number) as made:
            assert is_version(made, number)
    with ckpttool.open("whole/0.safetensors+sync") as made:
        assert is_version(made, 20)
    done = cli("apply", "whole/0.safetensors", "sync", "out.safetensors", "--version", "13")
    assert done.code == 0 and ckpttool.digest("out.safetensors") == ckpttool.digest("whole/13.safetensors")
    told = cli("inspect", "sync", "--json").json["versions"]
    assert [(each["version"], each["base"], each["complete"]) for each in told] == [
        (n, n - 1, True) for n in range(1, 21)
    ]
    assert all(each["bytes"] > 0 for each in told)


def test_an_anchor_takes_the_place_of_the_base(here: Path, cli: Cli) -> None:
    write(Path("sync"), *range(6), whole=3)
    assert [each.base for each in versions.in_folder("sync")] == [0, 1, None, 3, 4]
    for number in (3, 4, 5):
        with ckpttool.apply("sync", version=number) as made:
            assert is_version(made, number)
        with ckpttool.apply("whole/5.safetensors", ["sync"], version=number) as made:
            assert is_version(made, number)
        with ckpttool.open(f"sync/weight_v{number:06d}") as made:
            assert is_version(made, number)
    with ckpttool.open("whole/0.safetensors+sync") as made:
        assert is_version(made, 5)
    assert cli("inspect", "sync").out.endswith("\n\nckpttool apply sync new.safetensors\n")
    with pytest.raises(Unreadable, match="does not lie beside it"):
        ckpttool.apply("sync", version=2)
    assert cli("apply", "sync", "out.safetensors").code == 0
    assert ckpttool.digest("out.safetensors") == ckpttool.digest("whole/5.safetensors")
    assert cli("apply", "sync", "anchor.safetensors", "--version", "3").code == 0
    assert ckpttool.digest("anchor.safetensors") == ckpttool.digest("whole/3.safetensors")
    shutil.rmtree("sync/weight_v000004")
    shutil.rmtree("sync/weight_v000005")
    with ckpttool.open("whole/0.safetensors+sync") as made:
        assert is_version(made, 3)


def test_steps_that_are_not_in_a_row(here: Path) -> None:
    save_file(model(100), "100.safetensors")
    save_file(model(400), "400.safetensors")
    Path("run").mkdir()
    ckpttool.save(ckpttool.open("100.safetensors"), "run/step-100", to="safetensors-sharded")
    prime_rl(Path("run/step-150"), 100, model(100), model(150))
    prime_rl(Path("run/step-400"), 150, model(150), model(400))
    assert [(each.version, each.base) for each in versions.in_folder("run")] == [
        (100, None),
        (150, 100),
        (400, 150),
    ]
    assert ckpttool.digest("run/step-400") == ckpttool.digest("400.safetensors")


def test_trls_anchors_and_deltas(here: Path) -> None:
    tensors = {"w": torch.arange(300.0).bfloat16()}
    for below in ("anchors", "deltas"):
        Path("bucket", below).mkdir(parents=True)
    save_file(tensors, "bucket/anchors/step_000000.safetensors")
    for number in (1, 2, 3):
        old = {"w": tensors["w"].clone()}
        tensors["w"][number::50] = -number
        trl(Path(f"bucket/deltas/step_{number:06d}.safetensors"), number, old, tensors)
    save_file(tensors, "new.safetensors")
    assert [(each.version, each.base) for each in versions.in_folder("bucket")] == [
        (0, None),
        (1, 0),
        (2, 1),
        (3, 2),
    ]
    with ckpttool.apply("bucket") as made:
        assert ckpttool.digest(made) == ckpttool.digest("new.safetensors")
    assert ckpttool.digest("bucket/deltas/step_000003.safetensors") == ckpttool.digest("new.safetensors")


def test_a_link_that_is_missing_cut_or_foreign_is_named(here: Path, cli: Cli) -> None:
    write(Path("sync"), *range(9))
    shutil.rmtree("sync/weight_v000003")
    payload = next(Path("sync/weight_v000006").glob("model-*"))
    payload.write_bytes(payload.read_bytes()[:-5])
    found = {each.version: each for each in versions.in_folder("sync")}
    assert [number for number, each in found.items() if each.complete] == [1, 2]
    with pytest.raises(Unreadable, match="version 3 is missing, which version 4 is made from"):
        ckpttool.apply("whole/0.safetensors", ["sync"], version=5)
    assert "cut short" in found[6].problem and "version 6: " in found[8].problem
    done = cli("apply", "whole/0.safetensors", "sync", "out.safetensors", "--version", "8")
    assert_says(done, 3, "weight_v000008", "version 6", "cut short")
    with ckpttool.apply("whole/0.safetensors", ["sync"]) as made:  # the newest that can be made
        assert is_version(made, 2)
    with pytest.raises(Unreadable, match="has no version 77"):
        ckpttool.apply("whole/0.safetensors", ["sync"], version=77)
    assert "version 3 is missing" in cli("inspect", "sync").out
    last = "the newest; BASE is version 0:\nckpttool apply BASE sync new.safetensors\n"
    assert cli("inspect", "sync").out.endswith(f"\n\n{last}")
    shutil.rmtree("sync/weight_v000002")
    save_file({"other": torch.ones(3)}, "foreign.safetensors")
    save_file({"other": torch.zeros(3)}, "foreign2.safetensors")
    ckpttool.delta("foreign.safetensors", "foreign2.safetensors", "sync/weight_v000002", layout="weight-v")
    with pytest.raises(Refused, match=r"not the base of .*weight_v000002: it has no tensor 'other'"):
        ckpttool.apply("whole/0.safetensors", ["sync"], version=2)


def test_a_circle_and_versions_for_what_is_no_folder(here: Path) -> None:
    write(Path("sync"), 0, 1, 2)
    index = Path("sync/weight_v000001/model.safetensors.index.json")
    said = json.loads(index.read_text())
    said["metadata"]["base_version"] = "000002"
    index.write_text(json.dumps(said))
    with pytest.raises(Unreadable, match="its own base"):
        ckpttool.apply("whole/0.safetensors", ["sync"], version=2)
    with pytest.raises(CkptToolError):
        ckpttool.digest("sync/weight_v000002")
    with pytest.raises(UsageFault, match="no input is a folder of versions"):
        ckpttool.apply("whole/0.safetensors", ["sync/weight_v000001"], version=1)


def test_half_a_version_is_none(here: Path) -> None:
    write(Path("sync"), 0, 1)
    shutil.copytree("sync/weight_v000001", "sync/weight_v000002")
    Path(
        "sync/weight_v000002/model.safetensors.index.json"
    ).unlink()  # as a writer that does not rename has it
    found = versions.in_folder("sync")
    assert [(each.version, each.complete) for each in found] == [(1, True), (2, False)]


PAGE = (ROOT / "docs/deltas.md").read_text(encoding="utf-8")


def test_a_reader_follows_the_trainer_and_never_sees_half_a_version(here: Path) -> None:
    """The example of docs/deltas.md writes while this process reads."""
    (code,) = re.findall(r"^```python\n(# publish.py\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("publish.py").write_text(code)
    command = [sys.executable, str(ROOT / "train/main.py"), "--max-steps", "24", "--batch-size", "64"]
    command += ["--every", "2", "publish.py:publish", "--out", "run"]
    writer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seen: dict[int, str] = {}
    sync = Path("run/sync")
    deadline = time.monotonic() + 120
    try:
        while time.monotonic() < deadline:
            is_over = writer.poll() is not None
            found = versions.in_folder(str(sync)) if sync.exists() else []
            assert all(each.complete for each in found), found
            if found and found[-1].version not in seen:
                with ckpttool.apply(sync, version=found[-1].version) as made:
                    seen[found[-1].version] = ckpttool.digest(made)
            if is_over:
                break
            time.sleep(0.01)
    finally:
        writer.kill()
        _, errors = writer.communicate()
    assert writer.returncode == 0, errors
    assert max(seen) == 11 and len(set(seen.values())) == len(seen)
    assert [each.version for each in found if each.base is None] == [0, 10]
    assert seen[11] == ckpttool.digest("run/old.safetensors")
    assert (
        load_file("run/old.safetensors").keys()
        == ckpttool.open(sync / "weight_v000003").state().tensors.keys()
    )


def test_a_base_of_another_series_has_no_version(here: Path) -> None:
    save_file(model(3), "step-300.safetensors")
    save_file(model(4), "step-400.safetensors")
    ckpttool.delta("step-300.safetensors", "step-400.safetensors", "weight_v000001", layout="weight-v")
    assert ckpttool.digest("step-300.safetensors+weight_v000001") == ckpttool.digest("step-400.safetensors")
    ckpttool.delta("step-300.safetensors", "step-400.safetensors", "weight_v000007", layout="weight-v")
    with pytest.raises(UsageFault, match=r"its base would be version 3, and .* is version 7"):
        ckpttool.delta(
            "step-300.safetensors+weight_v000007", "step-300.safetensors", "weight_v000004", layout="weight-v"
        )
