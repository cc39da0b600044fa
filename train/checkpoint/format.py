"""What is in a checkpoint: from a trainer, into a file, and back. Imports torch."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pickle
import stat
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ckpttool.core.files.commit import reason
from ckpttool.core.formats.reading import open_alone
from ckpttool.distributed import collectives, randomness, transport
from ckpttool.errors import CkptToolError, Damaged, FileError, Refused, Unreadable, UsageFault
from train.checkpoint.files import as_torch_reads
from train.config.command_line import SOURCES
from train.config.sections import CHANGEABLE
from train.launch import same_settings
from train.trainer.trainer import Trainer


class Each(NamedTuple):
    """A list whose items have one structure."""

    item: Any


class Named(NamedTuple):
    """A dict whose keys have one type, and whose values have one structure."""

    key: type
    value: Any


# What a checkpoint holds: types, `Each` and `Named`, and dicts with keys, optional ones marked by `?`.
NUMBER = (int, float)
SETTING = (str, int, float, bool, type(None), list, tuple)
STRUCTURE: dict[str, Any] = {
    "model": Named(str, object),  # a tensor, or a module's extra state
    "optimizer": {
        "state": Named(int, Named(str, object)),
        "param_groups": Each({"params": Each(int), "param_names": Each(str)}),
    },
    "scheduler": {"base_lrs": Each(NUMBER), "last_epoch": int},
    "scaler": Named(str, NUMBER),
    "ema?": {"updates": int, "averages": Named(str, torch.Tensor)},
    "log": Each(Each(NUMBER)),
    "progress": {
        **dict.fromkeys(("epoch", "step", "global_step", "samples", "uncounted"), int),
        **dict.fromkeys(("best", "lr"), NUMBER),
        "sums": Each(Each(NUMBER)),
        "unscored": bool,
        "since_best?": int,
        "not_finite?": int,
        "top?": Each(Each(NUMBER)),
    },
    "plan": {
        **dict.fromkeys(("samples", "batch_size", "world_size"), int),
        "data": str,
        "contents": Named(str, Named(str, str)),
        "init": (str, type(None)),
    },
    "stream?": {
        "steps": (int, type(None)),
        "lanes": Named(str, {"depth": int, "state": object, "digest": (str, type(None))}),
    },
    "rng": Each({"python": list, "torch": torch.Tensor}),
    "config": Named(str, SETTING),
    "digests": {"model": str, "optimizer": str, "run": str},
    "versions": Named(str, (str, int)),
    "training": str,
    "chain?": str,
    "parts?": {"folder": str, "files": Named(str, str)},
}


def _require(path: str, where: str, value: Any, wanted: Any) -> None:
    """Raise Damaged, naming the place, if a value does not have the wanted structure."""
    if isinstance(wanted, Each):
        _check_type(path, where, value, (list, tuple))
        for number, item in enumerate(value):
            _require(path, f"{where}[{number}]", item, wanted.item)
    elif isinstance(wanted, Named):
        _check_type(path, where, value, (dict,))
        for key, item in value.items():
            _check_type(path, f"{where}: the key {key!r}", key, (wanted.key,))
            _require(path, f"{where}.{key}", item, wanted.value)
    elif isinstance(wanted, dict):
        _check_type(path, where, value, (dict,))
        for key, inner in wanted.items():
            name = key.removesuffix("?")
            if name in value:
                _require(path, f"{where}.{name}".lstrip("."), value[name], inner)
            elif key == name:
                raise Damaged(path, f"lacks {f'{where}.{name}'.lstrip('.')}")
    else:
        _check_type(path, where, value, wanted if isinstance(wanted, tuple) else (wanted,))


def _check_type(path: str, where: str, value: Any, types: tuple[type, ...]) -> None:
    # To Python a bool is an int.
    is_one = isinstance(value, types) if not isinstance(value, bool) else {bool, object} & {*types}
    if not is_one:
        names = " or ".join(kind.__name__ for kind in types)
        raise Damaged(path, f"{where} is a {type(value).__name__}, not a {names}")


# ---- format ------------------------------------------------------------------------------------------

# One dict of primitives and tensors, so `torch.load(weights_only=True)` reads it. It holds what the next step
# depends on and nothing else: from it a run continues as if it had never stopped, bit for bit on the same
# number of ranks.


# Flags that may differ on resume; a change of any other would make it another training.
FREE = {
    *("epochs", "max_steps", "accumulate", "workers", "backend", "spawn", "deterministic"),
    *("timeout", "grace", "prove_every", "stop_at"),
    *("out", "save_every", "save", "save_parts", "keep", "keep_deltas", "resume", "force", "change"),
    *("download", "skip_damaged"),
    "rank_share",  # who takes which sample of a batch, not which samples are in it
    *("zero", "grad_checkpoint"),  # the same bits
    *("shard", "shard_blocks", "shard_offload", "mesh"),
    *("max_time", "eval_every", "eval_batch", "log_every", "preview"),
    *("also_test", "tracker", "every", "profile", "keep_best", "stop_early", *SOURCES),
}

# Compared by content, not by value: the same folder or file may be elsewhere now.
COMPARED_BY_CONTENT = {"data", "test_data", "init", "init_allow_missing"}

# Settings that no checkpoint records: its bytes say what was trained, not where, when, how it was started,
# looked at or written.
NOT_RECORDED = {
    *("out", "resume", "force", "change", "stop_at", "max_time", "spawn", "workers", "timeout", "download"),
    *("save", "save_every", "save_parts", "keep", "keep_deltas", "grace", "prove_every"),
    *("every", "preview", "profile", "tracker", *SOURCES),
}


# How the settings of a group are called where ranks differ in them.
SETTINGS = "the optimizer's settings"

# What `digests["run"]` is of.
PARTS = ("scheduler", "scaler", "progress", "plan", "rng", "config", "versions", "log", "stream")


# ---- of a trainer ---------------------------------------------------------------------------------------


def capture(trainer: Trainer) -> dict[str, Any]:
    """Return everything that the next step depends on, without digests. A collective.

    The tensors of the model and the optimizer are their own, not copies. With `--zero` the optimizer's state
    is rank 0's alone, and the others have its settings. With `--shard` they are copies on the CPU, and those
    that were divided are rank 0's alone.
    """
    trainer.share_buffers()
    config = trainer.config
    tensors = {"model": trainer.ddp.state_dict(), **trainer.updater.state()}
    is_divided = config.model.shard and not config.saving.save_parts
    state = {
        **(transport.whole(tensors) if is_divided else tensors),
        "progress": trainer.progress.state(),
        "plan": trainer.feed.state() | {"init": trainer.init, "judge": trainer.judge},
        "rng": collectives.gather(randomness.take()),
        "config": {name: value for name, value in config.plain().items() if name not in NOT_RECORDED},
        "versions": versions(trainer.place.device),
        "log": collectives.gather(trainer.log.state()),
        "training": training_of(trainer),
        **trainer.feed.position(),
    }
    return state | ({"chain": trainer.recorder.head} if trainer.recorder.head is not None else {})


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Put everything back. On another number of ranks, random numbers are drawn from a new seed.

    Raises:
        UsageFault: the model has tensors of other names, shapes or types than the saved one.
    """
    model = trainer.config.model.name
    try:
        own, saved = trainer.ddp.state_dict(), state["model"]
        parts = {name: transport.part_like(value, own.get(name, value)) for name, value in saved.items()}
        _require_same_types(model, own, parts)
        trainer.ddp.load_state_dict(parts, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UsageFault(f"--model {model}: differs from the saved model: {reason}") from error
    trainer.updater.load(state)
    trainer.progress.load(state["progress"])
    was = state["config"].get("best"), state["plan"].get("judge", trainer.judge)
    if was != (trainer.config.scores.best, trainer.judge):  # merits of another kind
        trainer.progress.best, trainer.progress.top = -math.inf, []
        trainer.progress.since_best = trainer.progress.not_finite = 0
    trainer.feed.load(state["plan"], state["config"].get("rank_share"))
    if "stream" in state:
        trainer.feed.go_on(state["stream"], trainer.progress.epoch)
    trainer.init = state["plan"]["init"]
    rank, world_size = trainer.place.rank, trainer.place.world_size
    trainer.log.restore(state["log"], rank, world_size)
    if len(state["rng"]) == world_size:
        randomness.put_back(state["rng"][rank])
    else:
        step = trainer.progress.global_step
        randomness.seed_all(randomness.seed_from(trainer.config.numbers.seed, "rank", rank, step))


def _require_same_types(model: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise UsageFault for a tensor that loading would round to another type without a word."""
    for name, value in saved.items():
        types = [one.dtype for one in (own.get(name), value) if isinstance(one, torch.Tensor)]
        if len({*types}) > 1:
            now, then = (str(dtype).removeprefix("torch.") for dtype in types)
            what = f"--model {model}: {name.removeprefix('module.')} is {now}, and {then} in the saved model"
            raise UsageFault(what, hint=f"make it in {then}; --init starts another run from its weights")


def training_of(trainer: Trainer) -> str:
    """Return a digest that tells this training from others: of what no resume may change."""
    settings, free = trainer.config.plain(), FREE | COMPARED_BY_CONTENT | CHANGEABLE
    fixed = {name: value for name, value in settings.items() if name not in free}
    return collectives.digest_all(fixed | {"data": trainer.data.fingerprint, "init": trainer.init})


def versions(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of a result depend on, apart from the checkpoint."""
    software = same_settings.versions()
    named: dict[str, Any] = {name: software[name] for name in ("ckpttool", "torch", "python")}
    return named | {"device": device.type, "threads": torch.get_num_threads()}


# ---- a file ---------------------------------------------------------------------------------------------


def digest_of_run(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything in a checkpoint but the model and the optimizer."""
    return collectives.digest_all({part: _plain(state[part]) for part in PARTS if part in state})


def _plain(value: Any) -> Any:
    """Return the value with a digest in place of each tensor, so that its `repr` distinguishes it."""
    if isinstance(value, torch.Tensor):
        return ("tensor", collectives.digest(value).hex())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def named_optimizer(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state, flat and by name: `momentum_buffer of module.conv1.weight` -> tensor."""
    flat: dict[str, Any] = {}
    for number, group in enumerate(optimizer["param_groups"]):
        flat[f"{SETTINGS} of group {number}"] = sorted(group.items())
        for index, name in zip(group["params"], group["param_names"], strict=True):
            state = optimizer["state"].get(index, {})
            flat |= {f"{kind} of {name}": value for kind, value in state.items()}
    return flat


def same_on_ranks(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values that must be equal on all ranks, by part and by name; with `--zero` only rank 0 has
    more of the optimizer than its settings."""
    parts = {"model": state["model"], "optimizer": named_optimizer(state["optimizer"])}
    return parts | ({"ema": state["ema"]["averages"]} if "ema" in state else {})


def read(path: str) -> dict[str, Any]:
    """Return a checkpoint of this trainer, on the CPU, compared with its digests, as torch checks nothing.

    Raises Unreadable, Damaged, or Refused for another program's file.
    """
    require_file(path)
    try:
        with as_torch_reads(path) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except CkptToolError:  # of a delta
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch looked before the beginning of a file that is cut short
            raise _unread(path, reason(error)) from error
        raise Unreadable(path, reason(error)) from error
    except pickle.UnpicklingError as error:  # torch's own text tells how to run what is in it
        what = "it holds more than tensors and plain values, or is damaged; nothing in it was run"
        raise Damaged(path, f"can't be read: {what}") from error
    except Exception as error:  # torch raises all kinds of errors for damaged bytes
        raise _unread(path, str(error).partition("\n")[0] or type(error).__name__) from error
    if not isinstance(state, dict) or not {"model", "optimizer", "progress", "digests"} <= state.keys():
        hint = f"inspect it: ckpttool inspect {path}; a slimmed one goes through --init"
        raise Refused(path, "is not a checkpoint of this trainer", hint=hint)
    with malformed(path):
        _require(path, "", state, STRUCTURE)
        of_parts = {part: collectives.digest_all(values) for part, values in same_on_ranks(state).items()}
        digests = of_parts | {"run": digest_of_run(state)}
    for part, digest in state["digests"].items():
        if digests.get(part, digest) != digest:
            what = "values of the run" if part == "run" else f"{part}'s values"
            raise Damaged(path, f"the {what} are not the saved ones")
    return state


def _unread(path: str, why: str) -> Damaged:
    """Return the error for what torch can't read, as our own reader says it, where that can't either."""
    try:
        with open_alone(path):
            return Damaged(path, f"can't be read: {why}")
    except FileError as fault:
        return Damaged(path, fault.reason)


@contextlib.contextmanager
def malformed(path: str) -> Iterator[None]:
    """Raise Damaged for any error in the block that the contents of a checkpoint can cause."""
    try:
        yield
    except CkptToolError:
        raise
    except Exception as error:  # torch's own checks of a state raise all kinds of errors
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Damaged(path, f"does not hold the state of a run: {why}") from error


def require_file(path: str) -> None:
    """Raise Unreadable if there is no file, and Refused for a pipe or a device, which may never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise Unreadable(path, "is a link to nothing" if os.path.islink(path) else reason(error)) from error
    if not stat.S_ISREG(mode):
        raise Refused(path, "is not a regular file", hint="name a checkpoint: --resume PATH")
