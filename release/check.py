"""Whether this version can go out: `make release-check`. What it builds stays in dist/.

The sdist and from it the wheel are built, checked by twine and installed into a fresh environment, where
every command runs; then by uvx, where uv is, and as a zipapp.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import venv
from pathlib import Path

from ckpttool import __version__
from release import completion, manual
from release.artifacts import DIST, ROOT, build, run, zipapp
from release.walk import walk


def main() -> None:
    """Run all checks; end with an error at the first that fails."""
    _say(f"CHANGELOG.md has {__version__}, of {dated(__version__)}")
    wheel = build()
    _say(f"built {wheel.name}, and the sdist that it is made from")
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.glob("ckpttool-*"))
    _say("twine finds nothing wrong")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways: dict[str, list[object]] = {"a fresh environment": [installed(wheel, folder / "fresh")]}
        if uvx := shutil.which("uvx"):
            ways["uvx --from WHEEL"] = [uvx, "--quiet", "--from", wheel, "ckpttool"]
        else:
            print("--  uvx --from WHEEL is not tried: there is no uv", flush=True)
        venv.create(folder / "bare")  # without pip, and without what is in the environment of this program
        ways["a zipapp"] = [folder / "bare" / "bin" / "python", zipapp(wheel)]
        for number, (way, words) in enumerate(ways.items()):
            (folder / f"walk-{number}").mkdir()
            walk([*map(str, words)], folder / f"walk-{number}")
            _say(f"{way}: every command runs, without torch")


def dated(version: str) -> str:
    """Return the day of a version in CHANGELOG.md. Raises SystemExit where it has none."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)$", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"CHANGELOG.md: has no heading '## {version} (YYYY-MM-DD)'")
    return found[1]


def installed(wheel: Path, folder: Path) -> Path:
    """Install a wheel with what it needs; return the program. Raises AssertionError if files are missing."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    run(python, "-m", "pip", "check")
    missing = [name for name in (*manual.by_place(), *completion.by_place()) if not (folder / name).exists()]
    assert not missing, f"not installed: {missing}"
    return folder / "bin" / "ckpttool"


def _say(text: str) -> None:
    print(f"ok  {text}", flush=True)


if __name__ == "__main__":
    main()
