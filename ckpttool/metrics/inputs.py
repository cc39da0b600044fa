"""Metric inputs (arrays, lists, torch tensors on any device) as checked arrays. Imports numpy when called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_floats(values: Any, *, dims: int | None = None) -> NDArray[Any]:
    """Return numbers as float64, which holds every float32, float16 and bfloat16 exactly.

    Args:
        values: booleans, integers or floats.
        dims: the number of axes that there must be; None for any.

    Raises:
        TypeError: the values are not real numbers.
        ValueError: another number of axes, or a number that float64 can't hold exactly.
    """
    import numpy as np

    found = _array(values)
    if found.dtype.kind not in "fiub":
        raise TypeError(f"expected numbers, not {found.dtype}")
    if dims is not None and found.ndim != dims:
        raise ValueError(f"{dims} axis is wanted, one number per sample; its shape is {found.shape}")
    exact = found.astype(np.float64)
    if found.dtype.itemsize > 8 or found.dtype.kind in "iu":
        with np.errstate(invalid="ignore"):
            back = exact.astype(found.dtype)
        if not np.array_equal(back, found, equal_nan=found.dtype.kind == "f"):
            raise ValueError(f"a number of {found.dtype} is not a float64: it would be rounded")
    return exact


def as_scores(values: Any) -> NDArray[Any]:
    """Return scores [n, classes] in their own type.

    Raises:
        TypeError: the scores are not real numbers.
        ValueError: another shape.
    """
    found = _array(values)
    if found.dtype.kind not in "fiub":
        raise TypeError(f"expected scores, not {found.dtype}")
    if found.ndim != 2 or found.shape[1] == 0:
        raise ValueError(f"scores are [samples, classes]; their shape is {found.shape}")
    return found


def as_predictions(values: Any) -> NDArray[Any]:
    """Return classes [n] as int64; of scores [n, classes], the class of the first largest.

    Raises:
        TypeError: the classes are not integers, or the scores not real numbers.
        ValueError: another shape.
    """
    found = _array(values)
    if found.ndim != 2:
        return as_labels(found)
    best: NDArray[Any] = as_scores(found).argmax(axis=1)
    return best


def as_labels(values: Any, *, below: int | None = None) -> NDArray[Any]:
    """Return classes [n] as int64.

    Args:
        values: integers or booleans [n].
        below: the number of classes, which are 0 to below - 1; None to take any integer.

    Raises:
        TypeError: the classes are not integers.
        ValueError: another shape, or a class out of range.
    """
    import numpy as np

    found = _array(values)
    if found.dtype.kind not in "iub" and found.size:
        raise TypeError(f"classes are integers, not {found.dtype}")
    if found.ndim != 1:
        raise ValueError(f"expected one class per sample; the shape is {found.shape}")
    classes = found.astype(np.int64)
    if found.dtype.kind == "u" and len(classes) and classes.min() < 0:
        raise ValueError(f"a class is {found.max()}, which int64 can't hold")
    if below is not None and len(classes) and not (classes.min() >= 0 and classes.max() < below):
        wrong = classes[(classes < 0) | (classes >= below)][0]
        raise ValueError(f"there are {below} classes, 0 to {below - 1}, and one of these is {wrong}")
    return classes


def same_length(first: NDArray[Any], second: NDArray[Any]) -> None:
    """Raise ValueError if two inputs have different numbers of samples."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} samples on one side, {len(second)} on the other")


def _array(values: Any) -> NDArray[Any]:
    import numpy as np

    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("a masked array: leave out the masked samples")
    if hasattr(values, "detach"):  # a torch tensor; numpy has no bfloat16 and no 8-bit floats
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values)
