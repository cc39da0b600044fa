"""The page in a real Chromium: nothing is asked for or complained of, and what one does with it works."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpttool
from tests.support import report_files
from tests.support.browser import WIDTHS, Shown, browser

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
