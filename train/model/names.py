"""The names of a model's parameters, by which flags choose some of them. Imports torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from ckpttool.errors import UsageFault


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name; one with two names by its first."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def found_in(flag: str, patterns: Sequence[str], model: nn.Module) -> dict[str, int]:
    """Return the number of the first pattern that is found in the name of a parameter, for each that has one.

    Raises:
        UsageFault: a pattern is found in no name, or only where one before it is.
    """
    found: dict[str, int] = {}
    for number, pattern in enumerate(patterns):
        names = [name for name in trained(model) if re.search(pattern, name)]
        if not names:
            some = ", ".join([*trained(model)][:4])
            what = f"{flag} {pattern}: is found in the name of no parameter that is trained"
            raise UsageFault(what, hint=f"their names are {some}, …")
        if not {*names} - {*found}:
            before = patterns[found[names[0]]]
            what = f"{flag} {pattern}: is found only where {before} is, which comes first"
            raise UsageFault(what, hint="give it first, or leave it out")
        found = {**dict.fromkeys(names, number), **found}
    return found
