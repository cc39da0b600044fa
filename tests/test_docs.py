"""README.md and docs/: their code, commands and links are right; each error's page is raised as it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpttool.core.cli import group
from tests.support.raised_errors import RAISED
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
