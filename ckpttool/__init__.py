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

Importing this package imports neither torch nor numpy; what needs them does so when it is called.
"""

__version__ = "0.1.0"

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import State as State
from .errors import CkptToolError as CkptToolError
from .formats import open as open
from .formats import save as save
from .keys import add_prefix as add_prefix
from .keys import rename_keys as rename_keys
from .keys import strip_prefix as strip_prefix
from .reload import reload as reload
from .skeleton import skeletons as skeletons
from .tensor import TensorRef as TensorRef
from .transforms import drop as drop
from .transforms import join_complex as join_complex
from .transforms import select as select
from .transforms import slim as slim
from .transforms import split_complex as split_complex
