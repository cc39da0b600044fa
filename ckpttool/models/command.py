"""The commands about a model of one's own, whose code they run: `doctor` and `reload`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from ..core.cli import options
from ..core.cli.console import Console, printable, show_bytes, stdout_kept_for_results
from ..core.cli.failure import mismatch_fields
from ..core.cli.reading import fields_of, note_fields, note_state, open_file
from ..core.cli.schemas import KEYS, Fields, fields_like

if TYPE_CHECKING:
    from ..core.checkpoint.selection import Parameters
    from .reloading import Reloaded
    from .report import Diagnosis

OPTIMIZER = "The optimizer: file.py:factory, called with the model, or a class: torch.optim:AdamW(lr=0.1)."
WIDTH = 110  # Columns of a comment, if the terminal has no fewer


def _doctor_printed() -> Fields:
    from .report import Diagnosis

    problem: Fields = {
        "kind": (str, "a stable word for scripts"),
        "message": (str, "what is wrong"),
        "remark": (bool, "the state loads strictly all the same"),
        "command?": (str, "the command that fixes it, after those of the problems before it"),
    }
    problems = ([problem], "in the order in which to fix them")
    return {**fields_like(Diagnosis), "problems": problems, **KEYS}


@options.command("Load", "Why it does not load, and the commands that fix it", _doctor_printed)
@options.file_argument
@options.option("--model SPEC", options.MODEL)
@options.option("--optimizer SPEC", OPTIMIZER)
@options.option("--like REF", "In the place of a model: a checkpoint that loads into it. No code is run.")
@options.state_option
@options.no_verify_option
@options.reading
def doctor(
    console: Console,
    file: str,
    model: str | None,
    optimizer: str | None,
    like: str | None,
    state: str | None,
    no_verify: bool,
) -> None:
    """Say why FILE does not load into a model, and which commands fix it.

    The output is a script: the commands are ready to paste, or to pipe into sh, and what follows # is for
    reading. Each command was tried, in memory, on FILE's names, shapes and values; the last one loads the
    result strictly. Exit 0 if torch's load_state_dict takes FILE as it is, 1 if it does not. A wrapper's
    prefix is a problem for torch alone: reload strips it by itself, and a remark says so.

    With --optimizer, FILE's optimizer is loaded into that one too, without memory: groups, order, missing
    and foreign states, settings, types. torch loads by position; a state at another layer is found by name.

    \b
    Examples:
      ckpttool doctor last.pt --model torchvision:resnet18
      ckpttool doctor last.pt --model net.py:net --optimizer net.py:optimizer
      ckpttool doctor model.safetensors --like other-side.safetensors
    """
    from . import treatment as models

    if (model is None) == (like is None):
        raise click.UsageError("name what FILE should load into: --model SPEC, or --like REF")
    if optimizer and model is None:
        raise click.UsageError("--optimizer needs its model: --model SPEC")
    with open_file(console, file) as checkpoint, stdout_kept_for_results():
        if model is None:
            diagnosis = models.doctor(checkpoint, like=like, state=state, verify=not no_verify)
        else:
            named: dict[str, Any] = {"state": state, "spec": model, "verify": not no_verify}
            module, named["optimizer"] = _built(model, optimizer)
            diagnosis = models.doctor(checkpoint, module, optimizer_spec=optimizer, **named)
    script = _script(diagnosis, model or f"what {like} loads into", optimizer)
    console.result("\n".join(script), _fields(diagnosis))
    if any(not problem.is_remark for problem in diagnosis.problems):
        raise click.exceptions.Exit(1)


def _built(model: str, optimizer: str | None) -> tuple[Any, Any]:
    from .factory import skeleton
    from .live_optimizer import built

    return built(model, optimizer) if optimizer else (skeleton(model), None)


def _fields(diagnosis: Diagnosis) -> dict[str, object]:
    problems = [
        {"kind": problem.kind, "message": problem.message, "remark": problem.is_remark}
        | ({"command": problem.command} if problem.command else {})
        for problem in diagnosis.problems
    ]
    return {**fields_of(diagnosis), "problems": problems, **mismatch_fields(diagnosis.fit.error(""))}


def _script(diagnosis: Diagnosis, spec: str, optimizer: str | None) -> Iterator[str]:
    """Yield the lines of a shell script: commands, and everything else as comments."""
    verbs = {True: "loads", False: "does not load"}
    why = f": {diagnosis.fit}" if diagnosis.fit.distance else ""
    if diagnosis.state is not None or not optimizer:
        yield from _comment(f"{diagnosis.path} {verbs[diagnosis.loads]} into {spec}{why}")
    if optimizer:
        verb = verbs[bool(diagnosis.optimizer_loads)]
        yield from _comment(f"the optimizer in {diagnosis.path} {verb} into {optimizer}")
    remarks = [problem for problem in diagnosis.problems if problem.is_remark]
    wrong = [problem for problem in diagnosis.problems if not problem.is_remark]
    for problem in wrong:
        yield from _comment(f"{problem.kind}: {problem.message}")
        if problem.command and problem.command != diagnosis.then:
            yield problem.command
    if any(problem.command is None for problem in wrong) or (diagnosis.then is None and not optimizer):
        is_mended = any(problem.command for problem in wrong)
        yield "# no command can fix the rest" if is_mended else "# no command can fix that"
    if wrong and diagnosis.then:
        yield diagnosis.then
    for line in filter(None, (diagnosis.python, diagnosis.optimizer_python)):
        yield f"# {'or in Python' if wrong else 'in Python'}: {printable(line)}"
    for remark in remarks:
        yield from _comment(f"{remark.kind}: {remark.message}")
        if remark.command:
            yield f"#   {remark.command}"


def _comment(text: str) -> list[str]:
    """Return text as comment lines, no wider than the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDTH) if sys.stdout.isatty() else WIDTH
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return wrap(printable(text), width, initial_indent="# ", subsequent_indent="#   ", **whole)


