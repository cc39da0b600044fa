"""Rules applied to a checkpoint: its state, copies of it, and what optimizers keep of its parameters.

The numbers of rules come from a config beside the checkpoint, or from settings inside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ...checkpoint.settings import json_object, settings_beside
from ...checkpoint.state import State
from ...contract import noted
from ...errors import CkptToolError, Refused
from ...inert_pickle.values import Record, attributes_in
from ...tensors.losses import CastReports
from ..optimizer.owners import Owners, with_copies, with_states
from ..quantization.recognise import require_unpacked
from ..wrappers import found_prefixes
from .builtin import rules_of
from .optimizers import followed
from .rules import MapRules
from .state_mapping import StateMapping

FILES = ("config.json", "params.json")  # of Hugging Face, and of Meta
ENTRIES = ("model_args", "config", "args", "hyper_parameters")  # of nanoGPT, others, Megatron, Lightning


@dataclass(frozen=True, slots=True)
class Mapped:
    """What rules made of a state.

    Attributes:
        names: new name -> the names that its tensor was made of, in the order of the output.
        dropped: names that were left out, as the rules say.
        tied: names that were added to a tensor, or taken away, as the rules say.
        also: dotted paths of other states that were changed too.
        casting: which numbers became infinite or 0 by `cast`, complete once the output is saved.
    """

    names: Mapping[str, tuple[str, ...]] = field(metadata={"json": None})
    dropped: tuple[str, ...] = ()
    tied: tuple[str, ...] = noted("other names of one tensor, added or taken away")
    also: tuple[str, ...] = noted("changed too")
    casting: CastReports = field(default_factory=CastReports, metadata={"json": None})

    @property
    def renaming(self) -> dict[str, str]:
        """Old name -> new name, for tensors that became one tensor."""
        return {names[0]: new for new, names in self.names.items() if len(names) == 1}


@takes_checkpoint
def apply(
    checkpoint: Checkpoint,
    rules: MapRules,
    *,
    config: Mapping[str, Any] | None = None,
    state: str | None = None,
    optimizers: bool = True,
) -> tuple[Checkpoint, Mapped]:
    """Return a checkpoint in another architecture's names and layout; its tensors still lie in the old file.

    Names, shapes and types are all checked here, before anything is read or written.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        rules: what becomes of its tensors.
        config: where the rules' numbers come from, such as what a `config.json` says.
        state: dotted path of the model's state. When None it is found, and its copies, such as an average,
            are changed too.
        optimizers: take along what else the file has of the model: optimizers, and copies of the state.

    Raises:
        Refused: names, shapes, types or counts do not fit the rules, or a number is not known; a tensor that
            more than its name changes of is packed; an optimizer keeps what can't follow, or it is not known
            which parameter is which.
        Collision: two tensors would get the same name.
        NoState: the file holds no state, or none at `state`.
    """
    targets = with_copies(checkpoint, state) if optimizers else [checkpoint.state(state)]
    mappings = [StateMapping(checkpoint.path, targets[0], rules, config or {})]
    mappings += [_of_copy(checkpoint.path, copy, targets[0], rules, config or {}) for copy in targets[1:]]
    first, *copies = mappings

    def follow(optimizer: dict[Any, Any], _: Owners) -> dict[Any, Any]:
        return followed(checkpoint, optimizer, first, state)

    new = [(each.state, each.container()) for each in mappings]
    follows = follow if optimizers else None
    changed = with_states(checkpoint, new, first.moved, follows, numbers=not first.only_renames)
    for each in mappings:
        require_unpacked(checkpoint, each.state, names=each.made_anew)
    casting = CastReports(reports=[report for each in mappings for report in each.reports])
    also = tuple(copy.state.where for copy in copies)
    return changed, Mapped(first.names, (*first.matched.dropped,), (*first.tied,), also, casting)


def _of_copy(path: str, copy: State, of: State, rules: MapRules, config: Mapping[str, Any]) -> StateMapping:
    try:
        return StateMapping(f"{path}, {copy.where}", copy, rules, config)
    except Refused as fault:
        alone = f"as it is by --state {shlex.quote(of.where)}"
        fault.hint = f"leave it out by --drop {shlex.quote(copy.where)}, or {alone}; {fault.hint}"
        raise


@takes_checkpoint
def apply_map(
    checkpoint: Checkpoint,
    rules: str,
    *,
    inverse: bool = False,
    config: str | None = None,
    state: str | None = None,
    optimizers: bool = True,
) -> tuple[Checkpoint, Mapped]:
    """Return a checkpoint in another architecture's names and layout, by a map or a rule file.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        rules: the name of a map, as `ckpttool maps` lists them, or the path of a rule file, which ends in
            `.toml`.
        inverse: take the way back.
        config: the path of the model's config; None looks beside the checkpoint, and in it.
        state, optimizers: as for `apply`.

    Returns:
        The new checkpoint, whose tensors still lie in the old file, and what was made of which tensors.

    Raises:
        UsageFault: there is no such map, the rules are malformed, or have no way back.
        Unreadable, Damaged: a file of rules or settings can't be read.
        Refused, Collision, NoState: the checkpoint does not fit the rules, as for `apply`.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     changed, mapped = ckpttool.apply_map(checkpoint, "rules.toml")
        ...     sorted(changed.state())[-2:]
        ['linear.bias', 'linear.weight']
    """
    one_way = rules_of(rules)
    found = one_way.inverse() if inverse else one_way
    settings = config_of(checkpoint, config)
    try:
        return apply(checkpoint, found, config=settings, state=state, optimizers=optimizers)
    except Refused as fault:
        target = checkpoint.state(state)
        if not _fits(target, found, settings):
            back = found.inverse() if found.reversible else None
            if back is not None and _fits(target, back, settings):
                way = "without --inverse" if inverse else "with --inverse"
                fault.hint = f"its names are those of the other side: {way} the map takes them"
            elif found.name and fault.hint and not found_prefixes([*target.tensors]):
                # Of a map of the package: nobody changes its rules.
                fault.hint = f"is it {found.start}? --exclude leaves out what more it has"
        raise


def _fits(state: State, rules: MapRules, config: Mapping[str, Any]) -> bool:
    """Return whether rules take the names of a state, whatever its shapes."""
    try:
        StateMapping("", state, rules, config)
    except CkptToolError:
        return False
    return True


def config_of(checkpoint: Checkpoint, path: str | None = None) -> Mapping[str, Any]:
    """Return what a config says: the one at `path`, beside the checkpoint, or inside it; {} without any.

    Raises Unreadable, or Damaged where the file is no JSON object.
    """
    if path is not None:
        return json_object(path)
    place, settings = settings_beside(checkpoint.path, *FILES)
    return settings if place else next(_inside(checkpoint.tree), {})


def _inside(tree: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings that a file holds, as a dict or an object's attributes."""
    entries = tree if isinstance(tree, dict) else {}
    for value in map(entries.get, ENTRIES):
        settings = attributes_in(value.state) if isinstance(value, Record) else value
        if isinstance(settings, dict) and settings:
            yield settings
