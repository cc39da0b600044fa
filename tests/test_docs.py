"""README.md and docs/: their code, commands and links are right; each error's page is raised as it says."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_file
from torch import nn

import ckpttool
from ckpttool.core.cli import group
from tests.support.comparing import prefixed
from tests.support.running import ROOT
from train import main
from train.config.command_line import train_parser

# ---- README.md and docs/: Python blocks pass mypy --strict; commands, flags and links lead to what is there
# A page's blocks follow each other in one program. What the reader has (a model, batches) is declared here;
# functions without annotations are allowed, and their bodies are checked all the same.


DOCS = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {
    page.relative_to(ROOT).as_posix(): BLOCK.findall(page.read_text(encoding="utf-8"))
    for page in (ROOT / "README.md", *DOCS)
}

READERS = {
    "README.md": "import torch\nclass MyModel(torch.nn.Module): ...\n",
    "docs/batchnorm.md": """
import ckpttool
import torch
from ckpttool import batchnorm
model: torch.nn.Module
ddp: torch.nn.Module
optimizer: torch.optim.Optimizer
loss: torch.nn.CrossEntropyLoss
batches: list[tuple[torch.Tensor, torch.Tensor]]
samples: int
steps: int
positions_of_each_layer: list[int]
""",
    "docs/distributed.md": """
import torch
model: torch.nn.Module
optimizer: torch.optim.Optimizer
rank: int
world_size: int
""",
    "docs/metrics.md": """
import json
from pathlib import Path
from typing import Any
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
model: torch.nn.Module
device: torch.device
rank: int
test_set: TensorDataset
batches: list[tuple[torch.Tensor, torch.Tensor]]
""",
}


ALLOWED = "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-warn-unreachable"


@pytest.mark.lint
@pytest.mark.timeout(300)  # half a minute alone, where mypy has left no cache
def test_every_block_of_the_pages_is_typed(tmp_path: Path) -> None:
    for page, blocks in PAGES.items():
        if blocks:
            program = tmp_path / f"{Path(page).stem.replace('-', '_')}.py"
            program.write_text("\n".join([ALLOWED, READERS.get(page, ""), *blocks]), encoding="utf-8")
    mypy = [sys.executable, "-m", "mypy", "--no-error-summary", tmp_path]
    checked = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + DOCS
NO_COMMANDS = {"COMMAND", "help", "index"}  # docs/metrics.md hashes a line that begins with the last

by_page = pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)


def commands_on(page: Path, program: str) -> list[str]:
    """Return what follows the program's name: in code blocks, and between backticks."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(rf"^(?:    )?(?:\$ )?(?:torchrun .*|python )?{program} (.*)$", text, re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line.partition("  #")[0] for line in blocks] + [
        span.partition(f"{program} ")[2] for span in spans if f"{program} " in span
    ]


def flags_of(command: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", command.partition(" -- ")[0]))


@by_page
def test_every_command_on_a_page_is_there_and_has_its_flags(page: Path) -> None:
    offenders = []
    for line in commands_on(page, "ckpttool"):
        name = line.split()[0]
        if name in NO_COMMANDS or not re.fullmatch("[a-z][a-z-]+", name):
            continue
        command = group.commands.get(name)
        params = command.params if command else []
        known = {flag for one in params for flag in (*one.opts, *one.secondary_opts)}
        if not command or flags_of(line) - known - {"--help"}:
            offenders.append(line)
    assert offenders == []


@by_page
def test_every_flag_of_the_trainer_on_a_page_is_there(page: Path) -> None:
    known = set(train_parser()._option_string_actions)
    assert [line for line in commands_on(page, "train/main.py") if flags_of(line) - known] == []


@by_page
def test_every_link_on_a_page_leads_somewhere(page: Path) -> None:
    offenders = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors_of(target))):
            offenders.append(link)
    assert offenders == []


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- docs/errors/: each page's error is raised by what it says, and its commands answer as it shows ---


ERROR_PAGES = {
    page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "errors").glob("*.md"))
}
SOURCE = """
from torch import nn

def net(classes=3):
    return nn.Sequential(nn.Linear(4, classes), nn.BatchNorm1d(classes))
"""
LAST = Path("last.pt")


def net(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, classes), nn.BatchNorm1d(classes))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 3), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight


def load(path: str) -> None:
    net().load_state_dict(torch.load(path))


def of_ddp() -> None:
    torch.save(prefixed(net().state_dict(), "module."), LAST)
    load("last.pt")


def of_compile() -> None:
    torch.save(prefixed(net().state_dict(), "_orig_mod."), LAST)
    load("last.pt")


