"""What a method of merging is given: checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import UsageFault
from .methods import Recipe

METHODS = ("linear", "slerp", "task", "ties", "dare")

# The settings that each method takes, as they are called on the command line
TAKES = {
    "linear": {"weights"},
    "slerp": {"base", "t"},
    "task": {"base", "weights", "scale"},
    "ties": {"base", "weights", "scale", "density"},
    "dare": {"base", "weights", "scale", "density", "seed"},
}
FLAGS = {"scale": "lambda"}


def recipe(
    method: str,
    files: int,
    weights: Sequence[float] | None,
    *,
    has_base: bool,
    t: float | None,
    scale: float | None,
    density: float | None,
    seed: int | None,
) -> Recipe:
    """Return how `files` are merged, by another method than `linear`. Raises UsageFault."""
    if method not in METHODS:
        raise UsageFault(f"there is no method '{method}'", hint=f"one of {', '.join(METHODS)}")
    require_no_more(method, weights=weights, t=t, scale=scale, density=density, seed=seed)
    if method == "slerp" and files + has_base != 2:
        what = f"slerp goes from one model to one other, and {files + has_base} are given"
        raise UsageFault(what, hint="ckpttool average a.pt b.pt between.pt --method slerp --t 0.3")
    if method != "slerp" and not has_base:
        what = f"{method} adds what models learnt to the one they were trained from"
        raise UsageFault(f"{what}, and none is given", hint="name it: --base BASE")
    if not files:
        raise UsageFault(f"{method} needs a file to merge into the base")
    for name, value in {"t": t, "density": density}.items():
        if value is not None and not 0 <= value <= 1:
            raise UsageFault(f"--{name} {value:g} is not a number from 0 to 1")
    shares = one_for_each(weights, files)
    if not all(map(math.isfinite, (*shares, 1.0 if scale is None else scale))):
        raise UsageFault("weights and --lambda must be finite")
    if not any(shares) and method != "slerp":
        raise UsageFault("weights must not all be 0: nothing would be added to the base")
    return Recipe(
        method,
        tuple(shares),
        t=0.5 if t is None else t,
        scale=1.0 if scale is None else scale,
        density=1.0 if density is None else density,
        seed=seed or 0,
    )


def one_for_each(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return the weights of `count` files, all 1 when None. Raises UsageFault if there are more or fewer."""
    shares = [1.0] * count if weights is None else list(weights)
    if len(shares) != count:
        raise UsageFault(f"{len(shares)} weights for {count} files", hint="--weights w0,w1,… one per file")
    return shares


def require_no_more(method: str, **given: object) -> None:
    """Raise UsageFault for a setting that has no effect on a method."""
    for name, value in given.items():
        if value is not None and name not in TAKES[method]:
            takers = ", ".join(each for each, taken in TAKES.items() if name in taken)
            what = f"--{FLAGS.get(name, name)} has no effect on {method}"
            raise UsageFault(what, hint=f"leave it out; it is for --method {takers}")
