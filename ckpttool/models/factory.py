"""Import and call what a SPEC names: `torchvision:resnet18`, `file.py:factory`, `pkg.module:factory(n=10)`.

Only this module runs code that the user names. Nothing runs code that a checkpoint names.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..core.checkpoint.state import State
from ..core.lazy import needing_torch
from ..core.tensors.values import live_tensors
from ..errors import UsageFault

if TYPE_CHECKING:
    import torch

INSTALLED = sysconfig.get_path("stdlib")
FORM = re.compile(r"(?P<where>.+?):(?P<name>\w+)(?P<call>\(.*\))?", re.DOTALL)
# Names that the trainer's --model takes, with their factories; this package never imports the trainer.
OF_TRAINER = {"simple-cnn": "train.model.builtin:simple_cnn", "resnet20": "train.model.builtin:resnet20"}
FORMS = "torchvision:resnet18, path/to/file.py:factory or package.module:factory(num_classes=10)"


def build(spec: str, **defaults: object) -> Any:
    """Call the factory that a SPEC names; it gets those of the defaults that it takes and the SPEC lacks."""
    where, name, arguments = parse(spec)
    with _importable(_folder(where)):
        factory = _find(spec, where, name)
        accepted = _accepted(factory, defaults)
        try:
            return factory(**{**accepted, **arguments})
        except (Exception, SystemExit) as error:
            hint = _missing_arguments(factory, spec) or _missing_file(error)
            raise UsageFault(f"{spec}: {described(error)}", hint=hint) from error


def parse(spec: str) -> tuple[str, str, dict[str, object]]:
    """Split a SPEC into where the factory is, its name and its literal keyword arguments."""
    parts = FORM.fullmatch(spec)
    if parts is None or not parts["name"].isidentifier():
        factory = OF_TRAINER.get(spec.partition("(")[0])
        known = f"the trainer's own model is, in the trainer's folder: --model {factory}" if factory else None
        raise UsageFault(f"'{spec}' does not name a factory", hint=known or f"forms: {FORMS}")
    where, name = parts["where"], parts["name"]
    try:
        return where, name, _arguments(parts["call"] or "()")
    except (SyntaxError, ValueError):
        reason = f"'{spec}' has arguments that are not name=literal"
        raise UsageFault(reason, hint=f"for example: {where}:{name}(n=10)") from None


def _arguments(call: str) -> dict[str, object]:
    """Return `(n=10)` as a dict. Raise SyntaxError or ValueError for anything but literals by name."""
    tree = ast.parse(f"f{call}", mode="eval").body
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
        raise ValueError(call)
    arguments: dict[str, object] = {}
    for keyword in tree.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError(call)
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return arguments


def function(spec: str) -> Callable[..., Any]:
    """Return what a SPEC names, to be called with arguments of the caller's; those of the SPEC are added."""
    found, given = _located(spec)
    return functools.partial(found, **given) if given else found


def arguments(spec: str) -> tuple[dict[str, object], bool]:
    """Return the keyword arguments that the factory of a SPEC gets, and whether it takes any other too."""
    factory, given = _located(spec)
    parameters = inspect.signature(factory).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {**defaults, **given}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def takes(spec: str) -> Callable[[str], bool]:
    """Return whether the factory of a SPEC takes an argument of a name, and the SPEC does not give it."""
    factory, given = _located(spec)
    parameters = _parameters(factory)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return lambda argument: argument not in given and (takes_any or argument in names)


def _located(spec: str) -> tuple[Callable[..., Any], dict[str, object]]:
    """Return what a SPEC names, and its arguments."""
    where, name, given = parse(spec)
    with _importable(_folder(where)):
        return _find(spec, where, name), given


def respelled(spec: str, changes: Mapping[str, object]) -> str:
    """Return a SPEC with some of its arguments changed or added."""
    where, name, given = parse(spec)
    words = ", ".join(f"{key}={value!r}" for key, value in {**given, **changes}.items())
    return f"{where}:{name}({words})"


def _folder(where: str) -> str:
    return os.path.dirname(os.path.abspath(where)) if where.endswith(".py") else os.getcwd()


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Put a folder first on the import path, as Python does for a script that lies in it."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have changed the path itself
            sys.path.remove(folder)


