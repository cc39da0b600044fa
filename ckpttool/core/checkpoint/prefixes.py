"""Wrappers' prefixes before the names of a state, and new names for its keys.

A wrapper holds one module and passes calls on to it, so every name of what it wraps begins with the name of
that one attribute. A module of the model that happens to be called `module` has siblings.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import methodcaller
from typing import Any, NamedTuple

from ...errors import Collision, UsageFault
from .. import system
from ..inert_pickle.values import OrderedDict_, remade
from ..words import in_short

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


# ---- New names for keys; a renaming that gives two keys one name is refused.


KEY_SECONDS: float = 2  # of one expression on one key
TICK = 0.25
MAX_LEVELS = 200  # modules in each other that are followed: no model has more, a name of many dots may


@dataclass(frozen=True, slots=True)
class Renaming:
    """The new names of a state's keys.

    Attributes:
        names: old name -> new name for every key, in order.
        also: the renamings of other states of the file, by their dotted paths.
    """

    names: Mapping[str, str]
    also: Mapping[str, Renaming] = field(default_factory=dict)

    @property
    def renamed(self) -> int:
        """The number of names that change."""
        return sum(old != new for old, new in self.names.items())

    def modules(self) -> Callable[[str], str]:
        """Return a function from a module's old path to its new one; `""` is the root module.

        A key and its new name are compared from their ends, part by part: when `module.conv.weight` becomes
        `conv.weight`, `module.conv` becomes `conv` and `module` the root. When the number of parts changes,
        the comparison stops where they differ. A module without keys moves with the nearest module above it.
        """
        paths: dict[str, str] = {}
        for key, new_key in self.names.items():
            if key.count(".") > MAX_LEVELS:
                continue
            old, new = parent(key), parent(new_key)
            same_depth = key.count(".") == new_key.count(".")
            while old not in paths:
                paths[old] = new
                if not old or not new or not (same_depth or _last(old) == _last(new)):
                    break
                old, new = parent(old), parent(new)
        for old, new in [*paths.items()]:  # what was between a module and its new place wrapped it
            while (old := parent(old)) and old not in paths and old.startswith(new and f"{new}."):
                paths[old] = new

        def rule(path: str) -> str:
            above, rest = path, ""
            while above and above not in paths and above.count(".") < MAX_LEVELS:
                above, rest = parent(above), f".{_last(above)}{rest}"
            return (paths.get(above, above) + rest).removeprefix(".")

        return rule


def parent(path: str) -> str:
    """Return the path of the enclosing module; `""` for one at the top."""
    return path.rpartition(".")[0]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def with_versions(
    new: dict[Any, Any],
    versions: dict[object, object] | None,
    renaming: Renaming,
    wrappers: Mapping[str, object] | None = None,
) -> dict[Any, Any]:
    """Return a state's dict, with torch's `_metadata` under the new paths if it is one that has some."""
    if isinstance(new, OrderedDict_) and isinstance(new.attributes, dict) and versions is not None:
        moved = _renamed_versions(versions, renaming, wrappers or {})
        new.attributes = {**new.attributes, "_metadata": moved}
    return new


def _renamed_versions(
    versions: dict[object, object], renaming: Renaming, wrappers: Mapping[str, object]
) -> dict[object, object]:
    """Return `_metadata` under the new paths, without those of wrappers, which enclose no key any more."""
    new = remade(versions, wrappers.items())
    module = renaming.modules()
    before, after = _enclosing(renaming.names), _enclosing(renaming.names.values())
    # The wrapped module follows its wrapper, so its entry replaces the wrapper's under their common new path.
    for path, entry in versions.items():
        moved = module(path) if isinstance(path, str) else path
        if not isinstance(moved, str) or path not in before or moved in after:
            new[moved] = entry
    return new


def _enclosing(names: Iterable[str]) -> set[str]:
    """Return the paths of all modules that enclose a key, the root included, MAX_LEVELS deep."""
    paths = {""}
    for name in names:
        path = parent(name) if name.count(".") <= MAX_LEVELS else ".".join(name.split(".", MAX_LEVELS)[:-1])
        while path not in paths:
            paths.add(path)
            path = parent(path)
    return paths


def strip_names(
    names: Iterable[str], prefix: str | None = None, *, repeat: bool = False, anywhere: bool = False
) -> Renaming:
    """Strip a prefix from the names that carry it, or those of USUAL in any order; other names stay."""
    if prefix is None:
        names = [*names]
        if repeat or anywhere or COMPILED in "\n".join(names):
            expression = _usual(names, repeat=repeat, anywhere=anywhere)
            return checked(names, partial(expression.sub, r"\1"), PREFIXES)
        prefix = DDP  # of 100,000 names in a fifth of the time
    _require(prefix)
    hints = PREFIXES._replace(dots=lambda old, new: f"with its dot: --prefix {prefix}.")
    if repeat and anywhere and prefix.endswith("."):
        return checked(names, partial(_without, prefix.split(".")[:-1]), hints)
    if not repeat and not anywhere:
        return checked(names, methodcaller("removeprefix", prefix), hints)
    # Match only where a part begins, so that `submodule.` is never taken for `module.`.
    expression = re.compile(rf"(^{'|[.]' if anywhere else ''})({re.escape(prefix)}){'+' if repeat else ''}")
    return checked(names, partial(expression.sub, r"\1"), hints)


# What is stripped where no prefix is named: what DDP and torch.compile put there.
USUAL = DDP, COMPILED = "module.", "_orig_mod."


def _usual(names: Iterable[str], *, repeat: bool, anywhere: bool) -> re.Pattern[str]:
    """Return the expression of the prefixes of USUAL: DDP's once, unless all are to go."""
    of_ddp, compiled = map(re.escape, USUAL)
    begin = "(^|[.])" if anywhere else "(^)"
    if repeat:
        return re.compile(f"{begin}(?:{of_ddp}|{compiled})+")
    inside = re.compile(f"(?:{compiled})+")
    rests = [name[found.end() :] for name in names if (found := inside.match(name))]
    wraps = all(rest.startswith(DDP) for rest in rests)  # else the compiled model has a module of that name
    around = f"{of_ddp}(?:{compiled})*|(?:{compiled})+"
    return re.compile(f"{begin}(?:{around}{f'(?:{of_ddp})?(?:{compiled})*' if wraps else ''})")


