"""What users hand to a metric, torch tensors on any device or arrays, as arrays. Imports numpy if called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_floats(values: Any, *, dims: int | None = None) -> NDArray[Any]:
    """Numbers as float64, which holds each float32, float16 and bfloat16 as it is.

    Args:
        dims: how many axes there must be.

    Raises:
        TypeError, ValueError: they are complex, or not of so many axes.
    """
    import numpy as np

    found = _array(values)
    if found.dtype.kind not in "fiub":
        raise TypeError(f"expected numbers, not {found.dtype}")
    if dims is not None and found.ndim != dims:
        raise ValueError(f"{dims} axis is wanted, one number per sample; its shape is {found.shape}")
    return found.astype(np.float64)


def as_scores(values: Any) -> NDArray[Any]:
    """Scores [n, classes] in their own type. Raises ValueError for another shape."""
    found = _array(values)
    if found.ndim != 2 or found.shape[1] == 0:
        raise ValueError(f"scores are [samples, classes]; their shape is {found.shape}")
    return found


def as_predictions(values: Any) -> NDArray[Any]:
    """Classes [n] as int64; of scores [n, classes] the first largest. Raises as `as_labels` does."""
    found = _array(values)
    if found.ndim != 2:
        return as_labels(found)
    best: NDArray[Any] = as_scores(found).argmax(axis=1)
    return best


def as_labels(values: Any, *, below: int | None = None) -> NDArray[Any]:
    """Classes [n] as int64.

    Args:
        below: where given, classes are 0 and more, and less than this.

    Raises:
        TypeError, ValueError: they are not whole numbers, not of one axis, or out of range.
    """
    import numpy as np

    found = _array(values)
    if found.dtype.kind not in "iub":
        raise TypeError(f"classes are whole numbers, not {found.dtype}")
    if found.ndim != 1:
        raise ValueError(f"expected one class per sample; the shape is {found.shape}")
    classes = found.astype(np.int64)
    if below is not None and len(classes) and not (classes.min() >= 0 and classes.max() < below):
        wrong = classes[(classes < 0) | (classes >= below)][0]
        raise ValueError(f"there are {below} classes, 0 to {below - 1}, and one of these is {wrong}")
    return classes


def same_length(first: NDArray[Any], second: NDArray[Any]) -> None:
    """Raises ValueError where two inputs are of different numbers of samples."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} samples on one side, {len(second)} on the other")


def _array(values: Any) -> NDArray[Any]:
    import numpy as np

    if hasattr(values, "detach"):  # a torch tensor; numpy has no bfloat16 and no 8-bit floats
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values)
