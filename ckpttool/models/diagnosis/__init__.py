"""Find out why a checkpoint does not load into a model, and which commands fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import attributes

if TYPE_CHECKING:
    from .fit import Respec as Respec
    from .report import Diagnosis as Diagnosis
    from .report import Problem as Problem
    from .treatment import diagnose as diagnose
else:
    __getattr__, __dir__, __all__ = attributes(
        __name__, {"fit": "Respec", "treatment": "diagnose", "report": "Diagnosis Problem"}
    )
