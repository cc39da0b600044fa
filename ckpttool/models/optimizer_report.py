"""What is wrong with an optimizer's state for the optimizer that it should load into, each thing tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.optimizer_names import Order, Undecided
from ..core.checkpoint.optimizer_view import MOMENTA, OptimizerView
from ..core.checkpoint.special_tensors import plain_tensor
from ..core.words import counted, first_few
from ..errors import Refused
from .live_optimizer import described, tried
from .optimizer_layout import LiveOptimizer, keeps
from .optimizer_refit import Refit, refits

if TYPE_CHECKING:
    import torch

ORDERS: tuple[Order | None, ...] = (None, "state", "model")  # from what is known to what is assumed
ASSUMED = {"state": "the file's state does", "model": "the optimizer does"}


class OptimizerFinding(NamedTuple):
    """One thing that is wrong, or worth knowing."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Examined:
    """An optimizer's state beside the optimizer that it should load into."""

    wrong: tuple[OptimizerFinding, ...] = ()
    remarks: tuple[OptimizerFinding, ...] = ()
    flags: tuple[str, ...] | None = None  # of the command that mends it; None if none can
    where: tuple[str, ...] = ()  # dotted paths of the optimizers in the file


class OptimizerAim:
    """The optimizers of a model that a file's optimizers should load into."""

    def __init__(
        self, model: torch.nn.Module, made: Sequence[torch.optim.Optimizer | None], spec: str
    ) -> None:
        self.spec = spec
        self.made = [each for each in made if each is not None]
        self.live = [None if each is None else described(model, each, spec) for each in made]

        self._known: dict[int, tuple[Checkpoint, Examined]] = {}

    def is_mended(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint's optimizers load, or do after a command."""
        return self.examined(checkpoint).flags is not None

    def examined(self, checkpoint: Checkpoint) -> Examined:
        """Find out what is wrong, and whether the command that would mend it does so."""
        if id(checkpoint) not in self._known:
            self._known[id(checkpoint)] = checkpoint, self._examined(checkpoint)
        return self._known[id(checkpoint)][1]

    def _examined(self, checkpoint: Checkpoint) -> Examined:
        where = tuple(place for place, _ in checkpoint.optimizers())
        try:
            order, fits = self._fits(checkpoint)
        except Refused as error:
            hint = f" ({error.hint})" if error.hint else ""
            return Examined((OptimizerFinding("optimizer", f"{error.reason}{hint}"),), where=where)
        triples = [*zip(fits, self.made, (each for each in self.live if each is not None), strict=True)]
        wrong = [each for triple in triples for each in _faults(*triple, order)]
        remarks = [each for triple in triples for each in _remarks(*triple[::2], order)]
        flags = ("--optimizer", self.spec, *(["--order", order] if order else []))
        for fit, optimizer, live in triples if wrong else ():
            places, error_of_new = tried(optimizer, live, fit.new)
            if error_of_new or any(live.names[place] != name for name, place in places.items()):
                why = error_of_new or f"{live.kind} does not load by position"
                return Examined(
                    (*wrong, OptimizerFinding("optimizer", f"no command can fix it: {why}")), where=where
                )
        return Examined(tuple(wrong), tuple(remarks), flags, where)

    def _fits(
        self, checkpoint: Checkpoint, orders: Sequence[Order | None] = ORDERS
    ) -> tuple[Order | None, list[Refit]]:
        order, *others = orders
        try:
            return order, refits(checkpoint, "indices", self.live, order=order)
        except Refused as error:
            if others and isinstance(error.__cause__, Undecided):
                return self._fits(checkpoint, others)
            raise


def _faults(
    fit: Refit, optimizer: torch.optim.Optimizer, live: LiveOptimizer, order: Order | None
) -> Iterator[OptimizerFinding]:
    """Yield what keeps a state from loading, or from going on at its own parameters."""
    view = OptimizerView(fit.old)
    got, error = tried(optimizer, live, fit.old)
    if error:
        sizes = [" and ".join(map(str, map(len, groups))) for groups in (view.keys, live.groups)]
        counts = f"groups of {sizes[0]} parameters in the file, of {sizes[1]} in the optimizer"
        form = "it is one flat dict, as torchtitan saves it" if view.is_flat else f"{error} ({counts})"
        yield OptimizerFinding(
            "optimizer-groups", f"load_state_dict does not take the optimizer's state: {form}"
        )
    else:
        entries = [each.entry for each in chain(*view.parameters())]
        kept = {place for place, entry in enumerate(entries) if keeps(entry)}
        pairs = [(name, got.get(name), fit.places.get(name)) for name in live.names]
        wrong = [(name, mine, own) for name, mine, own in pairs if mine != own and {mine, own} & kept]
        if wrong:
            name, mine, _ = wrong[0]
            what = "nothing" if mine is None else f"what belongs to '{fit.owners[mine]}'"
            more = f", {len(wrong) - 1} others likewise" if wrong[1:] else ""
            proviso = f" (if it lists them as {ASSUMED[order]})" if order else ""
            why = f"load_state_dict goes by position: '{name}' would get {what}{more}, without an error"
            yield OptimizerFinding("optimizer-order", why + proviso)
    for what, names in (("new", fit.told["added"]), ("gone", fit.told["dropped"])):
        if names and error:
            yield OptimizerFinding(
                "optimizer-groups", f"{counted(len(names), 'parameter')} {what}: {first_few(names)}"
            )
    for what, names in (("begins afresh for", fit.told["reset"]), ("is padded for", fit.told["padded"])):
        if names:
            yield OptimizerFinding("optimizer-state", f"the state {what} {first_few(names, 2)}")


def _remarks(fit: Refit, live: LiveOptimizer, order: Order | None) -> Iterator[OptimizerFinding]:
    if order or fit.was_ordered:
        how = f"as {ASSUMED[order]}" if order else "as the file's state or the optimizer does"
        yield OptimizerFinding(
            "optimizer-names", f"the optimizer names no parameters: taken to list them {how}"
        )
    if settings := fit.told["settings"]:
        yield OptimizerFinding("optimizer-settings", f"settings differ: {first_few(settings)}")
    casts: Counter[tuple[str, str]] = Counter()
    entries = [each.entry for each in chain(*OptimizerView(fit.old).parameters())]
    for name, place in fit.places.items():
        entry = entries[place] if isinstance(entries[place], dict) else {}
        types = {tensor.dtype.name for key in MOMENTA if (tensor := plain_tensor(entry.get(key)))}
        casts.update((each, live.dtypes[name]) for each in types if each != live.dtypes[name])
    for (theirs, ours), count in casts.items():
        what = f"{counted(count, 'state')} {'are' if count > 1 else 'is'} {theirs} in the file"
        yield OptimizerFinding(
            "optimizer-precision", f"{what}: load_state_dict casts them to the parameters' {ours}"
        )
