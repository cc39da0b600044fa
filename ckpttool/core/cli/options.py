"""How a command is declared, with its arguments and options; those that several share, each defined once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...errors import CkptToolError, OutputExists, UsageFault
from ...rooms import need
from .console import Console
from .failure import Call

if TYPE_CHECKING:
    from ..files.parts import OutputPart

TWO_COLUMNS = 60  # of a terminal from which on options stand beside their meaning

# What a command prints as JSON, or a function that returns it: fields; or a list where it prints one or
# another, in which a list is an array
Printed = Any


class Help(click.HelpFormatter):
    """Help that keeps to a narrow terminal, where click's own writes 50 columns."""

    def __init__(self, width: int | None = None, max_width: int | None = None) -> None:
        if width is None:
            width = max(min(shutil.get_terminal_size().columns, max_width or 80) - 2, 30)
        super().__init__(width=width)

    def write_dl(self, rows: Iterable[tuple[str, str]], *given: Any, **options: Any) -> None:
        """Write names and what they mean in two columns, or one below the other."""
        if self.width >= TWO_COLUMNS:
            return super().write_dl(rows, *given, **options)
        for name, meaning in rows:
            self.write(f"{'':{self.current_indent}}{name.rstrip()}\n")
            with self.indentation(), self.indentation():
                self.write_text(meaning)
        return None


class Context(click.Context):
    """What a command is called with."""

    formatter_class = Help


