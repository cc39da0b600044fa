"""The commands that change keys: strip-prefix, add-prefix, rename-keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from . import options
from .console import show_names
from .rewriting import Change, Outcome, Target, rewrite, rewritten

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..checkpoint.prefixes import Renaming


@options.command("Rename", "Take a wrapper's prefix off the keys", rewritten)
@options.option("--prefix", "What to remove, including the dot; by default module. and _orig_mod.")
@options.flag("--repeat", "Repeat until none is left, e.g. module.module.conv.weight.")
@options.flag("--anywhere", "Also remove it inside a name, e.g. 0._orig_mod.weight.")
@options.several("--drop KEY", "Leave out a key, e.g. n_averaged.")
@options.several("--keep NAME", "Keep, of everything but the keys, only this, e.g. hyper_parameters.")
@options.writing
def strip_prefix(
    job: options.WriteJob, prefix: str | None, drop: tuple[str, ...], keep: tuple[str, ...], **where: bool
) -> None:
    """Take a wrapper's prefix off the keys that carry it.

    DistributedDataParallel and DataParallel save every key as `module.…`, torch.compile as `_orig_mod.…`:
    both are taken off, in any order. A prefix is taken from the front of keys only, so
    `features.module.0.weight` stays whole. A .pt OUTPUT keeps everything else that INPUT holds; its
    optimizer's parameter names, and other states that carry the prefix (an average), are renamed too, unless
    --state names one. .safetensors holds only the model's tensors, and what is left out is named.
    AveragedModel's counter stays unless it is dropped: --drop n_averaged.

    \b
    Examples:
      ckpttool strip-prefix last.pt model.safetensors
      ckpttool strip-prefix lightning.ckpt model.pt --prefix model.
    """
    from ...errors import NothingToDo
    from ..checkpoint import keys

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        left_out = drop
        if keep:
            checkpoint, others = _keep_alone(checkpoint, keep, target)
            left_out += others
        try:
            new, renaming = keys.strip_prefix(checkpoint, prefix, drop=drop, state=target.state, **where)
        except NothingToDo as error:
            if error.hint:
                error.hint = error.hint.replace(": --", f": {_command(job.input, job.output)} --")
            raise
        names = list(renaming.names.values())
        stripped = [prefix] if prefix else _stripped(renaming)
        outcome = _outcome(f"stripped {' and '.join(map(repr, stripped))} from", renaming)
        outcome.left_out = left_out
        outcome.notes.extend(_what_is_left(names, stripped, job))
        return new, outcome

    rewrite(job, transform)


def _keep_alone(
    checkpoint: Checkpoint, keep: tuple[str, ...], target: Target
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint with the state and what --keep names, and the names of what was left out."""
    from ...errors import NothingToDo, UsageFault
    from ..checkpoint.pickled_modules import own_attributes
    from ..checkpoint.selection import drop

    if not target.place.holds_all:
        hint = "name a .pt file, which holds what --keep names"
        raise UsageFault(f"--keep: {target.place.format} holds only the tensors of the state", hint=hint)
    state = checkpoint.state(target.state)
    of_model = len([*own_attributes(state.module)])  # they come first, and can't be taken out of the object
    outside = checkpoint.outside(state)[of_model:]
    if missing := [name for name in keep if name not in outside]:
        hint = f"there are: {show_names(outside)}" if outside else "the state is all that it holds"
        what = f"{checkpoint.path}: holds nothing named '{missing[0]}' outside the state"
        raise NothingToDo(what, hint=hint)
    others = tuple(name for name in outside if name not in keep)
    return drop(checkpoint, others), others


def _command(*files: str) -> str:
    return shlex.join(["ckpttool", "strip-prefix", *files])


def _stripped(renaming: Renaming) -> list[str]:
    """Return what was taken from the front of names, each once; of what went inside the parts."""
    from ..checkpoint.prefixes import USUAL

    pairs = [(old, new) for old, new in renaming.names.items() if old != new]
    fronts = dict.fromkeys(old.removesuffix(new) for old, new in pairs if old.endswith(new))
    return [*fronts][:4] or [prefix for prefix in USUAL if any(prefix in old for old, _ in pairs)]


