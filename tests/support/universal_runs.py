"""Record universal folders of the recorded DeepSpeed runs: `python -m tests.support.universal_runs`.

Needs deepspeed, whose `ds_to_universal.py` makes them. Imports torch.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.support import deepspeed_runs, recording

RECORDED = deepspeed_runs.RECORDED.with_name("universal.tar.xz")

# A folder for each: tied and frozen weights, two groups, fp32 and bf16, each stage.
FOLDERS = (
    "zero1-fp32/global_step2",
    "zero2-fp32/global_step3",
    "zero2-bf16/global_step2",
    "zero3-fp32/global_step3",
)


def main() -> None:
    """Unpack the runs, convert the folders, and write the archive."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.load = functools.partial(torch.load, weights_only=False)
    from deepspeed.checkpoint import ds_to_universal

    with tempfile.TemporaryDirectory() as scratch:
        recording.unpack(deepspeed_runs.RECORDED, Path(scratch))
        for name in FOLDERS:
            made = SimpleNamespace(
                input_folder=f"{scratch}/{name}",
                output_folder=f"{scratch}/{name}_universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
            ds_to_universal.main(made)
            shutil.copytree(f"{scratch}/{name}_universal", f"{scratch}/out/{name}_universal")
        recording.pack(Path(scratch, "out"), RECORDED)


if __name__ == "__main__":
    main()