class Addition(click.Command):
    """Options that a capability adds to the command of another: `ckpttool convert --map`.

    The callback gets what the command hands to `added`, and the values of these options.
    """

    def __init__(self, name: str, *, behind: str, when: str, prints: Printed, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.behind, self.when, self.prints = behind, when, prints


class Command(click.Command):
    """A command, with all that the tool says of it.

    Attributes:
        section: the heading of `ckpttool --help` that it stands under.
        summary: its line there.
        several: it takes several FILEs, and prints `files` then.
        additions: what other capabilities add to it.
    """

    context_class = Context

    def __init__(
        self,
        name: str,
        *,
        section: str,
        summary: str,
        prints: Printed,
        several: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(name, **settings)
        self.section, self.summary, self.several = section, summary, several
        self.additions: list[Addition] = []
        self._prints = prints

    def add(self, *additions: Addition) -> None:
        """Take in the options of other capabilities, each behind the one that it names."""
        self.additions += additions
        for each in reversed(additions):
            place = [param.name for param in self.params].index(each.behind) + 1
            self.params[place:place] = each.params

    def printed(self) -> list[Any]:
        """Return the fields, or the array, that it prints where there is no error: one of several."""
        printed = _made(self._prints)
        first, *others = printed if isinstance(printed, list) else [printed]
        for each in self.additions:
            more = {f"{name}?": meaning for name, meaning in _made(each.prints).items() if name not in first}
            first = {**first, **more}
        of_part = [PART] if "parts_in" in [param.name for param in self.params] else []
        return [first, *others, *of_part]

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of what it prints with --json, also where it fails."""
        from .schemas import document

        title = f"ckpttool {self.name} --json"
        return document(title, self.summary, self.printed(), several=self.several)


# What one of several parts prints that is not the last
PART = {
    "part": (str, "which part of the reading was done, `3/16`"),
    "waiting": (tuple[int, ...], "the numbers of the parts that are not done yet"),
}


def _made(prints: Printed) -> Any:
    return prints() if callable(prints) else prints


def command(
    section: str, summary: str, prints: Printed, *, several: bool = False
) -> Callable[[Callable[..., Any]], Command]:
    """Declare a command by what `Command` holds, and what it prints; its name is that of the function."""
    return click.command(cls=Command, section=section, summary=summary, prints=prints, several=several)


def adds_to(
    name: str, *, behind: str, when: str = "", prints: Printed = dict
) -> Callable[[Callable[..., Any]], Addition]:
    """Declare an addition to a command: options, and a function below.

    Args:
        name: that of the command.
        behind: the command's own parameter behind which the options stand in its help.
        when: the point at which the command calls the function, where it has several.
        prints: the fields that it adds to the command's JSON; each may be missing.
    """
    return click.command(name, cls=Addition, behind=behind, when=when, prints=prints)


def also_to(name: str, addition: Addition, *, behind: str) -> Addition:
    """Declare that an addition to one command is one to another, too."""
    of_it = {"params": addition.params, "callback": addition.callback, "prints": addition.prints}
    return Addition(name, behind=behind, when=addition.when, **of_it)


def added(given: dict[str, Any], *shared: Any, when: str = "") -> list[Any]:
    """Call the additions to the running command, and return what is not None of their answers.

    Each gets what is shared, and its own options, which are taken out of `given`.
    """
    command = click.get_current_context().command
    assert isinstance(command, Command)
    found = []
    for each in command.additions:
        if each.when == when and each.callback is not None:
            answer = each.callback(*shared, **{param.name: given.pop(param.name) for param in each.params})
            found += [] if answer is None else [answer]
    return found


def shape(value: str) -> tuple[int, ...]:
    """Read whole numbers separated by commas: `1,3,32,32`."""
    parts = value.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise click.BadParameter(f"'{value}' is not a shape such as 1,3,32,32")
    return tuple(int(part) for part in parts)


def size(value: str) -> int:
    """Read a number of bytes: `500MB`, `5G`, `1GiB`. Raises UsageFault if the text is no size."""
    from ..formats.destination import parse_size

    return parse_size(value)


def pair(value: str) -> tuple[str, str]:
    """Read two parts separated by =, at the last one: names may hold others."""
    return _parts(value, *value.rpartition("="))


def entry(value: str) -> tuple[str, str]:
    """Read a name and a text separated by =, at the first one: the text may hold others."""
    return _parts(value, *value.partition("="))


def sizes_for(value: str) -> tuple[str, tuple[int, ...]]:
    """Read a shell pattern of keys, and whole numbers: `*.weight=1,0`."""
    pattern, sizes = pair(value)
    return pattern, shape(sizes)


def _parts(value: str, left: str, equals: str, right: str) -> tuple[str, str]:
    if not (left and equals and right):
        raise click.BadParameter(f"'{value}' is not two parts separated by =")
    return left, right


# Of inputs: that one can't be read is found by reading it, and is no wrong usage, as click has it.
PATH = click.Path(readable=False)

F = TypeVar("F", bound=Callable[..., Any])


def option(said: str, help: str, *names: str, **settings: Any) -> Callable[[F], F]:
    """Return an option, as its help says it: `--model SPEC`."""
    name, _, metavar = said.partition(" ")
    return click.option(name, *names, metavar=metavar or None, help=help, **settings)


def several(said: str, help: str, type: Callable[[str], Any] | None = None) -> Callable[[F], F]:
    """Return an option that may be given again and again."""
    return option(said, f"{help} Repeatable.", type=type, multiple=True)


def flag(name: str, help: str, *names: str) -> Callable[[F], F]:
    """Return an option without a value."""
    return click.option(name, *names, is_flag=True, help=help)


def note_output(ctx: click.Context, argument: click.Parameter, output: str | None) -> str | None:
    """Record for the report of an error that stdout is the output file."""
    ctx.ensure_object(Call).to_stderr = output == "-"
    if output is None:
        return None
    if "://" in output:
        from ..formats.strangers import output_at

        return output_at(output, ctx.ensure_object(Call).revision)
    return output


def note_inputs(ctx: click.Context, argument: click.Parameter, given: Any) -> Any:
    """Record the command and its input files for the report of an error."""
    call = ctx.ensure_object(Call)
    call.command = ctx.command_path
    named = given if isinstance(given, tuple) else (given,)
    if any("://" in path for path in named if path):
        from ..remote.places import visit
        from ..remote.urls import canonical

        ctx.with_resource(visit())  # so that a command asks each thing once
        _return_memory()
        named = tuple(canonical(path, call.revision) for path in named)
    call.paths += named
    return named if isinstance(given, tuple) else named[0]


def note_base(ctx: click.Context, option: click.Parameter, given: str | None) -> Any:
    """Record an input that is an option, if it is given."""
    return None if given is None else note_inputs(ctx, option, given)


def _return_memory() -> None:
    """Have glibc give large blocks back as soon as they are free, though many threads ask for them."""
    import ctypes

    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD, of malloc.h


def _note_revision(ctx: click.Context, option: click.Parameter, revision: str | None) -> None:
    ctx.ensure_object(Call).revision = revision


def _stay_offline(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    """Tell our stores, and the hub's library."""
    if asked:
        os.environ.update(CKPTTOOL_OFFLINE="1", HF_HUB_OFFLINE="1")


def part_output(ctx: click.Context, argument: click.Parameter, given: tuple[str, ...]) -> Any:
    """Take the last argument for OUTPUT. click would say of a single one that INPUT is missing."""
    if len(given) < 2 and not ctx.resilient_parsing:
        hint = "'OUTPUT'" if given else "'INPUT… OUTPUT'"
        raise click.MissingParameter(ctx=ctx, param_hint=hint, param_type="argument")
    ctx.params["output"] = note_output(ctx, argument, given[-1]) if given else None
    return note_inputs(ctx, argument, given[:-1])


def argument(name: str, metavar: str, **settings: Any) -> Callable[[F], F]:
    """Return an argument that names an input, `-` for stdin."""
    settings = {"type": PATH, "callback": note_inputs, **settings}
    return click.argument(name, metavar=metavar, **settings)


input_argument = argument("input", "INPUT")
inputs_and_output = argument("inputs", "INPUT… OUTPUT", nargs=-1, callback=part_output)
output_argument = argument("output", "OUTPUT", callback=note_output)
optional_output = argument("output", "[OUTPUT]", callback=note_output, required=False)
file_argument = argument("file", "FILE")
files_argument = argument("files", "FILE…", nargs=-1, required=True)

state_option = option(
    "--state WHERE", "Which state to use if the file holds several, dotted for nesting, e.g. model.ema."
)
MODEL = "The model: torchvision:resnet18, file.py:factory or pkg.mod:factory(n=10). Its code is run."
model_option = option("--model SPEC", MODEL, required=True)
dry_run_option = flag("--dry-run", "Say what would be written, but write nothing.")
no_verify_option = flag("--no-verify", "Do not compare the bytes read with their checksums.")
device_option = option(
    "--device NAME", "The device that a .pt tags its storages with, e.g. cpu; default: as INPUT."
)
FORMATS = ("torch-zip", "safetensors", "safetensors-sharded", "torch-sharded", "dcp")
to_option = option(
    "--to FORMAT",
    f"Write FORMAT, whatever OUTPUT's name: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.",
    type=click.Choice(FORMATS, case_sensitive=False),
)


def rank_of_torchrun() -> tuple[int, int]:
    """Return the rank of a process that torchrun itself has started, and how many there are; else (0, 1)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    words = []
    with suppress(OSError), open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
        words = file.read().decode(errors="replace").split("\0")
    if not any(map(TORCHRUN.fullmatch, words)):
        return 0, 1  # a training script, whose variables are inherited, runs this command
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def this_part(ctx: click.Context, __: click.Parameter, given: str | None) -> object:
    """Return the part that was named, or that torchrun has started this process for."""
    from ..files.parts import OutputPart
    from ..remote.places import visit

    rank, count = rank_of_torchrun()
    if given is None and count > 1:
        given = f"{rank + 1}/{count}"
    if given is None:
        return None
    ctx.with_resource(visit())  # which knows of all files that the part reads
    return OutputPart.parse(given)


part_option = option(
    "--part I/N",
    "Write part I of N; who finds all others done puts them in place. Default under torchrun: of its ranks.",
    callback=this_part,
)
jobs_option = option(
    "--jobs N",
    "Write N parts at once, in processes of this machine: where Python is what takes the time.",
    type=click.IntRange(1, 1000),
)
resume_option = flag("--resume", "Go on with an interrupted conversion from a URL.")
full_option = flag("--full", "Keep everything, also in safetensors: optimizer, counters, settings.")


TORCHRUN = re.compile(
    r"(.*/)?torchrun|torch\.distributed\.(run|launch)|.*/torch/distributed/(run|launch)\.py"
)

# Parameters that change no byte of an output
SAYING = {"as_json", "part", "jobs", "quiet", "verbose", "force", "resume", "verify", "companions", "output"}
SAYING |= {"parts_in", "html"}


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What the options that all commands share which write say: taken apart here, and nowhere else."""

    console: Console
    inputs: tuple[str, ...]
    input: str  # the first of them
    output: str
    state: str | None = None
    shard_size: int | None = None
    device: str | None = None
    companions: bool = False
    verify: bool | None = None
    dry_run: bool = False
    force: bool = False
    resume: bool = False
    part: OutputPart | None = None
    reflink: str = "auto"
    jobs: int | None = None
    said: list[dict[str, Any]] = field(default_factory=list)  # what the parts of --jobs have said

    @contextmanager
    def in_processes(self) -> Iterator[WriteJob]:
        """Yield the first part of the job while other processes write the rest, where --jobs asks for it."""
        if self.jobs in (None, 1) or self.dry_run:
            yield self
            return
        if self.part:
            raise UsageFault("--jobs makes parts of its own", hint="leave out --jobs, or --part and torchrun")
        from ..files.parts import OutputPart
        from ..remote.places import visit

        with visit(), need("dividing.plan").all_but_first(_words(), self.jobs) as wait:
            yield replace(self, part=OutputPart(1, self.jobs, lambda: self.said.extend(wait())))

    def saving(self) -> dict[str, Any]:
        """Return the arguments of `formats.save`."""
        names = ("state", "shard_size", "device", "verify", "force", "dry_run", "reflink")
        return {name: getattr(self, name) for name in names}

    def require_new_output(self, *, alone: bool = True) -> None:
        """Refuse an OUTPUT that may be the last of several INPUTs."""
        from .. import formats

        output, inputs = self.output, self.inputs
        is_plain = len(inputs) == 1 and (alone or os.path.isdir(inputs[0]))
        if self.force or output == "-" or is_plain or not os.path.lexists(output):
            return
        try:
            formats.open(output).close()
        except CkptToolError:
            return  # it is no input, and the usual answer to an existing OUTPUT fits
        shown = [*map(shlex.quote, inputs)]
        command = click.get_current_context().command_path
        words = " ".join([command, *shown[:2], *(["…"] if shown[2:] else []), shlex.quote(output), "OUTPUT"])
        what = f"{output}: is a checkpoint that is there already, and the last argument is the OUTPUT"
        raise OutputExists(what, hint=f"if {output} is an INPUT, name the OUTPUT after it: {words}")


def words_of_parts() -> tuple[str, ...]:
    """Return the running command without --part; nothing where a URL in it may hold a secret."""
    words = _words()
    return () if any("://" in word and re.search("[@?]", word) for word in words) else words


def _words() -> tuple[str, ...]:
    """Return the words of the running command, but for those that say its part."""
    words, of_part = click.get_current_context().ensure_object(Call).typed, ("--part", "--jobs")
    return tuple(
        word
        for before, word in pairwise(("", *words))
        if before not in of_part and word.partition("=")[0] not in of_part
    )


def recipe_of_parts() -> str:
    """Return what all parts of the running command have in common."""
    ctx = click.get_current_context()
    said = {name: value for name, value in ctx.params.items() if name not in SAYING}
    # Links that are signed anew lead to the same objects.
    return re.sub(r"\?…[0-9a-f]{8}", "", repr((ctx.info_name, sorted(said.items()))))


def _with_console(function: F) -> F:
    """Hand a command its console in the place of the options that describe it."""

    @wraps(function)
    def command(as_json: bool, quiet: bool, verbose: bool, **given: Any) -> Any:
        to_stderr = "-" in (given.get("output"), given.get("html"))
        return function(console=Console(as_json, quiet, verbose, to_stderr), **given)

    return command  # type: ignore[return-value]


def _with_job(function: F) -> F:
    """Hand a command the options that it shares with others as one WriteJob."""

    @wraps(function)
    def command(**given: Any) -> Any:
        given.setdefault("inputs", (given.get("input"),))
        given["input"] = given["inputs"][0]
        shared = {each.name: given.pop(each.name) for each in fields(WriteJob) if each.name in given}
        with WriteJob(**shared).in_processes() as job:
            return function(job=job, **given)

    return command  # type: ignore[return-value]


def all_of(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


# The options of every command, which gets a `console` for them
reading = all_of(
    flag("--json", "Print one JSON object on stdout, also for errors.", "as_json"),
    flag("-q", "Print only errors.", "--quiet"),
    flag("-v", "Show every name, not only the first few.", "--verbose"),
    option(
        "--revision NAME",
        "Of hf:// URLs: the branch, tag or commit, where @NAME does not say it.",
        is_eager=True,
        expose_value=False,
        callback=_note_revision,
    ),
    click.option(
        "--offline",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_stay_offline,
        help="Ask no server: of hf://, take what the hub's own cache holds.",
    ),
    _with_console,
)

# What all commands have that write something: their arguments and shared options become a `job`
folder_options = all_of(
    option(
        "--verify/--no-verify",
        "Also compare the values written with those read; or do not even compare bytes with checksums.",
        default=None,
    ),
    dry_run_option,
    flag("--force", "Replace OUTPUT if it exists."),
    reading,
    _with_job,
)
reflink_option = option(
    "--reflink WHEN",
    "Share blocks with INPUT, on btrfs and XFS: auto (default), always (tensors are put in order) or never.",
    type=click.Choice(("auto", "always", "never")),
    default="auto",
)
job_options = all_of(
    flag(
        "--companions",
        "Also copy the small files of the model in INPUT's folder: config.json, the tokenizer.",
    ),
    reflink_option,
    folder_options,
)
writing_options = all_of(
    state_option,
    option(
        "--shard-size SIZE",
        "The largest size of a shard if OUTPUT is a folder of shards, e.g. 500MB or 1G.  [default: 5GB]",
        type=size,
    ),
    device_option,
    resume_option,
    part_option,
    jobs_option,
    job_options,
)

# The arguments and options of every command that writes one file from another
writing = all_of(input_argument, output_argument, writing_options)
