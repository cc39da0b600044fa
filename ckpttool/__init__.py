"""ckpttool: a workbench for PyTorch checkpoints.

    import ckpttool

    with ckpttool.open("last.pt") as checkpoint:        # no torch, nothing executed, nothing loaded
        state = checkpoint.state()                      # names, dtypes, shapes
        print(state.where, len(state.tensors))
        tensors = state.load()                          # torch tensors, mapped from the file
    ckpttool.reload("last.pt", model)                   # strictly, into a plain torch module

A change makes a new checkpoint, whose tensors still lie in the old file until it is saved:

    with ckpttool.open("last.pt") as checkpoint:
        plain, renaming = ckpttool.strip_prefix(checkpoint)
        ckpttool.save(plain, "model.safetensors")

From file to file: `ckpttool.convert("a.pt", "a.safetensors", dtype="bf16")`, `merge("ranks/", "one.pt")`,
`split(checkpoint, "ranks/", 4)`. Checks take a path or an open checkpoint: `ckpttool.inspect("a.pt")`,
`digest("a.pt")`, `diff("a.pt", "b.pt")`, `verify("a.pt")`, `doctor("a.pt", model)`.

Importing this package imports no other module of it: a public name is imported on first use, and torch and
numpy by the calls that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.lazy import attributes, views_in

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import batchnorm as batchnorm
    from . import errors as errors
    from . import metrics as metrics
    from .averaging.average import average as average
    from .conforming.conform import conform as conform
    from .core.checkpoint.checkpoint import Checkpoint as Checkpoint
    from .core.checkpoint.keys import add_prefix as add_prefix
    from .core.checkpoint.keys import rename_keys as rename_keys
    from .core.checkpoint.keys import strip_prefix as strip_prefix
    from .core.checkpoint.selection import drop as drop
    from .core.checkpoint.selection import select as select
    from .core.checkpoint.selection import slim as slim
    from .core.checkpoint.selection import with_metadata as with_metadata
    from .core.checkpoint.state import State as State
    from .core.formats.conversion import convert as convert
    from .core.formats.reading import open as open
    from .core.formats.saving import save as save
    from .core.tensors.ref import TensorRef as TensorRef
    from .deltas.applying import apply as apply
    from .deltas.writing import delta as delta
    from .diffing.compare import diff as diff
    from .disarming.disarm import disarm as disarm
    from .dividing.plan import plan as plan
    from .errors import CkptToolError as CkptToolError
    from .inspecting.summary import inspect as inspect
    from .lora.adapter import open_adapter as open_adapter
    from .lora.adapter import save_adapter as save_adapter
    from .lora.differences import extract_lora as extract_lora
    from .lora.merge import merge_lora as merge_lora
    from .lora.translating import convert_adapter as convert_adapter
    from .mapping.applying import apply_map as apply_map
    from .mapping.applying import maps as maps
    from .mapping.layout import join_complex as join_complex
    from .mapping.layout import split_complex as split_complex
    from .models.factory import skeletons as skeletons
    from .models.reloading import reload as reload
    from .models.treatment import doctor as doctor
    from .proving.proof import prove as prove
    from .ranks.frameworks import merge as merge
    from .ranks.frameworks import open_ranks as open_ranks
    from .ranks.splitting import split as split
    from .reporting.report import report as report
    from .scanning.scan import scan as scan
    from .sealing.seal import seal as seal
    from .slimming.slimming import slim_in_place as slim_in_place
    from .verifying.verify import digest as digest
    from .verifying.verify import verify as verify
else:
    __getattr__, __dir__, __all__ = attributes(
        __name__,
        {
            "": "batchnorm errors metrics",
            "verifying.verify": "digest verify",
            "diffing.compare": "diff",
            "proving.proof": "prove",
            "inspecting.summary": "inspect",
            "core.formats.conversion": "convert",
            "ranks.frameworks": "merge open_ranks",
            "core.checkpoint.checkpoint": "Checkpoint",
            "core.checkpoint.state": "State",
            "errors": "CkptToolError",
            "core.formats.reading": "open",
            "core.formats.saving": "save",
            "deltas.applying": "apply",
            "deltas.writing": "delta",
            "ranks.splitting": "split",
            "models.treatment": "doctor",
            "models.reloading": "reload",
            "models.factory": "skeletons",
            "reporting.report": "report",
            "scanning.scan": "scan",
            "sealing.seal": "seal",
            "slimming.slimming": "slim_in_place",
            "core.tensors.ref": "TensorRef",
            "averaging.average": "average",
            "conforming.conform": "conform",
            "mapping.layout": "join_complex split_complex",
            "disarming.disarm": "disarm",
            "dividing.plan": "plan",
            "core.checkpoint.keys": "add_prefix rename_keys strip_prefix",
            "lora.merge": "merge_lora",
            "lora.adapter": "open_adapter save_adapter",
            "lora.differences": "extract_lora",
            "lora.translating": "convert_adapter",
            "mapping.applying": "apply_map maps",
            "core.checkpoint.selection": "drop select slim with_metadata",
        },
    )

views_in("ckpttool.reporting.notebook")