def _find(spec: str, where: str, name: str) -> Callable[..., Any]:
    try:
        if where == "torchvision":
            module = importlib.import_module("torchvision.models")
        elif where.endswith(".py"):
            module = _module_of_file(where)
        else:
            module = importlib.import_module(where)
    except UsageFault:
        raise
    except (Exception, SystemExit) as error:
        hint = f"forms: {FORMS}" if isinstance(error, ModuleNotFoundError) else None
        raise UsageFault(f"{spec}: {described(error)}", hint=hint) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UsageFault(f"{spec}: '{where}' has no factory '{name}'", hint=_similar(module, name))
    return factory  # type: ignore[no-any-return]


def _module_of_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise UsageFault(f"{path}: no such file", hint=f"forms: {FORMS}")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(f"_ckpttool_user_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up by name
    spec.loader.exec_module(module)
    return module


def _parameters(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(factory).parameters.values()]
    except (TypeError, ValueError):  # of a builtin, which has no signature
        return []


def _accepted(factory: Callable[..., Any], defaults: dict[str, object]) -> dict[str, object]:
    parameters = _parameters(factory)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return defaults
    return {p.name: defaults[p.name] for p in parameters if p.name in defaults}


def _missing_arguments(factory: Callable[..., Any], spec: str) -> str | None:
    needed = [
        p.name
        for p in _parameters(factory)
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if not needed:
        return None
    example = ", ".join(f"{name}=…" for name in needed)
    return f"it takes arguments: {spec.partition('(')[0]}({example})"


def _missing_file(error: BaseException) -> str | None:
    name = error.filename if isinstance(error, FileNotFoundError) else None
    if not isinstance(name, str) or os.path.isabs(name):
        return None
    return f"'{name}' is looked for in the current folder, {os.getcwd()}"


def _similar(module: ModuleType, name: str) -> str | None:
    import difflib

    names = [n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n, None))]
    close = difflib.get_close_matches(name, names, n=3) or names[:5]
    return f"it has: {', '.join(close)}" if close else None


def described(error: BaseException) -> str:
    """Return an error of the user's code in one line, with its place in that code if it has one there."""
    try:
        first = str(error).partition("\n")[0]
    except Exception:  # the user's class may be wrong too
        first = ""
    return f"{type(error).__name__}{first and ': '}{first}{_place(error)}"


