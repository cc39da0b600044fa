"""What is in a page and when one is written; and the page in a real Chromium."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
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
from tests.support.report_files import WIDTHS, Shown, browser
from tests.support.running import Ran

# ---- What is in a page, and when one is written: data, sizes, escapes, policy, refusals; without a browser


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


def rounded(folder: Path, cli: Cli) -> Path:
    """Write a page about three layers, and the same in float16, where the second lost most."""
    layers = {
        f"layers.{i}.{m}.weight": np.linspace(0.1, 3, 7 + i, dtype="f4") for i in range(3) for m in "qv"
    }
    layers["layers.1.v.weight"] = np.array([1e-9, 1e5, 3.0], "f4")
    save_file(layers, folder / "a.safetensors")
    with np.errstate(over="ignore"):
        save_file({name: each.astype("f2") for name, each in layers.items()}, folder / "b.safetensors")
    assert cli("report", folder / "a.safetensors", folder / "b.safetensors", folder / "c.html").code == 0
    return folder / "c.html"


def test_a_page_has_what_was_lost_of_each_tensor(cli: Cli, tmp_path: Path) -> None:
    page = rounded(tmp_path, cli)
    rows = {row["name"]: row for row in data_of(page)["difference"]["changed"]}
    found = ckpttool.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").changed
    assert {*rows} == {change.name for change in found}
    for change in found:
        row = rows[change.name]
        assert change.loss and change.norms and row["nmse"] == change.nmse
        assert (row["saturated"], row["zeroed"]) == (change.loss.saturated, change.loss.zeroed)
        assert row["squares"] == pytest.approx(change.norms.a**2)
    assert (rows["layers.1.v.weight"]["saturated"], rows["layers.1.v.weight"]["zeroed"]) == (1, 1)


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


@pytest.mark.parametrize("name", ["log.jsonl", "eval.json", "best/eval.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_a_log_that_is_no_file_is_named(
    name: str, make: Callable[[Path], None], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "run" / "best").mkdir(parents=True)
    torch.save({"w": torch.ones(2)}, tmp_path / "run" / "last.pt")
    make(tmp_path / "run" / name)
    ran = cli("report", tmp_path / "run", tmp_path / "out.html")
    assert ran.code == 3 and f"run/{name}: " in ran.err, ran.err
    assert not (tmp_path / "out.html").exists()


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


# ---- The page in a real Chromium: nothing is asked for or complained of, and what one does with it works


KINDS = ["hostile"]
KINDS += [
    pytest.param(kind, marks=pytest.mark.long) for kind in ("one", "change", "run", "tiny", "empty", "same")
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def pages(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return report_files.pages(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fits_asks_for_nothing_and_nothing_is_complained_of(
    chromium: Any, pages: Any, kind: str
) -> None:
    for width, scheme in ((WIDTHS["wide"], "light"), (WIDTHS["narrow"], "dark")):
        with Shown(chromium, pages[kind], width=width, scheme=scheme) as shown:
            assert shown.page.inner_text("h1")
            assert (shown.complaints, shown.overflow()) == ([], 0)
            assert [url for url in shown.requests if not url.startswith(("file:", "data:"))] == []
            dark = (
                shown.page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
            )
            assert dark is (scheme == "dark")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["change", "one", "run"])
def test_axe_finds_no_violation(chromium: Any, pages: Any, kind: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe, of the extra dev"
    ).Axe()
    for width, scheme in ((WIDTHS["wide"], "light"), (WIDTHS["narrow"], "dark")):
        with Shown(chromium, pages[kind], width=width, scheme=scheme) as shown:
            shown.page.focus("[role=treegrid]")
            shown.page.keyboard.press("ArrowDown")
            shown.page.locator(".box:not(.rest, .outer)").last.click()
            found = axe.run(shown.page).response["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_text_of_the_file_is_shown_as_text(chromium: Any, pages: Any) -> None:
    with Shown(chromium, pages["hostile"]) as shown:
        shown.page.focus("[role=treegrid]")
        for _ in report_files.HOSTILE:
            shown.page.keyboard.press("ArrowDown")
        shown.page.fill("#search", "<script>")
        shown.page.wait_for_selector(".found:not(:empty)")
        assert shown.page.inner_text(".found") == "2 tensors found"
        assert shown.page.title() == "hostile.pt · ckpttool"
        assert shown.page.locator("script").count() == 2
        assert shown.page.locator("main img, main b, main script").count() == 0
        assert "\u202e" not in shown.page.content()
        assert "</script><script>" in shown.page.inner_text("#others")
        assert shown.complaints == []


def test_a_script_that_is_not_the_pages_own_does_not_run(chromium: Any, pages: Any, tmp_path: Path) -> None:
    text = pages["tiny"].read_text()
    (tmp_path / "added.html").write_text(
        text.replace("</body>", "<script>document.title='ran'</script></body>")
    )
    with Shown(chromium, tmp_path / "added.html") as shown:
        assert shown.page.title() == "tiny.pt · ckpttool"
        assert any("Content Security Policy" in each for each in shown.complaints)


def rows(shown: Shown) -> list[str]:
    return [text.strip() for text in shown.page.locator(".space .row .text").all_inner_texts()]


@pytest.mark.long
def test_search_finds_folding_folds_and_the_keyboard_does_both(chromium: Any, pages: Any) -> None:
    with Shown(chromium, pages["one"]) as shown:
        page = shown.page
        assert rows(shown)[:2] == ["model.module", "embed.weight"]
        page.focus("[role=treegrid]")
        page.keyboard.press("ArrowDown")
        active = page.locator("[role=treegrid]").get_attribute("aria-activedescendant")
        assert page.locator(f"#{active}").get_attribute("aria-expanded") == "true"
        page.keyboard.press("ArrowLeft")
        assert "embed.weight" not in rows(shown)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.inner_text(".detail h3") == "model.module.embed.weight"
        assert "model.module.head.weight" not in page.inner_text(".detail")
        page.fill("#search", "2 up")
        page.wait_for_selector(".found:not(:empty)")
        assert (page.inner_text(".found"), rows(shown)[-1]) == ("1 tensor found", "mlp.up.weight")
        page.fill("#search", "nowhere")
        page.locator(".found", has_text="0 tensors found").wait_for()
        assert page.locator(".space .row").all_inner_texts() == ["nothing found"]


@pytest.mark.long
def test_what_is_not_finite_is_marked_and_can_be_shown_alone(chromium: Any, pages: Any) -> None:
    with Shown(chromium, pages["one"]) as shown:
        page = shown.page
        page.select_option("#kind", "not finite (1)")
        page.wait_for_selector(".found:not(:empty)")
        assert rows(shown) == ["model.module", "layers", "2", "mlp.up.weight"]
        page.locator(".space .row").last.click()
        assert re.search(r"not finite\s+1 value", page.inner_text(".detail"))
        assert page.locator(".detail .histogram rect").count() > 5


@pytest.mark.long
def test_rows_are_sorted_by_a_column(chromium: Any, pages: Any) -> None:
    with Shown(chromium, pages["one"]) as shown:
        shown.page.click("[role=columnheader].bytes button")
        bytes_of = shown.page.locator("[role=columnheader].bytes")
        assert (bytes_of.get_attribute("aria-sort"), rows(shown)[1]) == ("descending", "layers")
        shown.page.click("[role=columnheader].name button")
        assert rows(shown)[:2] == ["model.module", "embed.weight"]


@pytest.mark.long
def test_the_map_opens_a_module_and_shows_it_in_the_tree(chromium: Any, pages: Any) -> None:
    with Shown(chromium, pages["one"]) as shown:
        page = shown.page
        page.locator(".box", has_text=re.compile("^layers$")).click(position={"x": 20, "y": 8})
        assert page.inner_text(".path [aria-current]") == "layers"
        assert page.inner_text(".detail h3") == "model.module.layers"
        page.locator(".box").first.focus()
        page.keyboard.press("Escape")
        assert page.inner_text(".path [aria-current]") == "model.module"


@pytest.mark.long
def test_a_difference_is_mapped_by_layer_and_matrix(chromium: Any, pages: Any) -> None:
    with Shown(chromium, pages["change"]) as shown:
        cells = {
            row.locator("th").inner_text(): [
                cell.get_attribute("class") or "" for cell in row.locator("td").all()
            ]
            for row in shown.page.locator(".heat tbody tr").all()
        }
        assert cells["attn.k.weight"] == ["gone", *["same"] * 5]
        assert cells["norm.weight"] == ["same", "odd", *["same"] * 4]
        assert cells["extra.weight"] == [""] * 5 + ["new"]
        far = [int(name[1]) for name in cells["attn.q.weight"] if name.startswith("h")]
        assert far == sorted(far) and len(set(far)) > 2
        first = shown.page.locator("#difference .wide tbody th").all_inner_texts()
        assert first[:2] == ["layers.1.norm.weight", "layers.5.attn.q.weight"]
    with Shown(chromium, pages["same"]) as shown:
        assert "They hold the same" in shown.page.inner_text("#difference")


@pytest.mark.long
def test_what_each_layer_lost_is_drawn(chromium: Any, cli: Cli, tmp_path: Path) -> None:
    with Shown(chromium, rounded(tmp_path, cli)) as shown:
        (figure,) = shown.page.locator("#difference .chart").all()
        assert figure.locator("figcaption").inner_text() == "NMSE by layer: layers.…"
        assert figure.locator("circle").count() == 6  # three layers, and the worst tensor of each
        figure.locator(".plot").focus()
        shown.page.keyboard.press("Home")
        assert figure.locator(".reading").inner_text().startswith("layer 0: layer ")
        heads = shown.page.locator("#difference .wide thead th").all_inner_texts()
        assert [head.split()[0] for head in heads][-4:] == ["NMSE", "saturated", "zeroed", "what"]
        assert shown.complaints == []


@pytest.mark.long
def test_a_run_has_curves_phases_and_its_evaluation(chromium: Any, pages: Any) -> None:
    with Shown(chromium, pages["run"]) as shown:
        page = shown.page
        titles = page.locator(".chart figcaption").all_inner_texts()
        assert titles == [
            "Loss",
            "Accuracy",
            "Learning rate",
            "Throughput, samples per second",
            "Seconds a step",
        ]
        assert "backward 0.200 s (50%)" in page.inner_text("#training")
        page.locator(".plot").first.focus()
        page.keyboard.press("Home")
        assert page.locator(".reading").first.inner_text().startswith("epoch 0.1: training 3")
        evaluation = page.inner_text("#evaluation-0")
        assert "Certificate: holds: recomputed from the prediction files, 20 samples of 2 ranks" in evaluation
        assert page.locator(".confusion td.right").all_inner_texts() == ["10", "10"]
        assert "run/best.pt" in page.inner_text("#checkpoints")
        assert page.locator("nav a").all_inner_texts().count("Evaluation") == 1


@pytest.mark.long
def test_two_evaluations_are_told_apart_in_the_menu(chromium: Any, tmp_path: Path) -> None:
    folder = report_files.run(tmp_path)
    shutil.copytree(folder / "eval", folder / "hard")
    ckpttool.report(folder, tmp_path / "run.html")
    with Shown(chromium, tmp_path / "run.html") as shown:
        menu = shown.page.locator("nav a").all_inner_texts()
        assert [name.split("/")[-1] for name in menu if name.startswith("Evaluation: ")] == ["eval", "hard"]


@pytest.mark.long
def test_a_hundred_thousand_tensors_are_there_in_a_second(chromium: Any, tmp_path: Path) -> None:
    values = np.ones((2, 2), np.float32)
    names = (f"layers.{i // 100}.experts.{i % 100 // 4}.w{i % 4}.weight" for i in range(100_000))
    save_file(dict.fromkeys(names, values), tmp_path / "many.safetensors")
    ckpttool.report(tmp_path / "many.safetensors", tmp_path / "many.html", values=False)
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    cdp = context.new_cdp_session(page)
    cdp.send("Performance.setTimeDomain", {"timeDomain": "threadTicks"})  # other processes don't count
    cdp.send("Performance.enable")
    page.goto((tmp_path / "many.html").as_uri())
    page.wait_for_selector("h1")
    metrics = {each["name"]: each["value"] for each in cdp.send("Performance.getMetrics")["metrics"]}
    assert metrics["ThreadTime"] < 1.5
    assert page.locator(".space .row").count() < 80
    page.fill("#search", "w3")
    page.wait_for_selector(".found:not(:empty)")
    assert page.inner_text(".found") == "25,000 tensors found"
    context.close()


@pytest.mark.long
def test_a_run_of_one_point_shows_it_in_the_middle_with_its_value(chromium: Any, tmp_path: Path) -> None:
    step = {"step": 4, "epochs": 1.0, "steps": 4, "loss": 2.31, "lr": 0.1, "samples_per_second": 800.0}
    epoch = {"epoch": 1, "loss": 2.31, "accuracy": 1.0, "correct": 9, "samples": 9, "lr": 0.1}
    (tmp_path / "log.jsonl").write_text(f"{json.dumps(step)}\n{json.dumps(epoch)}\n")
    ckpttool.report(tmp_path, tmp_path / "run.html")
    with Shown(chromium, tmp_path / "run.html") as shown:
        assert shown.complaints == []
        charts = shown.page.locator(".chart").all()
        assert len(charts) == 4
        for chart in charts:
            points = [
                [float(dot.get_attribute(at)) for at in ("cx", "cy")] for dot in chart.locator("circle").all()
            ]
            assert points and all(x == 231 and 10 <= y <= 208 for x, y in points)
            assert chart.locator(".reading").inner_text().startswith("epoch 1: ")
        assert "-" not in "".join(charts[1].locator("text").all_text_contents())  # no share is below zero
