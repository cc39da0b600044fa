"""Packed numbers: `convert --dequantize` and `--quantize`, and what both say of a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import click

from ..core.cli import options
from ..core.cli.console import counted
from ..core.cli.convert import Conversion
from ..core.cli.schemas import Fields, fields_like

if TYPE_CHECKING:
    from .quantize import Quantized


def _dequantized_printed() -> Fields:
    from .dequantize import Dequantized

    return fields_like(Dequantized)


@options.adds_to("convert", behind="metadata", when="first", prints=_dequantized_printed)
@options.flag(
    "--dequantize", "Make packed tensors plain: fp8, MXFP4, NVFP4, GPTQ, AWQ, bitsandbytes, MLX and the like."
)
def convert_dequantize(conversion: Conversion, dequantize: bool) -> None:
    """Make packed tensors plain."""
    if not dequantize:
        return
    from ..core.checkpoint.settings import SECTIONS
    from .dequantize import dequantize as made_plain
    from .settings import MLX, OWN

    original, dtype, state = conversion.original, conversion.dtype, conversion.target.state
    conversion.checkpoint, report = made_plain(original, dtype=dtype, state=state)
    conversion.dtype = None  # each value is rounded once
    outcome, schemes = conversion.outcome, report.dequantized
    outcome.casting, outcome.result = report.casting, report
    outcome.done += f", {counted(sum(schemes.values()), 'tensor')} dequantised"
    outcome.left_out += report.left_out
    outcome.notes += [f"{scheme}: {counted(count, 'tensor')}" for scheme, count in schemes.items()]
    if original.packed:
        outcome.notes.append("GGUF's types are made plain whenever they are read, with this flag or not")
    outcome.untrue = (*OWN,)
    if report.settings:
        gone = [f"{at}{name}" for at in ("", "text_config.") for name in (*SECTIONS, MLX)]
        of_mlx = any(scheme.startswith("MLX ") for scheme in schemes)
        _correct(conversion, dict.fromkeys(gone), f"no {MLX if of_mlx else 'quantization_config'}")


def _quantized_printed() -> Fields:
    from .quantize import Quantized

    error: Fields = {
        "name": (str, "the tensor"),
        "nmse": (float, "mean square of what is lost / mean square"),
        "relative": (float, "its root"),
        "max_abs": (float, "the largest error of an element"),
    }
    return {
        **fields_like(Quantized),
        "errors": ([error], "with --quantize: of each tensor that this process wrote, the worst first"),
    }


@options.adds_to("convert", behind="metadata", when="last", prints=_quantized_printed)
@options.option(
    "--quantize SCHEME",
    "Make the matrices of layers fp8, with a scale per tensor, per channel or per block of 128 × 128; or "
    "MXFP8, MXFP4 or NVFP4, with a scale per 32 or 16 of a row.",
    type=click.Choice(["fp8", "fp8-channel", "fp8-block", "mxfp8", "mxfp4", "nvfp4"]),
)
def convert_quantize(conversion: Conversion, quantize: str | None) -> None:
    """Pack the matrices of layers."""
    if quantize is None:
        return
    from .quantize import quantize as packed

    state, outcome = conversion.target.state, conversion.outcome
    conversion.checkpoint, report = packed(conversion.checkpoint, quantize, state=state)
    outcome.result, outcome.written = report, partial(_say_errors, conversion, report)
    outcome.done += f", {counted(len(report.errors), 'tensor')} in {quantize}"
    section = report.quantization_config
    settings = {"quantization_config": section}
    _correct(conversion, settings, f'"quantization_config": {json.dumps(section)}')


def _say_errors(conversion: Conversion, report: Quantized) -> None:
    known = [row for row in report.errors.items() if row[1].is_known]
    rows = sorted(known, key=lambda row: -row[1].nmse)
    said = [
        f"{name}: error {each.relative:.2%} of its size (NMSE {each.nmse:.3g}), {each.largest:.3g} at most"
        for name, each in rows
    ]
    outcome = conversion.outcome
    outcome.notes += said if conversion.job.console.verbose else [f"largest error: {row}" for row in said[:1]]
    if others := len(report.errors) - len(known):
        outcome.notes.append(
            f"another process wrote {counted(others, 'tensor')}: the errors are not known here"
        )
    errors = [
        {"name": name, "nmse": each.nmse, "relative": each.relative, "max_abs": each.largest}
        for name, each in rows
    ]
    outcome.fields = {**outcome.fields, "errors": errors}


def _correct(conversion: Conversion, settings: Mapping[str, object], said: str) -> None:
    """Have a config.json that is copied along say what is true now; else say what it must."""
    from ..core.formats import folders

    outcome, beside = conversion.outcome, "config.json beside the output must have "
    outcome.notes[:] = [note for note in outcome.notes if not note.startswith(beside)]
    outcome.settings = {**outcome.settings, **settings}
    path = conversion.target.place.path
    if not conversion.job.companions or folders.is_in_place(conversion.original, path):
        outcome.notes.append(f"{beside}{said}")
