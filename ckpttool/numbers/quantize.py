"""Pack the matrices of layers: fp8, MXFP8, MXFP4 and NVFP4; values are computed on writing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.module_tree import EMBEDDINGS, POSITIONS, orientations
from ..core.checkpoint.selection import replace_state
from ..core.checkpoint.settings import require_unpacked
from ..core.checkpoint.special_tensors import require_plain, with_plain_tensor
from ..core.tensors.ref import PLAIN_FLOATS, TensorRef
from ..errors import Collision, NothingToDo, UsageFault
from .matrices import MXFP4, MXFP8, NVFP4, BlockMatrix, BlockScheme, Error, GridMatrix, PackedMatrix

BLOCK = 128  # the sides of a block
SMALLEST = 64  # rows and columns of a matrix that is worth scales


@dataclass(frozen=True, slots=True)
class PackScheme:
    """A way to pack a matrix.

    Attributes:
        make: what makes it of a name and a tensor.
        form: the format of compressed-tensors; "" for that of DeepSeek.
        weights: what config.json says of the weights, beside their bits.
        inputs: what it says of activations; None where these stay as they are.
        unit: numbers of which a row must be made.
    """

    make: Callable[[str, TensorRef], PackedMatrix]
    form: str
    weights: Mapping[str, object]
    inputs: Mapping[str, object] | None = None
    unit: int = 1


def _of_grid(end: str, rows: int | None, columns: int | None) -> Callable[[str, TensorRef], PackedMatrix]:
    return lambda name, tensor: GridMatrix(name, tensor, (rows, columns), end)


def _of_blocks(form: str, scheme: BlockScheme, strategy: str, *, has_inputs: bool = False) -> PackScheme:
    """Return a scheme whose weights alone are packed, unless activations are as they come."""
    bits, kind = 8 // scheme.code.numbers, "torch.float8_e4m3fn" if scheme.power is None else "torch.uint8"
    said = {"num_bits": bits, "strategy": strategy, "group_size": scheme.size}
    said |= {"scale_dtype": kind, "zp_dtype": kind}
    make = partial(BlockMatrix, scheme=scheme)
    return PackScheme(make, form, said, said if has_inputs else None, scheme.size)


SCHEMES: Mapping[str, PackScheme] = {
    "fp8": PackScheme(
        _of_grid("_scale", None, None),
        "float-quantized",
        {"num_bits": 8, "strategy": "tensor"},
        {"num_bits": 8, "strategy": "tensor"},
    ),
    "fp8-channel": PackScheme(
        _of_grid("_scale", 1, None),
        "float-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token"},
    ),
    "fp8-block": PackScheme(_of_grid("_scale_inv", BLOCK, BLOCK), "", {}),
    "mxfp8": _of_blocks("mxfp8-quantized", MXFP8, "group", has_inputs=True),
    "mxfp4": _of_blocks("mxfp4-pack-quantized", MXFP4, "group"),
    "nvfp4": _of_blocks("nvfp4-pack-quantized", NVFP4, "tensor_group"),
}

# Modules whose matrices stay, whoever quantises: the output, and what chooses experts.
KEPT = {"lm_head", "output", "embed_out", "score", "classifier", "gate", "router", "shared_expert_gate"}

# Modules that inference makes one of, which has one scale of all in NVFP4.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was quantised.

    Attributes:
        quantization_config: the section of that name which config.json must have.
        left_plain: names of matrices and larger tensors that stay as they are.
        errors: name of each quantised tensor -> its error, known once the result is saved.
    """

    quantization_config: Mapping[str, object]
    left_plain: tuple[str, ...] = field(metadata={"note": "not quantised"})
    errors: Mapping[str, Error] = field(metadata={"json": None})


