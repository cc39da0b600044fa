"""Files to be shown, and a real browser: what it complains of, asks for and shows."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from tests.support.comparing import prefixed, saved, saved_predictions

# ---- Files to be shown: a model with its optimizer, its successor, names made to mislead, and a run's folder


LAYERS = 6
HOSTILE = [
    "<script>document.title='ran'</script>.w",
    "</script><script>document.title='ran'</script>.w",
    "<img src=x onerror=document.title='ran'>",
    '"onload="document.title=1',
    "<!--",
    "\u202egnp.exe",
    "\u2028line",
    "\udc80lone",
    "${x}",
    "$title",
    "&lt;b&gt;",
    "a..b",
    "",
    "a",
    "__proto__.constructor",
    "hasOwnProperty",
    "\U0001f600.x",
    "\U0001f601.x",
    "層.重み",
    "n" * 3000,
    ".".join("d" * 2000),
]


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a small transformer's state: numbered layers, tied embeddings, two dtypes, one NaN."""
    make = torch.Generator().manual_seed(seed)
    state = {"embed.weight": torch.randn(50, 16, generator=make)}
    for layer in range(LAYERS):
        for name, shape in (("attn.q", (16, 16)), ("attn.k", (4, 16)), ("mlp.up", (40, 16))):
            weight = torch.randn(*shape, generator=make) * 0.02
            dtype = torch.float32 if name == "attn.q" else torch.bfloat16
            state[f"layers.{layer}.{name}.weight"] = weight.to(dtype)
        state[f"layers.{layer}.norm.weight"] = torch.ones(16)
    state["layers.2.mlp.up.weight"][1, 2] = float("nan")
    state["head.weight"] = state["embed.weight"]
    return state


def checkpoint(folder: Path) -> Path:
    """Write a training checkpoint: a wrapped model, an optimizer, and other values."""
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.AdamW([("w", parameter)], lr=0.5)
    parameter.sum().backward()
    optimizer.step()
    contents = {"model": prefixed(model(), "module."), "optimizer": optimizer.state_dict(), "epoch": 7}
    return saved(contents, folder / "last.pt")


def successor(folder: Path) -> Path:
    """Write the model's state after a training: tensors moved, one gone, one new, one of another shape."""
    state = {name: tensor.clone() for name, tensor in model().items()}
    for layer in range(LAYERS):
        state[f"layers.{layer}.attn.q.weight"] *= 1 + 10.0 ** (layer - LAYERS)
    del state["layers.0.attn.k.weight"]
    state["layers.5.extra.weight"] = torch.ones(2)
    state["layers.1.norm.weight"] = torch.ones(17)
    return saved(state, folder / "after.pt")


def hostile(folder: Path) -> Path:
    """Write a checkpoint whose names and texts are made to break a page."""
    state = {name: torch.ones(2) for name in HOSTILE}
    text = "</script><script>document.title='ran'</script>"
    return saved({"model": state, "<b>note</b>": text, "epoch": 1}, folder / "hostile.pt")


def run(folder: Path) -> Path:
    """Write a run's folder: a log, two checkpoints, and an evaluation with its prediction files."""
    made = folder / "run"
    (made / "eval").mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, 41):
        times = {"seconds": 0.4, "data_seconds": 0.1, "forward_seconds": 0.1, "backward_seconds": 0.2}
        entry = {"step": step, "epochs": step / 10, "steps": 1, "loss": 3 / step, "lr": 0.1 / step, **times}
        entry["samples_per_second"] = 1000 + step
        lines.append(entry)
        if step % 10 == 0:
            lines.append(
                {"epoch": step // 10, "loss": 4 / step, "accuracy": 1 - 1 / step, "train_loss": 3 / step}
            )
    (made / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("last.pt", "best.pt"):
        saved({"model": prefixed(model(), "module.")}, made / name)
    saved_predictions(made / "eval", 2, 20)
    from ckpttool.metrics.certificate import read, recompute

    certificate = recompute([read(path) for path in sorted((made / "eval").glob("*.safetensors"))])
    (made / "eval" / "eval.json").write_text(json.dumps({"checkpoint": "<b>", **certificate.statement()}))
    return made


def pages(folder: Path) -> dict[str, Path]:
    """Write each kind of page, and return them by what they are about."""
    files = {"one": checkpoint(folder), "hostile": hostile(folder), "run": run(folder)}
    files |= {"tiny": saved({"w": torch.ones(1)}, folder / "tiny.pt")}
    files |= {"empty": saved({}, folder / "empty.pt")}
    before = saved(model(), folder / "before.pt")
    made = {name: folder / f"{name}.html" for name in (*files, "change", "same")}
    for name, path in files.items():
        ckpttool.report(path, made[name])
    ckpttool.report(before, made["change"], successor(folder))
    ckpttool.report(before, made["same"], before)
    return made


# ---- Pages in a real browser: what it complains of, asks for and shows --------------------------------


NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 180_000  # milliseconds for a page, or for something on it: other programs may have the machine
WIDTHS = {"wide": 1280, "narrow": 400}


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Start the system's Chromium, without a window; skip where there is none, or no playwright."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs Chromium, which is not installed (apt-get install chromium)")
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, timeout=PATIENCE)
        yield started
        started.close()


class Shown:
    """A page, by its file or URL, in a window of its own, and what the browser said of it."""

    def __init__(self, browser: Any, page: Path | str, *, width: int = 1280, scheme: str = "light") -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(page if isinstance(page, str) else page.resolve().as_uri())
        self.page.wait_for_selector("h1")

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def overflow(self) -> int:
        """Return how many pixels the page is wider than its window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.page.evaluate(script))
