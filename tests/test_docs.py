"""Every Python block of README.md and docs/ passes mypy --strict, as a reader would paste it.

A page's blocks follow each other in one program. What the reader has (a model, batches) is declared here;
functions without annotations are allowed, and their bodies are checked all the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.running import ROOT

PAGES = {
    page.relative_to(ROOT).as_posix(): re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
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


def test_every_block_of_the_pages_is_typed(tmp_path: Path) -> None:
    for page, blocks in PAGES.items():
        if blocks:
            program = tmp_path / f"{Path(page).stem.replace('-', '_')}.py"
            program.write_text("\n".join([READERS.get(page, ""), *blocks]), encoding="utf-8")
    flags = ("--strict", "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls")
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, "--config-file=", cache, "--no-error-summary", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