def without_counter() -> None:
    state = net().state_dict()
    del state["1.num_batches_tracked"]
    torch.save(state, LAST)
    load("last.pt")


def with_arguments() -> None:
    torch.save({"model": net().state_dict(), "args": argparse.Namespace(lr=0.1)}, LAST)
    torch.load(LAST)


def tied() -> None:
    state = Tied().state_dict()
    torch.save(state, LAST)
    save_file(state, "model.safetensors")


def of_a_gpu() -> None:
    torch.save(net().state_dict(), "of-cpu.pt")
    with ckpttool.open("of-cpu.pt") as checkpoint:
        ckpttool.save(checkpoint, LAST, device="cuda:0")
    torch.load(LAST)


def of_ten_classes() -> None:
    torch.save(net(10).state_dict(), LAST)
    load("last.pt")


def one_value() -> None:
    net().train()(torch.ones(1, 4))


def cut_short() -> None:
    torch.save(net().state_dict(), LAST)
    LAST.write_bytes(LAST.read_bytes()[:-200])
    torch.load(LAST)


def pointer() -> None:
    LAST.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    torch.load(LAST, weights_only=False)


def old_and_cut_short() -> None:
    torch.save(net().state_dict(), LAST, _use_new_zipfile_serialization=False)
    LAST.write_bytes(LAST.read_bytes()[:-2])
    torch.load(LAST)


def load_tied() -> None:
    model = Tied()
    assert not load_model(model, "model.safetensors")[0]
    assert model.head.weight is model.embed.weight


RAISED: dict[str, tuple[Callable[[], None], int, Callable[[], object] | None]] = {
    "unexpected-key-module": (of_ddp, 0, lambda: load("model.pt")),
    "orig-mod": (of_compile, 0, lambda: load("model.pt")),
    "num-batches-tracked": (without_counter, 0, lambda: load("model.pt")),
    "weights-only": (with_arguments, 0, lambda: net().load_state_dict(torch.load("safe.pt")["model"])),
    "tensors-share-memory": (tied, 0, load_tied),
    "cuda-device": (of_a_gpu, 0, lambda: load("model.pt")),
    "size-mismatch": (of_ten_classes, 1, None),
    "one-value-per-channel": (one_value, 0, None),
    "pytorch-stream-reader": (cut_short, 3, None),
    "invalid-load-key": (pointer, 3, None),
    "unexpected-eof": (old_and_cut_short, 3, None),
}
"""By page: what raises its error, the exit code of its commands, and what works after them."""


def test_every_page_has_a_test_and_a_line_in_the_list() -> None:
    assert {*ERROR_PAGES} == {*RAISED, "monitored-barrier"}
    listed = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name, text in ERROR_PAGES.items():
        assert f"[{text.splitlines()[0].removeprefix('# ')}](errors/{name}.md)" in listed


def title(page: str) -> str:
    """Return the error text that a page is about, up to what differs from case to case."""
    found = re.match(r"# `(.+)`$", ERROR_PAGES[page].splitlines()[0])
    assert found
    return found[1].partition("…")[0]


@pytest.mark.parametrize("page", RAISED)
def test_the_error_is_raised_and_the_commands_answer_as_the_page_shows(
    page: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(SOURCE)
    raises, code, works = RAISED[page]
    with pytest.raises(Exception) as caught:
        raises()
    assert title(page) in str(caught.value)
    for command, shown in sessions(page):
        program, *words = shlex.split(command)
        if program == "ckpttool":
            ran = cli(*words)
            assert ran.code == code, ran.err
            answer = ran.err + ran.out
        else:
            assert main.main(words[1:]) == code
            answer = capsys.readouterr().out
        lines = [*map(alike, answer.splitlines())]
        assert [line for line in map(alike, shown) if line not in lines] == [], answer
    if works:
        works()


def sessions(page: str) -> list[tuple[str, list[str]]]:
    """Return each command of a page with the lines that it answers there."""
    found: list[tuple[str, list[str]]] = []
    for line in re.findall(r"^    (\S.*)$", ERROR_PAGES[page], re.MULTILINE):
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line)
    return found


def alike(line: str) -> str:
    """Return a line without sizes, times and names of storages, which differ."""
    return re.sub(r"\(.* s\)$|'\d+'", "", line.strip())


def leave_one_out(rank: int, world_size: int) -> str:
    if rank:
        return ""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_monitored_barrier_names_the_rank_and_not_where_it_is(fresh_ranks: Any) -> None:
    assert title("monitored-barrier") in fresh_ranks(2, leave_one_out)[0]
