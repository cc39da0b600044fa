"""What is in a page, and when one is written: data, sizes, escapes, policy, refusals; without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckpttool
from ckpttool.reporting.contents import front_coded
from ckpttool.reporting.training import MAX_POINTS, _points
from tests.support import report_files
from tests.support.comparing import saved
from tests.support.running import Ran

Cli = Callable[..., Ran]
BLOCKS = re.compile(r"<(script|style)( [^>]*)?>(.*?)</\1>", re.DOTALL)


def data_of(page: Path) -> dict[str, Any]:
    (block,) = (text for tag, about, text in BLOCKS.findall(page.read_text("utf-8")) if "json" in about)
    return json.loads(block)


def names_in(coded: dict[str, list[Any]]) -> list[str]:
    """Decode as the script does, in UTF-16."""
    names, before = [], b""
    for shared, rest in zip(coded["shared"], coded["rest"], strict=True):
        before = before[: 2 * shared] + rest.encode("utf-16-le")
        names.append(before.decode("utf-16-le"))
    return names


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    report_files.checkpoint(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("files")
def test_a_page_has_what_inspect_says(cli: Cli) -> None:
    ran = cli("report", "last.pt", "out.html")
    assert re.fullmatch(r"wrote a page about 1 checkpoint -> out\.html \([\d.]+ kB\)\n", ran.out)
    told, page = cli("inspect", "last.pt", "--stats", "--json").json, data_of(Path("out.html"))["checkpoint"]
    tensors = page["tensors"]
    assert names_in(tensors["names"]) == [row["name"] for row in told["tensors"]]
    for at, row in enumerate(told["tensors"]):
        dtype, _, nbytes = tensors["forms"][tensors["form"][at]]
        assert (dtype, nbytes) == (row["dtype"], row["nbytes"])
        assert tensors["mean"][at] == pytest.approx(row["stats"]["mean"], rel=1e-3)
        assert tensors["max"][at] == pytest.approx(row["stats"]["maximum"], rel=1e-3)
    assert [count for _, count in tensors["bad"]] == [1]
    assert ["tied", "module.embed.weight = module.head.weight"] in page["facts"]
    assert ["epoch", "7"] in page["others"]


@pytest.mark.usefixtures("files")
def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else() -> None:
    ckpttool.report("last.pt", "out.html")
    text = Path("out.html").read_text("utf-8")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    own = [(tag, body) for tag, about, body in BLOCKS.findall(text) if "json" not in about]
    assert [tag for tag, _ in own] == ["style", "script"]
    for tag, body in own:
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert re.findall(r"https?:", text) == ["http:"]  # the name of the namespace of SVG
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


def test_no_text_of_a_file_ends_the_block_it_stands_in(tmp_path: Path) -> None:
    ckpttool.report(report_files.hostile(tmp_path), tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text("utf-8")
    block = text.partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in block and not re.search("[\u202e\u2028\ud800-\udfff\x00]", block)
    shown = names_in(data_of(tmp_path / "out.html")["checkpoint"]["tensors"]["names"])
    escaped = [name.encode("unicode_escape").decode() for name in report_files.HOSTILE]
    assert shown[-2:] == [f"model.{name}" for name in escaped[-2:]]
    assert "model.\\u202egnp.exe" in shown and "model.\U0001f601.x" in shown


def test_names_are_coded_in_the_units_of_scripts() -> None:
    names = ["a.b", "a.c", "", "\U0001f600.x", "\U0001f601.x", "層.x", "層.y"]
    assert names_in(front_coded(names)) == names


@pytest.mark.parametrize(
    ("count", "most"), [(1_000, 150_000), pytest.param(10_000, 1_000_000, marks=pytest.mark.long)]
)
def test_a_page_of_many_tensors_is_small(tmp_path: Path, count: int, most: int) -> None:
    values = np.random.default_rng(0).normal(size=(count, 16)).astype("f4")
    names = [f"model.layers.{i // 250}.mlp.experts.{i % 250 // 2}.w{i % 2}.weight" for i in range(count)]
    save_file(dict(zip(names, values, strict=True)), tmp_path / "many.safetensors")
    found = ckpttool.report(tmp_path / "many.safetensors", tmp_path / "many.html")
    assert found.nbytes == (tmp_path / "many.html").stat().st_size < most


@pytest.mark.usefixtures("files")
def test_no_values_are_read_with_no_values(cli: Cli) -> None:
    assert cli("report", "last.pt", "out.html", "--no-values").code == 0
    assert "bins" not in data_of(Path("out.html"))["checkpoint"]["tensors"]


@pytest.mark.usefixtures("files")
def test_an_existing_page_is_replaced_only_with_force_and_an_input_never(cli: Cli) -> None:
    Path("out.html").write_text("mine")
    for words in (
        "report last.pt out.html",
        "inspect last.pt --html out.html",
        "diff last.pt last.pt --html out.html",
    ):
        ran = cli(*words.split())
        assert (ran.code, Path("out.html").read_text()) == (2, "mine")
        assert "already exists" in ran.err and "--force" in ran.err
    assert cli("report", "last.pt", "out.html", "--force").code == 0
    before = Path("last.pt").read_bytes()
    Path("last.html").symlink_to("last.pt")
    assert cli("report", "last.pt", "last.html", "--force").code == 2
    assert Path("last.pt").read_bytes() == before


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "words", ["last.pt", "last.pt last.pt", "last.pt last.pt last.pt x.html", "last.pt s3://a/b.html"]
)
def test_what_names_no_page_is_a_fault_of_use(cli: Cli, words: str) -> None:
    before = Path("last.pt").read_bytes()
    assert cli("report", *words.split(), "--force").code == 2
    assert Path("last.pt").read_bytes() == before


@pytest.mark.usefixtures("files")
def test_a_dry_run_writes_nothing(cli: Cli) -> None:
    ran = cli("report", "last.pt", "out.html", "--dry-run", "--json")
    assert ran.json["dry_run"] is True and not Path("out.html").exists()
    assert cli("report", "last.pt", "out.html", "--json").json["bytes"] == ran.json["bytes"]


@pytest.mark.usefixtures("files")
def test_a_damaged_file_leaves_no_page(cli: Cli) -> None:
    data = bytearray(Path("last.pt").read_bytes())
    data[data.index(torch.ones(16).numpy().tobytes())] ^= 1
    Path("bad.pt").write_bytes(data)
    ran = cli("report", "bad.pt", "out.html")
    assert ran.code == 3 and "do not match their checksum" in ran.err and not Path("out.html").exists()
    assert cli("report", "bad.pt", "out.html", "--no-verify").code == 0


@pytest.mark.usefixtures("files")
def test_inspect_and_diff_write_the_page_beside_their_answer(cli: Cli) -> None:
    told = cli("inspect", "last.pt", "--stats", "--html", "a.html")
    assert told.code == 0 and "page -> a.html" in told.err
    assert "bins" in data_of(Path("a.html"))["checkpoint"]["tensors"]
    report_files.successor(Path())
    ran = cli("diff", "last.pt", "after.pt", "--ignore-prefix", "--html", "b.html")
    assert ran.code == 1
    difference = data_of(Path("b.html"))["difference"]
    assert difference["same"] is False
    assert "module.layers.0.attn.k.weight" in difference["only_a"]
    moved = {row["name"]: row.get("relative") for row in difference["changed"]}
    assert moved["module.layers.5.attn.q.weight"] == pytest.approx(0.1 / 1.1, rel=0.02)
    assert cli("inspect", "last.pt", "last.pt", "--html", "c.html").code == 2
    ran = cli("inspect", "last.pt", "--html", "-", "--json")
    assert ran.out.rstrip().endswith("</html>") and json.loads(ran.err)["path"] == "last.pt"


@pytest.mark.usefixtures("files")
def test_two_files_that_differ_are_a_page_and_success(cli: Cli) -> None:
    saved({"w": torch.ones(2)}, Path("a.pt"))
    saved({"w": torch.full((2,), torch.nan)}, Path("b.pt"))
    ran = cli("report", "a.pt", "b.pt", "out.html", "--json")
    assert (ran.code, ran.json["same"]) == (0, False)
    (change,) = data_of(Path("out.html"))["difference"]["changed"]
    assert change["nans"] == 2


def test_a_run_is_its_curves_its_evaluation_and_its_newest_checkpoint(tmp_path: Path) -> None:
    run = report_files.run(tmp_path)
    found = ckpttool.report(run, tmp_path / "out.html")
    assert (found.runs, [Path(path).name for path in found.checkpoints]) == ((str(run),), ["last.pt"])
    data = data_of(tmp_path / "out.html")
    assert [panel["quantity"] for panel in data["training"]["panels"]] == [
        "loss",
        "accuracy",
        "lr",
        "samples_per_second",
    ]
    assert data["training"]["seconds"][0]["backward"][0] == [0.1, 0.2]
    (evaluation,) = data["evaluations"]
    assert evaluation["confusion"] == {"classes": ["0", "1"], "cells": [[0, 0, 10], [1, 1, 10]]}
    assert evaluation["certificate"][0] is True
    assert len(data["rows"]) == 2


def test_a_certificate_that_does_not_hold_is_said_not_to(tmp_path: Path) -> None:
    run = report_files.run(tmp_path)
    path = run / "eval" / "eval.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps(stated | {"correct": 3, "accuracy": 0.15}))
    ckpttool.report(run, tmp_path / "a.html")
    said = [False, "does not hold: the prediction files give another correct, accuracy"]
    assert data_of(tmp_path / "a.html")["evaluations"][0]["certificate"] == said
    (run / "eval" / "rank1.safetensors").unlink()
    ckpttool.report(run, tmp_path / "b.html")
    assert "rank 1 of 2 is missing" in data_of(tmp_path / "b.html")["evaluations"][0]["certificate"][1]
    path.write_text("[]")
    with pytest.raises(ckpttool.errors.Damaged, match="is not a JSON object"):
        ckpttool.report(run, tmp_path / "c.html")


def test_runs_are_drawn_together_and_one_without_a_checkpoint_has_curves(tmp_path: Path) -> None:
    a = report_files.run(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "log.jsonl").write_text('{"epoch": 1, "loss": null, "train_loss": 2}\n')
    found = ckpttool.report(tmp_path / "b", tmp_path / "b.html")
    assert (found.checkpoints, found.runs) == ((), (str(tmp_path / "b"),))
    ckpttool.report(a, tmp_path / "ab.html", tmp_path / "b")
    loss = data_of(tmp_path / "ab.html")["training"]["panels"][0]["curves"]
    assert {curve["run"] for curve in loss} == {0, 1}
    assert loss[-1]["points"] == [[1.0, None]]


def test_a_long_curve_keeps_its_peaks() -> None:
    points = [(float(at), 1.0) for at in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[77] = (77.0, float("nan"))
    kept = _points(points)
    assert len(kept) <= MAX_POINTS + 2
    assert [54_321.0, 9.0] in kept and kept[0] == [0.0, 1.0] and kept[-1] == [99_999.0, 1.0]


def test_a_folder_that_is_neither_is_refused_as_inspect_refuses_it(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    ran = cli("report", tmp_path / "none", tmp_path / "out.html")
    assert ran.code == 3 and "folder without the index" in ran.err
