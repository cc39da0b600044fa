"""What `convert` and `merge` fold on the way: `--fold`, and the adapter that it adds."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ..core.cli import options
from ..core.cli.console import counted
from ..core.cli.reading import fields_of, note_fields
from ..core.cli.schemas import Fields, fields_like
from ..errors import UsageFault

if TYPE_CHECKING:
    from ..core.cli.convert import Conversion


def _folded_printed() -> Fields:
    from .fold import Folded

    return fields_like(Folded)


fold_options = options.all_of(
    options.option(
        "--fold KINDS",
        "Compute once what a wrapper computes: norm (weight and spectral norm), mask (of pruning), lora (an "
        "adapter inside), separated by commas.",
    ),
    options.option("--adapter NAME", "Of several adapters inside, the one for --fold lora."),
    options.option("--alpha A", "Alpha for --fold lora, where no file beside INPUT says it.", type=float),
)


def _fold(conversion: Conversion, fold: str | None, adapter: str | None, alpha: float | None) -> None:
    """Fold what a wrapper computes."""
    kinds = [kind.strip() for kind in (fold or "").split(",")]
    for flag, given in (("--adapter", adapter), ("--alpha", alpha)):
        if given is not None and "lora" not in kinds:
            raise UsageFault(f"{flag} is of --fold lora, which is not given", hint="add it, or leave it out")
    if fold is None:
        return
    from ..core.tensors.cast import CastReports
    from .fold import fold as folded

    outcome, target, console = conversion.outcome, conversion.target, conversion.job.console
    conversion.checkpoint, report = folded(
        conversion.checkpoint, kinds, adapter=adapter, alpha=alpha, state=target.state
    )
    outcome.casting = CastReports(reports=[*filter(None, (outcome.casting, report.casting))])
    outcome.done += f", {counted(sum(report.folded.values()), 'tensor')} folded"
    outcome.fields, outcome.of_state = {**outcome.fields, **fields_of(report)}, True
    for result in filter(None, (report, report.merged)):
        note_fields(console, result)
    if report.merged:
        outcome.settings = {**outcome.settings, **report.merged.settings(conversion.job.input)}
    for where, _ in conversion.checkpoint.optimizers() if target.place.holds_all else ():
        what = f"{where} is kept whole, with what it has of parameters that were folded"
        outcome.notes.append(f"{what}: --drop {shlex.quote(where)} leaves it out")


def _added_to(command: str, behind: str, when: str = "") -> options.Addition:
    return options.adds_to(command, behind=behind, when=when, prints=_folded_printed)(fold_options(_fold))


convert_fold = _added_to("convert", "metadata", "first")
merge_fold = _added_to("merge", "dtype")
