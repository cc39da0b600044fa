"""The command `ckpttool strip-prefix`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import show_names
from ..rewriting import Outcome, renaming_outcome, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


@click.command("strip-prefix")
@click.option("--prefix", default="module.", show_default=True, help="What to remove, including the dot.")
@click.option("--repeat", is_flag=True, help="Repeat until none is left, e.g. module.module.conv.weight.")
@click.option("--anywhere", is_flag=True, help="Also remove it inside a name, e.g. 0._orig_mod.weight.")
@click.option("--drop", multiple=True, metavar="KEY", help="Leave out a key, e.g. n_averaged. Repeatable.")
@click.option(
    "--keep",
    multiple=True,
    metavar="NAME",
    help="Keep, of everything beside the keys, only this, e.g. hyper_parameters. Repeatable.",
)
@options.writing
def command(
    prefix: str, repeat: bool, anywhere: bool, drop: tuple[str, ...], keep: tuple[str, ...], **given: Any
) -> None:
    """Take a wrapper's prefix off the keys that carry it.

    DistributedDataParallel and DataParallel save every key as `module.…`, torch.compile as `_orig_mod.…`. The
    prefix is taken from the front of keys only, so `features.module.0.weight` stays whole. A .pt OUTPUT keeps
    everything else that INPUT holds; its optimizer's parameter names, and other states that carry the prefix
    (an average), are renamed too, unless --state names one. .safetensors holds only the model's tensors, and
    what is left out is named. AveragedModel's counter stays unless it is dropped: --drop n_averaged.

    \b
    Examples:
      ckpttool strip-prefix last.pt model.safetensors
      ckpttool strip-prefix lightning.ckpt model.pt --prefix model. --keep hyper_parameters
    """
    from ...transforms.keys import strip_prefix

    def transform(checkpoint: Checkpoint) -> tuple[Checkpoint, Outcome]:
        left_out = drop
        if keep:
            checkpoint, others = _keep_alone(checkpoint, keep, given)
            left_out += others
        new, renaming = strip_prefix(
            checkpoint, prefix, repeat=repeat, anywhere=anywhere, drop=drop, state=given["state"]
        )
        outcome = renaming_outcome(f"stripped '{prefix}' from", renaming)
        outcome.left_out = left_out
        if (rest := _what_is_left(list(renaming.names.values()), prefix)) is not None:
            outcome.notes.append(rest)
        return new, outcome

    rewrite(given, transform)


def _keep_alone(
    checkpoint: Checkpoint, keep: tuple[str, ...], given: dict[str, Any]
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint with the state and what --keep names, and the names of what was left out.

    Raises:
        NothingToDo: the file holds nothing of such a name beside its state.
        UsageFault: the output holds only tensors.
    """
    from ...checkpoint.pickled_modules import own_attributes
    from ...errors import NothingToDo, UsageFault
    from ...formats.saving.destination import destination
    from ...transforms.selection import drop

    target = destination(given["output"], checkpoint, None, full=False, keep=True)
    if not target.holds_all:
        raise UsageFault(
            f"--keep: {target.format} holds only the tensors of the state",
            hint="name a .pt file, which holds what --keep names",
        )
    state = checkpoint.state(given["state"])
    of_model = len([*own_attributes(state.module)])  # they come first, and can't be taken out of the object
    beside = checkpoint.outside(state)[of_model:]
    if missing := [name for name in keep if name not in beside]:
        raise NothingToDo(
            f"{checkpoint.path}: holds nothing named '{missing[0]}' beside the state",
            hint=f"there are: {show_names(beside)}" if beside else "the state is all that it holds",
        )
    others = tuple(name for name in beside if name not in keep)
    return drop(checkpoint, others), others


def _what_is_left(names: list[str], prefix: str) -> str | None:
    """Return a note on a wrapper's prefix that the new names still carry; None if they carry none."""
    from ...transforms.wrappers import found_prefixes, inner_prefixes

    again = sum(name.startswith(prefix) for name in names)
    if again:
        keys = f"{again} of {len(names)} keys"
        return f"{keys} still begin with '{prefix}': --repeat strips it as often as it is there"
    for found, where, more in (
        (found_prefixes(names), "begin with", ""),
        (inner_prefixes(names), "hold inside", " --anywhere"),
    ):
        if found and found[0].certain:
            left = found[0]
            command = f"ckpttool strip-prefix --prefix {left.prefix}{more}"
            return f"{left.keys} of {left.of} keys still {where} '{left.prefix}': {command}"
    return None
