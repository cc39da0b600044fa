"""What a failed command says, and the exit code of every error that is expected."""

from __future__ import annotations

import errno
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_tb

import click

from ... import errors
from ...errors import (
    CkptToolError,
    FileError,
    Mismatch,
    NothingToDo,
    RanksDiffer,
    UsageFault,
    in_shell,
    install,
)
from ..words import versioned
from .console import printable, say, to_json

# The next thing to do after an error of the operating system, by its number
HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or send the output elsewhere"),
    errno.EFBIG: "the file system or a limit (ulimit -f) allows no larger file: send the output elsewhere",
    errno.EROFS: "the file system is read-only: send the output elsewhere",
    errno.EMFILE: "allow more open files: ulimit -n 65536",
}

# What is to be pasted, in a hint
COMMAND = re.compile(r"\b(?:ckpttool|hf|ls|pip|python|rm|torchrun|ulimit) [a-z-].*")

# Options of most commands, which some type before the command
SHARED = ("-q", "--quiet", "-v", "--verbose", "--json", "--force", "--dry-run", "--state")

# Libraries that a plain install lacks, and the extra of ckpttool that brings each
EXTRAS = {"torch": "torch", "safetensors": "torch", "torchvision": "train", "sklearn": "train"}
EXTRAS |= dict.fromkeys(("urllib3", "obstore", "huggingface_hub"), "remote")
EXTRAS |= dict.fromkeys(("zstandard", "xxhash", "blake3"), "delta")
EXTRAS |= {"boto3": "parts"}


GOES_ON = "; what was written is kept: the same command with --resume goes on with it"


def left_by(error: BaseException) -> str:
    """Return what an error, or a signal, has left of an output, to be appended to a line; "" if nothing."""
    left = getattr(error, "left", "")
    return GOES_ON if hasattr(error, "kept_at") else f"; {left}" if left else ""


@dataclass(slots=True)
class Call:
    """What the report of an error needs to know of the command line; the options fill it in."""

    command: str = "ckpttool"  # the command as it was typed: `ckpttool convert`
    paths: tuple[str, ...] = ()  # the files that were named as input
    to_stderr: bool = False  # the output file goes to stdout, so words must not
    revision: str | None = None  # of repositories on the hub
    typed: tuple[str, ...] = ()  # all arguments, which may hold a password


def fail(error: BaseException, *, as_json: bool, call: Call | None = None) -> int:
    """Print what went wrong, and return the exit code. Raises a bug, and BrokenPipeError."""
    call = call or Call()
    _, message, hint, code = describe(error, call)
    if as_json:
        try:
            click.echo(to_json(versioned(error_fields(error, call))), err=call.to_stderr)
        except BrokenPipeError:
            raise
        except OSError:
            pass  # a full disk may be what went wrong
        if call.to_stderr:
            return code
    label, colour = ("nothing to do:", "yellow") if isinstance(error, NothingToDo) else ("error:", "red")
    with suppress(OSError):
        say(label, colour, printable(message))
        if hint:
            say("hint:", "cyan", printable(hint), command=COMMAND)
    return code


def error_fields(error: BaseException, call: Call) -> dict[str, object]:
    """Return the JSON of an error: the object `error`, and the fields that the command has on success."""
    body: dict[str, object] = dict(zip(("kind", "message", "hint"), describe(error, call), strict=False))
    if isinstance(error, Mismatch):
        return {"loaded": 0, **mismatch_fields(error), "error": body | mismatch_fields(error)}
    if isinstance(error, errors.Ambiguous):
        body["candidates"] = error.candidates
    return {"error": body}


def mismatch_fields(error: Mismatch) -> dict[str, object]:
    """Return the JSON fields that name the keys in which a state and a model differ."""
    return {
        "missing": error.missing,
        "unexpected": error.unexpected,
        "mismatched": [{"name": n, "file": theirs, "model": mine} for n, theirs, mine in error.mismatched],
    }


def describe(error: BaseException, call: Call) -> tuple[str, str, str | None, int]:
    """Return (kind, message, hint, exit code) of an error; raise one that is not expected: a bug."""
    kind, message, hint, code = _described(error, call)
    for each in call.typed:  # click and the system quote them
        if (shown := errors.masked(each, whole=True)) != each:
            message, hint = message.replace(each, shown), hint and hint.replace(each, shown)
    return kind, errors.masked(message), hint and errors.masked(hint), code


