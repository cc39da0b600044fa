"""What `convert --dequantize` and `--quantize` do, and say of the settings beside a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..tensors.dtypes import PLAIN_FLOATS
from .console import counted
from .options import WriteJob
from .rewriting import Outcome, Target

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..tensors.dtypes import DType
    from ..transforms.quantization.quantize import Quantized


@dataclass(frozen=True, slots=True)
class Quantizing:
    """Packed tensors made plain, or plain ones packed, in one call of the command."""

    job: WriteJob
    checkpoint: Checkpoint  # as it was read
    outcome: Outcome
    target: Target

    def undone(self, dtype: DType | None) -> Checkpoint:
        """Return the checkpoint with plain tensors."""
        from ..transforms.quantization.dequantize import dequantize
        from ..transforms.quantization.settings import OWN, SECTIONS

        new, report = dequantize(self.checkpoint, dtype=dtype, state=self.target.state)
        outcome, schemes = self.outcome, report.dequantized
        outcome.casting, outcome.result = report.casting, report
        outcome.done += f", {counted(sum(schemes.values()), 'tensor')} dequantised"
        outcome.left_out += report.left_out
        outcome.notes += [f"{scheme}: {counted(count, 'tensor')}" for scheme, count in schemes.items()]
        if self.checkpoint.packed:
            outcome.notes.append("GGUF's types are made plain whenever they are read, with this flag or not")
        outcome.untrue = (*OWN,)
        if report.settings:
            gone = [f"{at}{name}" for at in ("", "text_config.") for name in SECTIONS]
            self._correct(dict.fromkeys(gone), "no quantization_config")
        return new

    def done(self, checkpoint: Checkpoint, scheme: str) -> Checkpoint:
        """Return the checkpoint with the matrices of its layers in fp8."""
        from ..transforms.quantization.quantize import quantize

        new, report = quantize(checkpoint, scheme, state=self.target.state)
        outcome = self.outcome
        outcome.result, outcome.written = report, lambda: self._say_errors(report)
        outcome.done += f", {counted(len(report.errors), 'tensor')} in {scheme}"
        section = report.quantization_config
        self._correct({"quantization_config": section}, f'"quantization_config": {json.dumps(section)}')
        return new

    def typed(self, dtype: DType) -> None:
        """Have a config.json that is copied along name the type of the numbers, wherever it names one."""
        from ..transforms.lora.ties import config_of
        from ..transforms.quantization.settings import SECTIONS

        model = config_of(self.checkpoint.path) if self.job.companions else {}
        within = {f"{name}.": value for name, value in model.items() if name not in SECTIONS}
        said = [
            f"{at}{name}"
            for at, section in {"": model, **within}.items()
            for name in ("torch_dtype", "dtype")
            if isinstance(section, Mapping) and section.get(name) in PLAIN_FLOATS
        ]
        self.outcome.settings = {**self.outcome.settings, **dict.fromkeys(said, dtype.name)}

    def _say_errors(self, report: Quantized) -> None:
        rows = [(each.relative, each.largest, name) for name, each in report.errors.items()]
        said = [f"{name}: error {error:.2%} of its size, {most:.3g} at most" for error, most, name in rows]
        worst = said[rows.index(max(rows))]
        self.outcome.notes += said if self.job.console.verbose else [f"largest error: {worst}"]
        errors = [{"name": name, "relative": error, "max_abs": most} for error, most, name in rows]
        self.outcome.fields = {**self.outcome.fields, "errors": errors}

    def _correct(self, settings: dict[str, object], said: str) -> None:
        """Have a config.json that is copied along say what is true now; else say what it must."""
        from ..formats import folders

        outcome, beside = self.outcome, "config.json beside the output must have "
        outcome.notes[:] = [note for note in outcome.notes if not note.startswith(beside)]
        outcome.settings = {**outcome.settings, **settings}
        if not self.job.companions or folders.is_in_place(self.checkpoint, self.target.place.path):
            outcome.notes.append(f"{beside}{said}")