def _what_is_left(names: list[str], stripped: list[str], job: options.WriteJob) -> Iterator[str]:
    """Yield a note on a wrapper's prefix that the new names still carry, if they carry one."""
    from ..checkpoint.prefixes import found_prefixes, inner_prefixes

    onward = _command(job.output, job.output)
    for prefix in stripped:
        if again := sum(name.startswith(prefix) for name in names):
            keys = f"{again} of {len(names)} keys still begin with '{prefix}'"
            yield f"{keys}: {onward} --prefix {shlex.quote(prefix)} --repeat --force"
            return
    in_front, inside = found_prefixes(names), inner_prefixes(names)
    for found, where, more in ((in_front, "begin with", ""), (inside, "hold inside", " --anywhere")):
        if found and found[0].certain:
            left = found[0]
            command = f"{onward} --prefix {left.prefix}{more} --force"
            yield f"{left.keys} of {left.of} keys still {where} '{left.prefix}': {command}"
            return


@options.command("Rename", "Put a wrapper's prefix before every key", rewritten)
@options.option(
    "--prefix", "What to put before keys, including the dot.", default="module.", show_default=True
)
@options.writing
def add_prefix(job: options.WriteJob, prefix: str) -> None:
    """Put a wrapper's prefix before every key: the inverse of strip-prefix.

    For a script that loads into a model it has already wrapped in DistributedDataParallel.

    \b
    Example:
      ckpttool add-prefix model.safetensors for-ddp.pt
    """
    from ..checkpoint import keys

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        new, renaming = keys.add_prefix(checkpoint, prefix, state=target.state)
        outcome = _outcome(f"added '{prefix}' to", renaming)
        if not prefix.endswith("."):
            first = next(iter(renaming.names.values()), prefix)
            with_dot = f"with a dot: --prefix {shlex.quote(f'{prefix}.')}"
            outcome.notes.append(f"the prefix ends in no dot, so keys are like '{first}'; {with_dot}")
        if twice := sum(name.startswith(prefix) for name in renaming.names):
            had = f"{twice} of {len(renaming.names)} keys had '{prefix}' already"
            outcome.notes.append(f"{had}, and now begin with '{prefix * 2}'")
        return new, outcome

    rewrite(job, transform)


@options.command("Rename", "Rename keys by regular expressions", rewritten)
@options.option(
    "--map REGEX=REPLACEMENT",
    "What to rename, as re.sub does. Repeatable; applied in order.",
    "rules",
    multiple=True,
    required=True,
)
@options.writing
def rename_keys(job: options.WriteJob, rules: tuple[str, ...]) -> None:
    """Rename keys by regular expressions.

    Two keys that would get the same name are refused; module versions and the optimizer's parameter names
    follow.

    \b
    Example:
      ckpttool rename-keys model.pt renamed.pt --map '^backbone\\.=model.'
    """
    from ..checkpoint import keys

    pairs = [_pair(rule) for rule in rules]

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        new, renaming = keys.rename_keys(checkpoint, pairs, state=target.state)
        return new, _outcome("renamed", renaming)

    rewrite(job, transform)


def _pair(rule: str) -> tuple[str, str]:
    """Split a rule at the first = before which the expression compiles, as `(?=a)b=c` has two."""
    reason = ""
    for equals in re.finditer("=", rule):
        expression, replacement = rule[: equals.start()], rule[equals.end() :]
        fault = _fault(expression) if expression else "the expression is empty"
        if fault is None:
            return expression, replacement
        reason = reason or f": {fault}"
    raise click.BadParameter(f"'{rule}' is not REGEX=REPLACEMENT{reason}", param_hint="--map")


def _fault(expression: str) -> str | None:
    """Return why `expression` is not a regular expression; None if it is one."""
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return None


def _outcome(done: str, renaming: Renaming) -> Outcome:
    """Return the outcome of a renaming; `done` stands before "3 of 4 keys"."""
    renamed = {old: new for old, new in renaming.names.items() if old != new}
    kept = tuple(old for old in renaming.names if old not in renamed)
    also = {where: theirs.renamed for where, theirs in renaming.also.items()}
    done = f"{done} {len(renamed)} of {len(renaming.names)} keys"
    return Outcome(done, renamed, kept=kept, also_renamed=also)
