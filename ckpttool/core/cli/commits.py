"""Checkpoints in a git repository compared between commits: what the pre-commit hook and the action run.

python -m ckpttool.core.cli.commits keys FILE…               exit 1 where keys are not those of HEAD
python -m ckpttool.core.cli.commits comment BASE HEAD [--] PATHSPEC…   what changed, as Markdown
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import click

MARK = "<!-- ckpttool diff -->"  # by which the action finds its comment again
MOST = 60_000  # characters; GitHub takes 65,536
LINES = 60  # of one file

Keys = dict[str, tuple[str, tuple[int, ...]]]


def main(arguments: list[str]) -> int:
    """Run one of the two programs; return the exit code."""
    match arguments:
        case ["keys", *paths]:
            return _report_keys(paths)
        case ["comment", base, head, *specs]:
            click.echo(comment(base, head, specs[1:] if specs[:1] == ["--"] else specs))
            return 0
    click.echo(__doc__, err=True)
    return 2


def put(commit: str, path: str, folder: str) -> str | None:
    """Write a file as it is in a commit, Git LFS included, into a folder; return where, None if it is not."""
    output = os.path.join(folder, os.path.basename(path))
    with open(output, "wb") as file:
        command = ["git", "cat-file", "--filters", f"{commit}:./{path}"]
        shown = subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, check=False)
    return output if shown.returncode == 0 else None


# Keys.


def _report_keys(paths: list[str]) -> int:
    from ... import errors

    code = 0
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            before = put("HEAD", path, folder)
            try:
                said = None if before is None else changes(keys_of(before), keys_of(path))
            except errors.CkptToolError as error:
                click.echo(f"{path}: {error}".replace(folder, "HEAD"))
                code = 3
                continue
        if said:
            click.echo(f"{path}: {said}\n  if that is meant: SKIP=ckpttool-keys git commit …")
            code = code or 1
    return code


def keys_of(path: str) -> Keys:
    """Return the names of a checkpoint's tensors with their types and shapes. Raises CkptToolError."""
    from .. import formats

    with formats.open(path) as checkpoint:
        return {name: (tensor.dtype.name, tensor.shape) for name, tensor in checkpoint.tensors()}


def changes(before: Keys, after: Keys) -> str:
    """Say in one line which keys went, came or have another type or shape; empty where none did."""
    from .console import show_names

    kept = before.keys() & after.keys()
    parts = {
        "keys that are gone": sorted(before.keys() - after.keys()),
        "new keys": sorted(after.keys() - before.keys()),
        "of another type or shape": sorted(name for name in kept if before[name] != after[name]),
    }
    return "; ".join(f"{what}: {show_names(names)}" for what, names in parts.items() if names)


# A pull request.


def comment(base: str, head: str, specs: list[str]) -> str:
    """Return what changed in the checkpoints from where two commits parted to the second, as Markdown."""
    parts = [*_parts(base, head, specs)]
    shown = "\n\n".join([MARK, "### Checkpoints", *parts] if parts else [MARK, "No checkpoint changed."])
    return shown if len(shown) <= MOST else f"{shown[:MOST]}\n```\n\n(cut here)"


def _parts(base: str, head: str, specs: list[str]) -> Iterator[str]:
    command = ["git", "diff", "--name-status", "--no-renames", "-z", f"{base}...{head}", "--", *specs]
    listed = subprocess.run(command, capture_output=True, check=True)
    fields = os.fsdecode(listed.stdout).split("\0")[:-1]
    parted = subprocess.run(["git", "merge-base", base, head], capture_output=True, text=True, check=True)
    for status, path in zip(fields[::2], fields[1::2], strict=True):
        title = f"**{_escaped(path)}**"
        if status == "D":
            yield f"{title} was removed."
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield "\n\n".join([title, *_said(folder, path, parted.stdout.strip(), head, status)])


def _said(folder: str, path: str, base: str, head: str, status: str) -> Iterator[str]:
    for name in ("before", "after"):
        os.mkdir(os.path.join(folder, name))
    put(head, path, os.path.join(folder, "after"))
    called = os.path.basename(path)
    scanned = _ran(folder, "scan", f"after/{called}")
    if status == "A":
        yield f"New.\n\n{_fenced(_ran(folder, 'inspect', f'after/{called}'))}"
    else:
        put(base, path, os.path.join(folder, "before"))
        yield _fenced(_ran(folder, "diff", f"before/{called}", f"after/{called}"))
    if not scanned.endswith("1 safe"):
        yield f"It is not safe to unpickle:\n\n{_fenced(scanned)}"


def _ran(folder: str, *words: str) -> str:
    """Return the first lines that a command prints, errors too."""
    command, pipe, both = [sys.executable, "-m", "ckpttool", *words], subprocess.PIPE, subprocess.STDOUT
    ran = subprocess.run(
        command, cwd=folder, stdout=pipe, stderr=both, text=True, errors="replace", check=False
    )
    lines = ran.stdout.rstrip().splitlines()
    return "\n".join(lines[:LINES] + [f"and {len(lines) - LINES} lines more"] * (len(lines) > LINES))


def _fenced(text: str) -> str:
    """Return text that nothing in it can end, as code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _escaped(path: str) -> str:
    from .console import printable

    return re.sub(r"([\\`*_{}\[\]<>()#+!|@~&-])", r"\\\1", printable(path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
