"""README.md and docs/: Python blocks pass mypy --strict; commands, flags and links lead to what is there.

A page's blocks follow each other in one program. What the reader has (a model, batches) is declared here;
functions without annotations are allowed, and their bodies are checked all the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.cli import group
from tests.support.running import ROOT
from train.config.command_line import train_parser

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
