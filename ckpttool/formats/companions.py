"""The small files that a model needs next to its checkpoint: its configuration, its tokenizer."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ..checkpoint.checkpoint import Checkpoint
from ..errors import Damaged, OutputExists, UsageFault
from ..files.commit import replacing
from . import folders
from .shards import writing as sharding

# The most bytes of a file that is copied along; tokenizers have up to 40 MB.
MAX_BYTES = 100_000_000

# Names of files that belong to a model, whoever saved it. Sources: transformers, diffusers, mistral.
KNOWN = (
    *("*config*.json", "*tokenizer*.json", "*.model", "*.tiktoken", "tekken.json", "params.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template*", "*.jinja", "model_index.json", "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*"),
    *("modeling_*.py", "configuration_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py"),
)

# Files that serve a folder of DeepSpeed, and have nothing of their own.
OF_DEEPSPEED = ("latest", "zero_to_fp32.py", "zero_to_torch.py")

# A folder below that of the ranks, in which trainers keep a model's configuration and tokenizer.
BELOW = "huggingface"

OUTSIDE = "(a link out of the folder)"


def listed(checkpoint: Checkpoint, path: str, folder: str | None = None) -> tuple[list[str], list[str]]:
    """Return what lies in a folder and in `huggingface/` there that is not read: companions, and the rest.

    `folder` is the one that the user named; else it is that of the checkpoint's index, if it has one.
    """
    folder = folder or folders.folder_of(checkpoint)
    if folder is None:
        return [], []
    names = folders.other_files(checkpoint, path, folder)
    below = os.path.join(folder, BELOW)
    if BELOW in names and os.path.isdir(below) and not os.path.islink(below):
        inside = sorted(name for name in os.listdir(below) if not name.startswith("."))
        names = [name for name in names if name != BELOW] + [os.path.join(BELOW, name) for name in inside]
    companions = [name for name in names if _is_companion(folder, name)]
    rest = [
        name if _is_inside(folder, name) else f"{name} {OUTSIDE}"
        for name in names
        if name not in companions and name not in OF_DEEPSPEED
    ]
    return [os.path.join(folder, name) for name in companions], rest


def _is_companion(folder: str, name: str) -> bool:
    path, base = os.path.join(folder, name), os.path.basename(name)
    is_known = any(fnmatchcase(base, pattern) for pattern in KNOWN) and not base.endswith(sharding.INDEX)
    return (
        is_known and _is_inside(folder, name) and os.path.isfile(path) and os.path.getsize(path) <= MAX_BYTES
    )


def _is_inside(folder: str, name: str) -> bool:
    """Whether a file lies in the folder itself; a link may lead into the blobs of its own hub cache."""
    home, place = os.path.realpath(folder), os.path.realpath(os.path.join(folder, name))
    # The hub's cache has snapshots/REVISION/config.json -> ../../blobs/HASH.
    blobs = os.path.join(os.path.dirname(os.path.dirname(home)), "blobs")
    of_cache = os.path.basename(os.path.dirname(home)) == "snapshots" and os.path.dirname(place) == blobs
    return of_cache or os.path.commonpath([home, place]) == home


def targets(paths: Sequence[str], output: str, *, is_folder: bool, force: bool) -> list[str]:
    """Return where companions are copied to: into an output that is a folder, else next to it."""
    folder = output if is_folder else os.path.dirname(output) or "."
    places = [os.path.join(folder, os.path.basename(path)) for path in paths]
    for number, target in enumerate(places):
        if target in places[:number]:
            both = f"{paths[places.index(target)]} and {paths[number]}"
            raise UsageFault(
                f"{both} would both become {target}", hint="copy one by hand, without --companions"
            )
    for path, target in zip(paths, places, strict=True):
        if os.path.lexists(target) and not force and not _is_same(path, target):
            raise OutputExists(f"{target}: already exists", hint="write it anyway with --force")
    return places


def _is_same(path: str, other: str) -> bool:
    """Return whether two files hold the same bytes."""
    return os.path.isfile(other) and filecmp.cmp(path, other, shallow=False)


def copy(paths: Sequence[str], places: Sequence[str], settings: Mapping[str, object] | None = None) -> None:
    """Copy each companion to its place, whole or not at all; a config.json with these settings changed."""
    for path, place in zip(paths, places, strict=True):
        with open(path, "rb") as source, replacing(place) as file:
            if settings and os.path.basename(path) == "config.json":
                file.write(_with_settings(path, source.read(), settings))
            else:
                shutil.copyfileobj(source, file)


def _with_settings(path: str, text: bytes, settings: Mapping[str, object]) -> bytes:
    try:
        old = json.loads(text)
        return (json.dumps({**old, **settings}, indent=2) + "\n").encode()
    except (ValueError, TypeError, RecursionError):
        raise Damaged(path, "is no JSON object") from None