def _described(error: BaseException, call: Call) -> tuple[str, str, str | None, int]:
    hint: str | None
    if isinstance(error, CkptToolError):
        hint = (
            _extra_of(error.__cause__) or _own_hint(error) or in_shell(error.hint) or _usual_hint(error, call)
        )
        hint += left_by(error)
        return error.kind, _with_file(error, call), hint, error.exit_code
    if isinstance(error, click.ClickException):
        ctx = error.ctx if isinstance(error, click.UsageError) else None
        command = ctx.command_path if ctx else call.command
        hint = f"{command} --help"
        if isinstance(error, click.NoSuchOption) and command == "ckpttool" and error.option_name in SHARED:
            hint = f"options follow the command: ckpttool COMMAND {error.option_name}"
        message = error.format_message().replace("\n\t", " ")  # click's lists of choices
        return "usage", message, hint, error.exit_code
    if isinstance(error, MemoryError):
        hint = "close other programs, or use a machine with more memory"
        return "memory", ": ".join([*call.paths[:1], "not enough memory"]), hint, 3
    if isinstance(error, OSError):
        from ..files.commit import reason

        named = error.filename if isinstance(error.filename, str | bytes) else None  # or a descriptor
        where = os.fsdecode(named) if named else "stdout" if _is_of_click(error) else ""
        message = f"{where}: " * bool(where) + reason(error)
        hint = HINTS.get(error.errno or 0, "check the disk and the permissions")
        return "system", message, hint + left_by(error), 3
    if isinstance(error, ImportError) and (library := _library(error)) != "ckpttool":
        if (hint := _extra_of(error)) is not None:
            return "not-installed", f"this needs {library}, which is not installed", hint, 2
        reinstall = f"pip install --force-reinstall {library}" if library else install()
        return "unsupported", f"a library can't be imported: {error}", reinstall, 3
    raise error


def _with_file(error: CkptToolError, call: Call) -> str:
    """Return the message, which names the input where there is one and the library did not know it."""
    is_named = len(call.paths) != 1 or isinstance(error, UsageFault | FileError)
    if is_named or error.message.startswith(f"{call.paths[0]}:"):
        return error.message
    return f"{call.paths[0]}: {error.message}"


def _own_hint(error: CkptToolError) -> str | None:
    """Return a command in the place of the library's call that an error's hint names."""
    if isinstance(error, RanksDiffer) and error.path is not None:
        take = f"ckpttool merge {shlex.quote(error.path)} OUT --take-rank {error.ranks[0]}"
        return f"take one rank's values: {take}"
    return None


def _usual_hint(error: CkptToolError, call: Call) -> str:
    """Return the next thing to do after an error that has no hint of its own."""
    if error.exit_code == 2:
        return f"{call.command} --help"
    path = error.path if isinstance(error, FileError) else next(iter(call.paths), "FILE")
    if isinstance(error, errors.Damaged):
        return "copy or download it again, or use an older checkpoint"
    if isinstance(error, errors.Unreadable) and "://" in path:
        return "check the URL and the network, and whether you may read it"
    if isinstance(error, errors.Unreadable):
        return f"check what is there, and its permissions: ls -ld {shlex.quote(path)}"
    if isinstance(error, errors.Unsupported):  # inspect reads no more than the others
        return (
            "files of torch.save, safetensors, GGUF, ONNX, NumPy and .pt2, shards and DCP folders can be read"
        )
    return f"see what is in it: ckpttool inspect {shlex.quote(path)}"


def _is_of_click(error: OSError) -> bool:
    """Whether click raised the error while it printed: what was printed then went to stdout."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("click.")


def _library(error: ImportError) -> str:
    return (error.name or "").partition(".")[0]


def _extra_of(error: BaseException | None) -> str | None:
    """Return the command that installs a missing library of EXTRAS, if that is what went wrong."""
    extra = EXTRAS.get(_library(error)) if isinstance(error, ModuleNotFoundError) else None
    return extra and install(extra)