@takes_checkpoint
def quantize(
    checkpoint: Checkpoint, scheme: str, *, state: str | None = None
) -> tuple[Checkpoint, Quantized]:
    """Return a checkpoint with the matrices of its layers packed, each with its scales behind it.

    Embeddings, the output layer, routers, GPT-2's Conv1D and matrices of fewer than 64 rows or columns stay,
    and so does what is tied to one of them, or has rows that blocks of 16 or 32 don't divide. Other ties stay
    ties. The largest magnitudes are read when the first code or scale is written.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        scheme: `fp8` for a scale per tensor, `fp8-channel` per row, `fp8-block` per 128 × 128; `mxfp8` and
            `mxfp4` for a power of two per 32 of a row, `nvfp4` for an fp8 scale per 16.
        state: dotted path of the model's state; found when None.

    Raises:
        UsageFault: there is no such scheme.
        NothingToDo: no matrix is to be quantised.
        Refused: a tensor is packed already; or once it is written, a matrix holds a NaN, an infinity or more
            than float32 does.
        Collision: the name of a scale is taken.
        NoState: there is no state, or none at `state`.
    """
    if scheme not in SCHEMES:
        raise UsageFault(f"'{scheme}' is no scheme", hint=f"one of {', '.join(SCHEMES)}")
    target = checkpoint.state(state)
    require_plain(checkpoint.path, target.likes, "can't be quantised")
    require_unpacked(checkpoint, target, "nothing would say of which scheme each tensor is")
    how = SCHEMES[scheme]
    turned = {parent for parent, is_turned in orientations(target.tensors) if is_turned}
    stays = {t.view for name, t in target.tensors.items() if not _is_chosen(name, t, turned, how.unit)}
    matrices = {name: tensor for name, tensor in target.tensors.items() if tensor.view not in stays}
    made = {t.view: how.make(name, t) for name, t in reversed(matrices.items())}
    chosen = {name: made[tensor.view] for name, tensor in matrices.items()}  # tied ones share them
    if not chosen:
        rows = f" in blocks of {how.unit}" if how.unit > 1 else ""
        what = f"no matrix of a linear layer, of {SMALLEST} rows and columns{rows} or more, is of floats"
        raise NothingToDo(f"{checkpoint.path}: {what}")
    _make_partners(chosen)
    for name, end in ((name, end) for name, matrix in chosen.items() for end in filter(None, matrix.parts)):
        if f"{name}{end}" in target.container:
            held = "scales" if "scale" in end else "codes"
            raise Collision(f"'{name}{end}' would hold the {held} of '{name}', but already exists")

    def entries(old: dict[Any, Any]) -> Iterator[tuple[Any, object]]:
        for key, value in old.items():
            if (matrix := chosen.get(str(key))) is None:
                yield key, value
            for end, part in matrix.parts.items() if matrix is not None else ():
                yield (f"{key}{end}", part) if end else (key, with_plain_tensor(value, part))

    new = replace_state(checkpoint, target, lambda old: dict(entries(old)))
    kept = tuple(n for n, t in target.tensors.items() if n not in chosen and len(t.shape) > 1)
    errors = {name: matrix.error for name, matrix in chosen.items()}
    return new, Quantized(_config(scheme, kept), kept, errors)


def _is_chosen(name: str, tensor: TensorRef, turned: Collection[str], unit: int) -> bool:
    """Return whether a tensor is the matrix of a linear layer, and not of a Conv1D beside others of them."""
    path, _, end = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    is_matrix = len(tensor.shape) == 2 and min(tensor.shape) >= SMALLEST and tensor.dtype.name in PLAIN_FLOATS
    is_kept = module in EMBEDDINGS | POSITIONS | KEPT or "emb" in module or parent in turned
    return is_matrix and end == "weight" and not is_kept and not tensor.shape[1] % unit


def _make_partners(chosen: Mapping[str, PackedMatrix]) -> None:
    """Let matrices that inference joins have one scale of all."""
    joined = defaultdict[tuple[str, int], dict[int, BlockMatrix]](dict)
    for name, matrix in chosen.items():
        parent, _, module = name.removesuffix(".weight").rpartition(".")
        for number, names in enumerate(FUSED):
            if isinstance(matrix, BlockMatrix) and module in names:
                joined[parent, number][id(matrix)] = matrix
    for those in joined.values():
        for matrix in those.values():
            matrix.partners = (*those.values(),)


def _config(scheme: str, kept: tuple[str, ...]) -> dict[str, object]:
    """Return the settings by which vLLM and transformers know the scheme."""
    # An output layer that is tied stands in no file; transformers would make a quantised one, of nothing.
    modules = [*dict.fromkeys([*(name.removesuffix(".weight") for name in kept), "lm_head"])]
    how = SCHEMES[scheme]
    if not how.form:
        said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**said, "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": modules}
    each = {"type": "float", "symmetric": True}
    weights = {**each, **how.weights, "dynamic": False}
    inputs = how.inputs and {**each, **how.inputs, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    named = {"quant_method": "compressed-tensors", "format": how.form, "ignore": modules}
    return {**named, "quantization_status": "compressed", "config_groups": {"group_0": group}}