def _without(parts: list[str], name: str) -> str:
    """Return a name without a run of parts, wherever it is, until it is nowhere: in one pass."""
    *modules, last = name.split(".")
    left: list[str] = []
    for module in modules:
        left.append(module)
        if left[-len(parts) :] == parts:
            del left[-len(parts) :]
    return ".".join([*left, last])


def add_names(names: Iterable[str], prefix: str = "module.") -> Renaming:
    """Put a prefix before every name: the inverse of `strip_names`."""
    _require(prefix)
    return checked(names, lambda name: prefix + name, PREFIXES)


def _require(prefix: str) -> None:
    if not prefix:
        raise UsageFault("the prefix is empty", hint="give it with its dot: --prefix module.")


class Hints(NamedTuple):
    """The way out of a refused renaming."""

    same: str  # two keys would get the same name
    none: str  # a key would be left without a name
    # For (old, new) where the new name has a dot too many: no module of torch has an empty name. None allows.
    dots: Callable[[str, str], str] | None = None


PREFIXES = Hints(
    "the two differ only in the prefix: keep them distinct, or remove one first", "give a shorter --prefix"
)
MAPS = Hints(
    "give a --map that keeps them distinct, or remove one first", "give a --map that leaves something"
)


def checked(names: Iterable[str], rule: Callable[[str], str], hints: Hints) -> Renaming:
    """Return the renaming that a rule makes, refused when it is not one-to-one."""
    olds = [*names]
    news = [*map(rule, olds)]
    # All at once: each of 100,000 names is looked at only if something is wrong with one.
    if len({*news}) == len(news) and "" not in news and ".." not in f".{'.'.join(news)}.":
        return Renaming(dict(zip(olds, news, strict=True)))
    owners: dict[str, str] = {}  # new name -> old name
    for old, new in zip(olds, news, strict=True):
        if new in owners:
            first, second, both = map(in_short, (owners[new], old, new))
            raise Collision(f"'{first}' and '{second}' would both be named '{both}'", hint=hints.same)
        if not new:
            raise Collision(f"'{in_short(old)}' would be left without a name", hint=hints.none)
        if hints.dots and new != old and _has_empty_part(new) and not _has_empty_part(old):
            what = f"'{in_short(old)}' would be named '{in_short(new)}', with a dot too many"
            raise UsageFault(what, hint=hints.dots(old, new))
        owners[new] = old
    return Renaming({old: new for new, old in owners.items()})