def _reload_printed() -> Fields:
    from .reloading import Reloaded

    part: Fields = {"loaded": (int, "from the file"), "of": (int, "in the model")}
    return {
        **fields_like(Reloaded),
        "loaded": (int, "how many tensors of the model got values"),
        "mismatched": (KEYS["mismatched"][0], "always empty: what does not fit is an error"),
        "parameters": (part, "elements of the parameters that got values"),
        "bytes": (part, "bytes of the parameters and buffers that got values"),
        "seconds": (float, "how long it took"),
        "output_shape?": (list[int] | str, "of the output for --input-shape; its type, if it is no tensor"),
    }


@options.command("Load", "Load strictly into a plain model, in one process", _reload_printed)
@options.file_argument
@options.model_option
@options.option("--input-shape N,…", "Also run a forward pass on zeros of this shape.", type=options.shape)
@options.state_option
@options.several(
    "--allow-missing GLOB",
    "Names of the model that FILE may lack or have in another shape; they keep its values.",
)
@options.several("--allow-unexpected GLOB", "Names of FILE that the model may lack; they are ignored.")
@options.no_verify_option
@options.reading
def reload(
    console: Console,
    file: str,
    model: str,
    input_shape: tuple[int, ...] | None,
    no_verify: bool,
    **choices: Any,
) -> None:
    """Load FILE strictly into the plain model, in one process, and report it.

    Nothing distributed is started, and no code that FILE names is run; only --model runs code: yours.
    Wrappers' prefixes are removed while loading if the model does not know them. What may be missing or
    unexpected is said by name, and how much of the model got values. --state also takes an average that
    lists its tensors in the order of the model's parameters (ema.shadow_params).

    \b
    Example:
      ckpttool reload last.pt --model torchvision:resnet18 --input-shape 1,3,64,64
    """
    from . import reloading
    from .factory import skeleton, with_values

    started = time.perf_counter()
    with open_file(console, file) as checkpoint, stdout_kept_for_results():
        opened = time.perf_counter()
        # Values that the model keeps take part in the forward pass; else none of its own are needed.
        build = with_values if input_shape and choices["allow_missing"] else skeleton
        built = build(model)  # may take long, or leave the current folder
        seconds = opened - time.perf_counter()
        note_state(console, checkpoint, choices["state"])
        with console.progress(checkpoint.nbytes, "reading") as progress:
            given = {"spec": model, "verify": not no_verify, "progress": progress, **choices}
            loaded = reloading.reload(checkpoint, built, assign=True, **given)
        seconds += time.perf_counter() - started
        shape = _forward(built, input_shape, model) if input_shape else None
    # What is kept has values in the model, and lacks them in its skeleton alone.
    without_values = [name for name in loaded.without_values if name not in loaded.kept]
    covered = loaded.covered
    data = fields_of(loaded) | {
        "mismatched": [],
        "without_values": without_values,
        "parameters": {"loaded": covered.parameters, "of": covered.of_parameters},
        "bytes": {"loaded": covered.nbytes, "of": covered.of_nbytes},
        "seconds": round(seconds, 4),
        **({"output_shape": shape} if shape else {}),
    }
    note_fields(console, loaded)
    console.note_names("on the meta device, without values, as no file holds them", without_values)
    forward = f"\nforward pass: {list(input_shape)} -> {shape}" if input_shape else ""
    console.result(console.sentence(_line(loaded, model, seconds)) + forward, data)


