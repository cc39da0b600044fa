"""Prefixes that wrappers put before the names of a state, told apart from modules of the same names.

A wrapper holds one module and passes calls on to it, so every name of what it wraps begins with the name of
that one attribute. A module of the model that happens to be called `module` has siblings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

# The prefixes that wrappers put before every key of what they wrap.
WRAPPERS = {
    "module.": "DistributedDataParallel or DataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_forward_module.": "Lightning Fabric",
    "_fpw_module.": "FairScale",
    "_module.": "Opacus",
}

# Entries of the wrapper itself next to the wrapped model: AveragedModel counts the models it has averaged.
COMPANIONS = {"n_averaged": "AveragedModel"}

# Prefixes that tell several models in one state apart.
OFFERED = {
    "ema.module.": "an average kept next to the model, in the attribute `ema`",
    "ema_model.": "an average kept next to the model, in the attribute `ema_model`",
    "online_model.": "the model, where an average keeps it next to `ema_model`",
}

LIGHTNING = "pytorch-lightning_version"  # the entry that marks a file of Lightning
# Names that a LightningModule often gives the model it holds.
ATTRIBUTES = ("model.", "net.", "module.", "network.", "backbone.")
MAX_NESTING = 8  # wrappers inside wrappers that are recognised

_WRAPPER = "|".join(map(re.escape, WRAPPERS))
_CHAIN = re.compile(rf"(?:{_WRAPPER}){{1,{MAX_NESTING}}}")
_LINK = re.compile(_WRAPPER)


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """A prefix at the front of keys.

    Attributes:
        prefix: with its dot; nested wrappers as a chain (`module._orig_mod.`).
        keys: how many carry it.
        of: how many there are.
        wrapper: what puts it there.
        certain: an uncertain prefix is offered, and never stripped unasked.
        reason: why it is uncertain.
    """

    prefix: str
    keys: int
    of: int
    wrapper: str
    certain: bool = True
    reason: str = ""


def found_prefixes(
    names: Iterable[str], versions: Mapping[object, object] | None = None, *, lightning: bool = False
) -> list[FoundPrefix]:
    """Return the prefixes of wrappers that keys begin with, the most frequent first, then possible ones."""
    keys = list(names)
    counts: Counter[str] = Counter(match[0] for match in map(_CHAIN.match, keys) if match)
    chains: Counter[str] = Counter()
    for chain, count in counts.items():
        for end in (link.end() for link in _LINK.finditer(chain)):
            chains[chain[:end]] += count
    companions = [name for name in COMPANIONS if name in keys]
    judged = [
        _judged(chain, count, len(keys), companions, versions or {}) for chain, count in chains.most_common()
    ]
    return [*judged, *_offered(keys, {prefix.prefix for prefix in judged}, lightning)]


def _judged(
    chain: str, count: int, of: int, companions: list[str], versions: Mapping[object, object]
) -> FoundPrefix:
    """Return a chain of wrappers at the front of keys, with the reason against it when there is one."""
    links = _LINK.findall(chain)
    last, wrappers = links[-1], [WRAPPERS[link] for link in links]
    if companions and links[0] == "module.":
        wrappers[0] = COMPANIONS[companions[0]]
    sibling = _sibling(chain, versions)
    reason = ""
    if last == "module." and sibling:
        reason = f"there may be a module of that name next to '{sibling}'"
    elif last == "module." and count + len(companions) < of:
        reason = f"{of - count} keys lack it: it may be a module of that name"
    return FoundPrefix(chain, count, of, " around ".join(wrappers), not reason, reason)


def _sibling(chain: str, versions: Mapping[object, object]) -> str:
    """Return a sibling of the module that ends a chain; a wrapper's module has none, so `""`."""
    path = chain.removesuffix(".")
    above = path.rpartition(".")[0]
    start = f"{above}." if above else ""
    others = (name for name in versions if isinstance(name, str) and name.startswith(start))
    names = (start + name[len(start) :].partition(".")[0] for name in others if name not in ("", above))
    return next((name for name in names if name != path), "")


def _offered(keys: list[str], known: set[str], lightning: bool) -> Iterator[FoundPrefix]:
    wanted = dict(OFFERED)
    if lightning:
        wanted |= dict.fromkeys(ATTRIBUTES, "an attribute of a LightningModule")
    prefixes = tuple(wanted)
    carrying = [name for name in keys if name.startswith(prefixes)]
    for prefix, wrapper in wanted.items():
        count = sum(name.startswith(prefix) for name in carrying) if prefix not in known else 0
        if count:
            yield FoundPrefix(prefix, count, len(keys), wrapper, False, "only its name says so")


def inner_prefixes(names: Iterable[str]) -> list[FoundPrefix]:
    """Return the prefixes of wrappers around parts of a model: `0._orig_mod.weight`."""
    keys = list(names)
    inner = [prefix for prefix in WRAPPERS if prefix[0] == "_"]
    inside = [name for name in keys if "._" in name]
    counts = Counter(prefix for name in inside for prefix in inner if f".{prefix}" in name)
    return [FoundPrefix(prefix, count, len(keys), WRAPPERS[prefix]) for prefix, count in counts.most_common()]
