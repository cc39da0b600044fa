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

from .lazy import attributes, views_in

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import batchnorm as batchnorm
    from . import errors as errors
    from . import metrics as metrics
    from .analysis.checks import digest as digest
    from .analysis.compare import diff as diff
    from .analysis.summary import inspect as inspect
    from .analysis.verify import verify as verify
    from .checkpoint.checkpoint import Checkpoint as Checkpoint
    from .checkpoint.state import State as State
    from .conversion import convert as convert
    from .conversion import merge as merge
    from .errors import CkptToolError as CkptToolError
    from .formats import open as open
    from .formats import open_ranks as open_ranks
    from .formats import save as save
    from .formats.delta.applying import apply as apply
    from .formats.delta.writing import delta as delta
    from .formats.splitting import split as split
    from .models.doctor import doctor as doctor
    from .models.reloading import reload as reload
    from .models.skeleton import skeletons as skeletons
    from .proving.proof import prove as prove
    from .reporting.report import report as report
    from .scanning.scan import scan as scan
    from .slimming import slim_in_place as slim_in_place
    from .tensors.ref import TensorRef as TensorRef
    from .transforms.average import average as average
    from .transforms.conforming.conform import conform as conform
    from .transforms.disarm import disarm as disarm
    from .transforms.keys import add_prefix as add_prefix
    from .transforms.keys import rename_keys as rename_keys
    from .transforms.keys import strip_prefix as strip_prefix
    from .transforms.layout import join_complex as join_complex
    from .transforms.layout import split_complex as split_complex
    from .transforms.lora.adapter import open_adapter as open_adapter
    from .transforms.lora.adapter_folder import save_adapter as save_adapter
    from .transforms.lora.extract import extract_lora as extract_lora
    from .transforms.lora.merge import merge_lora as merge_lora
    from .transforms.mapping.applying import apply_map as apply_map
    from .transforms.mapping.builtin import maps as maps
    from .transforms.selection import drop as drop
    from .transforms.selection import select as select
    from .transforms.selection import slim as slim
    from .transforms.selection import with_metadata as with_metadata
else:
    __getattr__, __dir__, __all__ = attributes(
        __name__,
        {
            "": "batchnorm errors metrics",
            "analysis.checks": "digest",
            "analysis.compare": "diff",
            "proving.proof": "prove",
            "analysis.summary": "inspect",
            "analysis.verify": "verify",
            "conversion": "convert merge",
            "checkpoint.checkpoint": "Checkpoint",
            "checkpoint.state": "State",
            "errors": "CkptToolError",
            "formats": "open open_ranks save",
            "formats.delta.applying": "apply",
            "formats.delta.writing": "delta",
            "formats.splitting": "split",
            "models.doctor": "doctor",
            "models.reloading": "reload",
            "models.skeleton": "skeletons",
            "reporting.report": "report",
            "scanning.scan": "scan",
            "slimming": "slim_in_place",
            "tensors.ref": "TensorRef",
            "transforms.average": "average",
            "transforms.conforming.conform": "conform",
            "transforms.layout": "join_complex split_complex",
            "transforms.disarm": "disarm",
            "transforms.keys": "add_prefix rename_keys strip_prefix",
            "transforms.lora.merge": "merge_lora",
            "transforms.lora.adapter": "open_adapter",
            "transforms.lora.adapter_folder": "save_adapter",
            "transforms.lora.extract": "extract_lora",
            "transforms.mapping.applying": "apply_map",
            "transforms.mapping.builtin": "maps",
            "transforms.selection": "drop select slim with_metadata",
        },
    )

views_in("ckpttool.notebook")
