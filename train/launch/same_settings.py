"""What every rank must have been given: the same flags, and code that does the same. Imports torch.

On several machines each has a command line of its own. Ranks with other seeds or batch sizes would train on
without an error, on samples that are used twice or never.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

import ckpttool
from ckpttool.distributed import collectives
from ckpttool.errors import RanksDiffer
from train import console
from train.config.flags import Sections, flags_in, setting_of, shown

# What a machine may have of its own: where its files are, and how many processes load them.
OF_A_NODE = {"out", "download", "workers", "config", "like"}
# A path in them is a node's own too; what it leads to is compared by content, or only rank 0 reads it.
SPECS = ("data", "model", "task", "optimizer", "scheduler")
GIVEN = ("init", "resume", "every")


def compare(config: Sections) -> list[str]:
    """Check that all ranks were given the same settings; return what else differs, as warnings. A collective.

    Raises:
        RanksDiffer: on every rank, if settings differ, or the minor version of torch.
    """
    own = {"settings": _settings(config), "versions": versions(), "code": code(config)}
    of_ranks = collectives.gather(own)
    if differing := _differing([rank["settings"] for rank in of_ranks]):
        texts = [_shares(values) for values in differing.values()]
        hint = "give the same on every node; only paths and --workers may differ"
        raise RanksDiffer(f"ranks were started with different flags: {'; '.join(texts)}", hint=hint)
    warnings = []
    for name, values in _differing([rank["versions"] for rank in of_ranks]).items():
        text = f"{name} is {_shares(values)}"
        minor = {".".join(value.split(".")[:2]) for value in values}
        if name == "torch" and len(minor) > 1:
            raise RanksDiffer(text, hint="install the same version on every machine")
        warnings.append(f"{text}: the last bits may differ")
    for name, values in _differing([rank["code"] for rank in of_ranks]).items():
        other, most = _ranks_by_value(values)[:2]
        verb = "is" if len(other[1]) == 1 else "are"
        warnings.append(f"{name} of {_ranks(other[1])} {verb} not that of {_ranks(most[1])}")
    return warnings


def report(config: Sections) -> None:
    """`compare`, with its warnings on rank 0's stderr."""
    for warning in compare(config):
        if collectives.rank() == 0:
            console.warn(f"ranks differ: {warning}")


def versions() -> dict[str, str]:
    python = platform.python_version()
    return {"torch": str(torch.__version__), "ckpttool": ckpttool.__version__, "python": python}


def _settings(config: Sections) -> dict[str, str]:
    fields = {setting_of(field): field for field in flags_in(type(config))}
    return {name: shown(field, config[name]) for name, field in fields.items() if name not in OF_A_NODE}


def code(config: Sections) -> dict[str, str]:
    """Return the digest of each of the user's files that is loaded: a SPEC's, and what lies there."""
    return dict(_code(config))


def _code(config: Sections) -> Iterator[tuple[str, str]]:
    settings = config.plain()
    paths = [settings.get(spec, "").partition(":")[0] for spec in SPECS]
    paths = [path for path in paths if path.endswith(".py")]
    if not paths:  # there is nothing to look for among thousands of modules
        return
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    loaded = {getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())}
    files = {os.path.abspath(file) for file in loaded if isinstance(file, str)}
    for path in paths:
        folder = os.path.dirname(os.path.abspath(path)).rstrip(os.sep) + os.sep
        for file in sorted(file for file in files if file.startswith(folder)):
            below = file.removeprefix(folder)
            is_users = not below.startswith(".") and "site-packages" not in below
            if is_users and not file.startswith((f"{own}{os.sep}", os.path.dirname(ckpttool.__file__))):
                yield below, _digest(file)


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _differing(of_ranks: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the values of all ranks by name, of what differs; what some ranks lack, as a file that only one
    has loaded, is not compared."""
    names = [name for name in of_ranks[0] if all(name in of_rank for of_rank in of_ranks)]
    values = {name: [of_rank[name] for of_rank in of_ranks] for name in names}
    return {name: each for name, each in values.items() if len({_compared(name, v) for v in each}) > 1}


def _compared(name: str, text: str) -> str:
    """Return what is compared of a setting: of a path, what it ends in or only that it is given."""
    flag, _, value = text.partition(" ")
    if name in GIVEN:
        return flag
    place, colon, factory = value.partition(":")
    if name in SPECS and colon:
        return f"{os.path.basename(place)}:{factory}" if place != "folder" else place
    return text


def _ranks_by_value(values: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the ranks of each value; last those of the value that most have, or else rank 0."""
    counts = Counter(values)
    order = sorted(counts, key=lambda value: (counts[value], value == values[0]))
    return [(value, [rank for rank, of in enumerate(values) if of == value]) for value in order]


def _shares(values: Sequence[str]) -> str:
    texts = [f"{value} on {_ranks(ranks)}" for value, ranks in _ranks_by_value(values)]
    return ", and ".join([", ".join(texts[:-1]), texts[-1]])


def _ranks(ranks: Iterable[int]) -> str:
    *before, last = ranks
    shown = ", ".join(map(str, before[:6])) + ", …" * (len(before) > 6)
    return f"ranks {shown} and {last}" if before else f"rank {last}"
