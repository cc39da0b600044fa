"""Run every test that needs a GPU, and the loop beside a bare one; write docs/gpu.md. Without one, say so.

make gpu
"""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks.markdown import put_between_marks, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"


def main() -> int:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        print(f"no GPU on this machine: nothing was run, and {PAGE.relative_to(ROOT)} stays as it is")
        return 0
    code, tests = run_tests()
    ways = ([], ["--shard"])
    loops = "\n\n".join(benchmark(["--ranks", str(gpus), *flags]) for flags in ways)
    put_between_marks(PAGE, f"{about(gpus)}\n\n{tests}\n\n{loops}")
    return code


def about(gpus: int) -> str:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    on = f"{gpus} × {torch.cuda.get_device_name(0)}, {platform.machine()}"
    return f"{datetime.date.today().isoformat()}; {on}; {versions}, Python {platform.python_version()}."


def run_tests() -> tuple[int, str]:
    """Run the tests marked `gpu`; return pytest's exit code, and a table of them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", f"--junit-xml={report}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return code, table([["test", "", "seconds"], *map(row, cases)])


def row(case: ElementTree.Element) -> list[str]:
    """Return the line of a test: its name in words, and how it ended."""
    ends = [each for kind in ("failure", "error", "skipped") if (each := case.find(kind)) is not None]
    end = "passed"
    if ends:
        end = "**failed**" if ends[0].tag != "skipped" else f"not run: {ends[0].get('message', '')}"
    return [
        case.get("name", "").removeprefix("test_").replace("_", " "),
        end,
        f"{float(case.get('time', 0)):.1f}",
    ]


def benchmark(flags: list[str]) -> str:
    """Return the table of a benchmark of the training loop, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.training", "--steps", "20", "--batch", "512", *flags]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return (
        ran.stdout.strip()
        if ran.returncode == 0
        else f"`{' '.join(command[1:])}` failed: {ran.stderr[-400:]}"
    )


if __name__ == "__main__":
    sys.exit(main())