def _has_empty_part(name: str) -> bool:
    return ".." in f".{name}."


def rename_names(names: Iterable[str], rules: Iterable[tuple[str, str]]) -> Renaming:
    """Apply regular expressions to every name, in order, as `re.sub` does, each in limited time."""
    rules = list(rules)
    try:
        with _time_limit() as watch:
            hints = MAPS._replace(dots=partial(_with_its_dot, rules, watch))
            return checked(names, _applied(rules, watch), hints)
    except TooSlow:
        where = f"'{watch.expression[:80]}' takes more than {KEY_SECONDS} s on the key '{watch.name[:80]}'"
        hint = "write it without repetitions inside repetitions, such as (.+)+ or (a|a)*"
        raise UsageFault(f"--map: {where}", hint=hint) from None
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        raise UsageFault(f"--map: {error}", hint="for example: --map '^backbone\\.=model.'") from None


class TooSlow(Exception):
    """An expression is still being matched with one key after KEY_SECONDS."""


@dataclass(slots=True)
class _Watch:
    """What is being matched, and since when in seconds of this thread's work."""

    expression: str = ""
    name: str = ""
    begun: float = inf

    def begin(self, expression: str, name: str) -> None:
        self.expression, self.name, self.begun = expression, name, time.thread_time()

    def check(self, *_: object) -> None:
        if time.thread_time() - self.begun > KEY_SECONDS:
            raise TooSlow


@contextmanager
def _time_limit() -> Iterator[_Watch]:
    """Raise TooSlow in the matching of one key that takes too long; only where something interrupts `re`."""
    watch = _Watch()
    with system.every(TICK, watch.check):  # it backtracks without end on some keys
        try:
            yield watch
        finally:
            watch.begun = inf


def _applied(rules: Iterable[tuple[str, str]], watch: _Watch) -> Callable[[str], str]:
    compiled = [(re.compile(expression), replacement) for expression, replacement in rules]

    def rule(name: str) -> str:
        for expression, replacement in compiled:
            watch.begin(expression.pattern, name)
            name = expression.sub(replacement, name)
        return name

    return rule


def _with_its_dot(rules: Sequence[tuple[str, str]], watch: _Watch, old: str, new: str) -> str:
    """Return the hint that gives the rules again, the one that leaves a dot too many with this dot."""
    for index, (expression, replacement) in enumerate(rules):
        group = f"(?:{expression})" if "|" in expression else expression
        for with_dot in () if replacement else (f"{group}\\.", f"\\.{group}"):
            changed = [*rules[:index], (with_dot, replacement), *rules[index + 1 :]]
            try:
                name = _applied(changed, watch)(old)
            except re.error:  # flags such as `(?i)` stand first
                continue
            if name not in ("", old) and not _has_empty_part(name):
                maps = (f"--map {shlex.quote(f'{pattern}={by}')}" for pattern, by in changed)
                return "match the dot too: " + " ".join(maps)
    return "give a --map that leaves no empty part between dots"
