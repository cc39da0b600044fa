"""Whole pickled models, `torch.save(model)`: their tensors under the names `model.state_dict()` gives them.

A module is pickled as its attributes, and four of them make up its state dict, whatever its class:
`_parameters`, `_buffers`, `_non_persistent_buffers_set` and `_modules`. The class is not needed.
The file lacks two things that only the class knows: what `get_extra_state` would return, and the version
numbers in `_metadata`. Hooks that a model would run on its state dict are not run.
Source: `Module.state_dict` and `Module._save_to_state_dict` in torch's `nn/modules/module.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..inert_pickle.values import FROM_TYPE, MAX_DEPTH, Global, Record, in_brief, names_of, tensor_of

# torch.fx pickles a model as a call on its attributes, not as an object with attributes.
GRAPH_MODULES = names_of("torch.fx.graph_module: reduce_graph_module reduce_package_graph_module")

PLAIN_CLASSES = names_of("torch torch._tensor: Tensor\n torch.nn.parameter: Buffer Parameter")

# The wrapper of torch.compile is pickled as a call on the model inside.
COMPILED = Global("torch._dynamo.eval_frame", "OptimizedModule")

GROUPS = ("_parameters", "_buffers", "_modules")

MAX_TEXT = 2_000_000
# The limit on the names of a model: MAX_TEXT characters, or MAX_REPEATS times those it has when each module
# is named once; each name counts 100 characters more. A shared module has a name for every way to it, and
# ways can multiply.
MAX_REPEATS = 64


class BadModules(ValueError):
    """Modules that can't form a model; the message says why."""


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """The contribution of one module: its own tensors by name, parameters first, and its child modules."""

    tensors: dict[str, object]
    modules: dict[str, object]


def attributes(value: object) -> dict[object, object] | None:
    """Return the attributes of a pickled module; None when the value is not a module."""
    if not isinstance(value, Record):
        return None
    state = value.state
    if isinstance(value.args, tuple) and value.args:
        if value.callable == COMPILED:
            return {"_parameters": {}, "_buffers": {}, "_modules": {"_orig_mod": value.args[0]}}
        state = value.args[0] if value.callable in GRAPH_MODULES else state
    if isinstance(state, dict) and all(isinstance(state.get(name), dict) for name in GROUPS):
        return state
    return None


def is_module(value: object) -> bool:
    """Return whether a value is a pickled `nn.Module`, whatever its class."""
    return attributes(value) is not None


def parts(module: object) -> ModuleParts:
    """Return the parts of a pickled module, without absent ones such as the bias of `bias=False`."""
    values = attributes(module) or {}
    hidden = values.get("_non_persistent_buffers_set")
    hidden = hidden if isinstance(hidden, set | frozenset) else set()
    tensors = _present(values.get("_parameters"))
    buffers = _present(values.get("_buffers"))
    tensors.update((name, item) for name, item in buffers.items() if name not in hidden)
    return ModuleParts(tensors, {k: v for k, v in _present(values.get("_modules")).items() if is_module(v)})


def _present(items: object) -> dict[str, object]:
    pairs: Mapping[object, object] = items if isinstance(items, dict) else {}
    return {in_brief(name): item for name, item in pairs.items() if item is not None}


def own_attributes(module: object) -> Iterator[tuple[str, object]]:
    """Yield what an author put into a pickled model, such as `class_names`, by dotted name."""
    # It is in no state dict. Left out is what torch keeps in each module, and numbers and texts in torch's
    # own classes, which are settings of a layer. Wrappers are looked through.
    prefix = ""
    for _ in range(MAX_DEPTH):  # a crafted wrapper may hold itself
        if not _is_wrapper(module) or not (inner := parts(module).modules):
            break
        name, module = next(iter(inner.items()))
        prefix += f"{name}."
    of_torch = isinstance(module, Record) and module.type_name.startswith("torch.")
    for key, item in (attributes(module) or {}).items():
        is_author_s = isinstance(key, str) and not key.startswith("_") and key != "training"
        if is_author_s and (not of_torch or isinstance(item, dict | list)):
            yield f"{prefix}{key}", item


def _is_wrapper(module: object) -> bool:
    if not isinstance(module, Record):
        return False
    return module.callable == COMPILED or module.type_name.startswith("torch.nn.parallel.")


def inside(module: object) -> Iterator[tuple[str, object]]:
    """Yield everything in a pickled module under its Python name: tensors, modules, other attributes."""
    values = attributes(module) or {}
    for group in GROUPS:
        yield from _present(values.get(group)).items()
    yield from ((in_brief(name), item) for name, item in values.items() if name not in GROUPS)


def detached(value: object) -> object:
    """Return a tensor as a state dict holds it: not a Parameter, and without requires_grad."""
    tensor = tensor_of(value)
    match value:
        case Record(callable=name, args=(_, kind, *_)) if name in FROM_TYPE and kind not in PLAIN_CLASSES:
            return value  # of a class that a state dict keeps
    if tensor is None:
        return value
    return replace(tensor, requires_grad=False) if tensor.requires_grad else tensor


def named(root: object, parts: Callable[[object], ModuleParts] = parts) -> Iterator[tuple[str, object]]:
    """Yield the entries of a model's state dict in its order, a module's own before its children's.

    A module in several places is named in each, as torch does. BadModules if modules contain themselves, are
    nested too deeply, or are shared in more ways than can be named.
    """
    parts_of: dict[int, ModuleParts] = {}
    text, once = 0, 0
    above: list[int] = []  # the modules around the current one, outermost first
    stack: list[tuple[str, int, object]] = [("", 0, root)]
    while stack:
        prefix, depth, module = stack.pop()
        del above[depth:]
        if id(module) in above or depth > MAX_DEPTH:
            raise BadModules(f"its module '{prefix[:80]}' is nested in itself, or too deep")
        above.append(id(module))
        new = id(module) not in parts_of
        if new:
            parts_of[id(module)] = parts(module)
        own = parts_of[id(module)]
        yield from ((prefix + name, detached(item)) for name, item in own.tensors.items())
        stack.extend((f"{prefix}{name}.", depth + 1, inner) for name, inner in reversed(own.modules.items()))
        here = sum(100 + len(prefix) + len(name) for name in (*own.tensors, *own.modules))
        text, once = text + here, once + here * new
        if text > max(MAX_TEXT, MAX_REPEATS * once):
            raise BadModules("its modules are nested in each other in too many ways")