def _forward(model: Any, shape: tuple[int, ...], spec: str) -> list[int] | str:
    """Return the shape of the model's output for zeros, or its type if it is not a tensor."""
    import torch

    from ..errors import CheckFailed

    model.eval()
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    first = next((m for m in model.modules() if not [*m.children()] and [*m.parameters()]), None)
    dtype = torch.int64 if isinstance(first, torch.nn.Embedding) else next(floats, torch.float32)
    try:
        with torch.inference_mode():
            out = model(torch.zeros(shape, dtype=dtype))
    except (Exception, SystemExit) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        what = f"{spec}: the forward pass failed on zeros of shape {list(shape)}: {reason}"
        raise CheckFailed(what, hint="the state loads; check --input-shape (batch first)") from error
    return list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__


def _line(loaded: Reloaded, spec: str, seconds: float) -> str:
    stripped = f" without '{loaded.prefix}'" if loaded.prefix else ""
    count, covered = len(loaded.loaded), loaded.covered
    how = "strictly"
    if loaded.kept or loaded.ignored:
        sizes = f"{show_bytes(covered.nbytes)} of {show_bytes(covered.of_nbytes)}"
        how = f"{covered.parameters} of its {covered.of_parameters} parameters, {sizes}"
    return (
        f"loaded {count} of {count + len(loaded.kept)} tensors{stripped} into {spec}, {how}, "
        f"in one process ({printable(loaded.path)}, {seconds:.2f} s)"
    )


# ---- Options of other commands


@options.adds_to("slim", behind="output")
@options.option(
    "--model SPEC", "Name the tensors of an average that lists them in the order of this model's parameters."
)
def slim_model(model: str | None) -> Parameters | None:
    """Return the parameters of --model."""
    return _parameters_of(model) if model else None


def _refitted() -> Fields:
    from ..core.checkpoint.optimizer_names import Rekeyed
    from .optimizer_refit import Refitted

    return fields_like(Refitted, without=fields_like(Rekeyed))


@options.adds_to("optimizer", behind="to", prints=_refitted)
@options.option(
    "--model SPEC",
    "Put the parameters in the order of this model: torchvision:resnet18, file.py:factory(n=10).",
)
@options.option("--optimizer SPEC", f"Rebuild its groups for this optimizer of --model. {OPTIMIZER}")
@options.option(
    "--settings",
    "Whose settings of groups win where FILE and --optimizer both have them (default: file).",
    type=click.Choice(["file", "optimizer"]),
)
def optimizer_model(model: str | None, optimizer: str | None, settings: str | None) -> Any:
    """Return what puts a file's optimizers into the order of --model, or the groups of --optimizer."""
    from ..core.checkpoint.optimizer_names import rekeyed

    if optimizer is None:
        if settings:
            raise click.UsageError("--settings is about the groups of an optimizer: --optimizer SPEC")
        shapes = _parameters_of(model) if model else None
        return shapes and partial(rekeyed, parameters=shapes.shapes, trainable=shapes.trainable)
    if model is None:
        raise click.UsageError("--optimizer needs its model: --model SPEC")
    from .live_optimizer import built, described
    from .optimizer_refit import refit

    with stdout_kept_for_results():
        module, made = built(model, optimizer)
        live = [None if each is None else described(module, each, optimizer) for each in made]
    return partial(refit, optimizers=live, settings="optimizer" if settings == "optimizer" else "file")


@options.adds_to("conform", behind="like")
@options.option("--model SPEC", "In the place of REF: a model, as for doctor. Its code is run.")
def conform_model(model: str | None) -> Callable[[], Any] | None:
    """Return what finds the names and shapes of --model."""
    from ..conforming.modules import Blueprint

    return (lambda: Blueprint.of(_skeleton(model)).places) if model else None


@options.adds_to("convert-batchnorm", behind="to")
@options.option(
    "--model SPEC",
    "The plain model, e.g. torchvision:resnet18 or file.py:factory: which layers are 1d, 2d, 3d.",
)
def batchnorm_model(model: str | None) -> Callable[[], Any] | None:
    """Return what builds --model."""
    return (lambda: _skeleton(model)) if model else None


def _skeleton(spec: str) -> Any:
    from .factory import skeleton

    with stdout_kept_for_results():
        return skeleton(spec)


def _parameters_of(spec: str) -> Parameters:
    """Return the parameters of a model. Runs the user's code; imports torch."""
    from ..errors import UsageFault
    from . import factory, reloading

    with stdout_kept_for_results():
        model = factory.build(spec)
    if not hasattr(model, "named_parameters"):
        raise UsageFault(f"{spec}: made a {type(model).__name__}, not a torch.nn.Module")
    return reloading.parameters_of(model)