def _place(error: BaseException) -> str:
    """Return the place of the last frame of the user's own code, not of Python or an installed package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__
        and not frame.filename.startswith(("<", INSTALLED))
        and "site-packages" not in frame.filename
    ]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


# ---- Models without memory for their parameters; imports torch when called


@contextmanager
def skeletons() -> Iterator[None]:
    """Build modules on the meta device within this context: parameters get no values.

    `ckpttool.reload(path, model, assign=True)` then fills such a model from the file. Buffers are real: what
    a constructor computes (positions, masks) need not be in any file. A parameter takes memory for the moment
    between its creation and its registration; one that is registered twice stays one parameter.

    Yields:
        None. `torch.nn.Module.register_parameter` is replaced until the context ends, in all threads.

    Example:
        >>> import torch
        >>> with ckpttool.skeletons():
        ...     model = torch.nn.Linear(4, 8)
        >>> model.weight.device.type
        'meta'
    """
    with needing_torch("skeletons"):
        import torch

    register = torch.nn.Module.register_parameter
    made: dict[int, tuple[weakref.ref[torch.nn.Parameter], torch.nn.Parameter]] = {}

    def register_on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.is_meta or torch.nn.parameter.is_lazy(param):
            return
        alive, meta = made.get(id(param), (None, None))
        if meta is None or alive is None or alive() is not param:
            meta = _on_meta(param)
            made[id(param)] = weakref.ref(param), meta
        self._parameters[name] = meta

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(parameter: torch.nn.Parameter) -> Any:
    kind = type(parameter)
    meta = kind(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    meta.__dict__.update(parameter.__dict__)  # marks that libraries put on their parameters
    return meta


def skeleton(spec: str) -> torch.nn.Module:
    """Build the model that a SPEC names, without memory for its parameters where possible."""
    try:
        with skeletons():
            model = with_values(spec)
    except UsageFault:  # a constructor that reads values fails without them; any other error comes again
        return with_values(spec)
    return with_values(spec) if _lost_values(model) else model


def with_values(spec: str) -> torch.nn.Module:
    """Build the model that a SPEC names, with the values that its constructor gives it."""
    import torch

    model = build(spec)
    if not isinstance(model, torch.nn.Module):
        raise _no_module(spec, model)
    return model


def _no_module(spec: str, made: object) -> UsageFault:
    """Return the error for a factory that returns something else than a model, with what it should return."""
    import torch

    what, hint = f"an object of type {type(made).__name__}", None
    if made is None:
        what, hint = "None", "end the factory with `return model`"
    elif isinstance(made, type):
        what = f"the class {made.__name__}"
        hint = f"call it: return {made.__name__}()" if issubclass(made, torch.nn.Module) else None
    elif isinstance(made, tuple | list) and any(isinstance(item, torch.nn.Module) for item in made):
        hint = "name a factory that returns the model alone"
    elif isinstance(made, dict) and any(isinstance(item, torch.Tensor) for item in made.values()):
        hint = "return the model, not its state"
    elif inspect.iscoroutine(made):
        made.close()  # else Python warns that nobody awaited it
    return UsageFault(f"{spec}: returned {what}, not a torch.nn.Module", hint=hint)


def _lost_values(model: torch.nn.Module) -> bool:
    """Return whether a constructor kept something computed from its parameters, which had no values."""
    import torch

    attributes = (value for module in model.modules() for value in vars(module).values())
    tensors = (value for value in (*model.buffers(), *attributes) if isinstance(value, torch.Tensor))
    return any(tensor.is_meta for tensor in tensors)


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a live module without memory, on which a load can be tried."""
    import torch

    without_memory = {
        id(tensor): _on_meta(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor.to("meta")
        for tensor in (*model.parameters(), *model.buffers())
    }
    return copy_of(model, without_memory)


def copy_of(model: torch.nn.Module, known: Mapping[int, Any] | None = None) -> torch.nn.Module:
    """Return a copy of a live module; what can't be copied in it, as a lock, is shared.

    A tensor that was computed, as the weight of torch's old `weight_norm`, becomes a constant.

    Args:
        known: by `id`, what takes the place of an object.

    Raises:
        UsageFault: the module has a way of its own to be copied, and that fails.
    """
    import copy

    memo = dict(known or {})
    with contextlib.suppress(Exception):  # of any kind: each object refuses in its own way
        return copy.deepcopy(model, dict(memo))
    for module in model.modules():
        for value in vars(module).values():
            _share(value, memo)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        what = f"the model, {type(model).__name__}, can't be copied: {described(error)}"
        raise UsageFault(
            what, hint="it is tried on a copy before it is trained: see its __deepcopy__"
        ) from error


def _share(value: Any, memo: dict[int, Any]) -> None:
    """Note in `memo`, for what can't be copied in a module's attribute, what takes its place in a copy."""
    import copy

    import torch

    if isinstance(value, torch.Tensor) and not value.is_leaf:
        memo.setdefault(id(value), value.detach().clone())
    elif isinstance(value, Mapping):
        for item in value.values():
            _share(item, memo)
    elif isinstance(value, list | tuple):
        for item in value:
            _share(item, memo)
    elif not isinstance(value, torch.Tensor | torch.nn.Module):
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:  # of any kind
            memo[id(value)] = value


def accepts(model: torch.nn.Module, state: State) -> bool:
    """Return whether modules with loading rules of their own take a state whose names differ from theirs."""
    import warnings

    if not any(map(_has_own_rules, model.modules())):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a copy into meta tensors does nothing
        try:
            on_meta(model).load_state_dict(with_versions(state, live_tensors(state.tensors)), strict=True)
        except Exception:  # any error means no; the comparison of names says what is wrong
            return False
    return True


def _has_own_rules(module: torch.nn.Module) -> bool:
    import torch
    from torch.nn.modules.batchnorm import _NormBase

    known = torch.nn.Module._load_from_state_dict, _NormBase._load_from_state_dict
    return type(module)._load_from_state_dict not in known or bool(module._load_state_dict_pre_hooks)


def with_versions(state: State, values: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the `_metadata` by which modules recognise states of older versions."""
    from collections import OrderedDict

    loaded: OrderedDict[str, Any] = OrderedDict(values)
    if state.versions is not None:
        versions = {path: dict(entry) for path, entry in state.versions.items() if isinstance(entry, dict)}
        loaded._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return loaded
