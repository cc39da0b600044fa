"""What is tried: commands that write, with files to read, to replace and to leave alone."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpttool.core import cli


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command that writes."""

    # What is tried, and `formats`, from what to what: two columns of the table
    command: str
    formats: str
    # The command line; with it the program is `ckpttool`
    words: str = ""
    # Names of `inputs.INPUTS` that it reads
    inputs: tuple[str, ...] = ("in.pt",)
    # What it writes: each a file or a folder
    targets: tuple[str, ...] = ()
    # A command line that makes the old output; None if there is none
    before: str | None = None
    # Which of `inputs.WANTED` the output must have; None: what a run without a fault writes is not looked
    # into
    wanted: str | None = None
    # A command line that succeeds where the output is the new one already; None for `words` with --force
    again: str | None = None
    # What is run in the place of `ckpttool`
    program: Callable[[], object] | None = None
    imports_torch: bool = False
    # The program has no handler of SIGTERM
    ends_at_term: bool = False

    @property
    def name(self) -> str:
        return f"{self.command}, {self.formats}"

    def run(self) -> object:
        """Do it, in the folder of a run. `ckpttool` leaves the process."""
        return run_words(self.words) if self.program is None else self.program()

    def run_again(self, is_new: bool) -> object:
        """Do what succeeds after an interruption."""
        if self.program is not None:
            return self.program()
        words = self.again if is_new and self.again else self.words
        return run_words(words if "--force" in words else f"{words} --force")

    def prepare(self, inputs: Path, folder: Path) -> None:
        """Make the folder of a run as it is before: inputs, the old output, and files of others."""
        if self.imports_torch:
            _training()
        for path in ("out", "tmp", "outside"):
            (folder / path).mkdir(parents=True)
        for name in self.inputs:
            _copy(inputs / name, folder / name)
        (folder / "outside" / "theirs.txt").write_text("theirs")
        (folder / "out" / "notes.txt").write_text("notes")
        # Links with the names of abandoned temporaries, which lead out of the folder.
        for number, to in enumerate(["../outside", "../outside/theirs.txt", "../nowhere"]):
            (folder / "out" / f".model.{number:020x}.ckpttool.tmp").symlink_to(to)
        if self.before:
            made = _copy_for(self.before, inputs, folder)
            with inside(folder):
                for words in self.before.split("; "):
                    if cli.run([*shlex.split(words), "-q"]):
                        raise RuntimeError(f"{self.name}: {words} failed")
            for path in made:
                path.unlink()


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Make a folder the working directory during the block."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


def run_words(words: str) -> object:
    """Run `ckpttool` as from a shell; it leaves the process."""
    sys.argv = ["ckpttool", *shlex.split(words)]
    cli.main()


def _copy(source: Path, to: Path) -> None:
    shutil.copytree(source, to) if source.is_dir() else shutil.copyfile(source, to)


def _copy_for(words: str, inputs: Path, folder: Path) -> list[Path]:
    """Copy the inputs that a command line names and that are not there yet; return them."""
    words_of_it = dict.fromkeys(shlex.split(words.replace(";", " ")))
    names = [name for name in words_of_it if (inputs / name).is_file() and not (folder / name).exists()]
    for name in names:
        _copy(inputs / name, folder / name)
    return [folder / name for name in names]


def _new(words: str, formats: str, wanted: str | None = None, **given: Any) -> Scenario:
    """Return a scenario by its command line; what stands before the output are its inputs."""
    command, *rest = shlex.split(words)
    inputs = tuple(
        itertools.takewhile(lambda word: word != "-" and not word.startswith(("--", "out/")), rest)
    )
    targets = tuple(dict.fromkeys(word.rstrip("/") for word in rest if word.startswith("out/")))
    settings = {"command": command, "inputs": inputs, "targets": targets, **given}
    return Scenario(formats=formats, words=words, wanted=wanted, **settings)


def _over(words: str, formats: str, wanted: str | None = None, **given: Any) -> Scenario:
    """Return a scenario that replaces what the same command made of another checkpoint."""
    return _new(f"{words} --force", formats, wanted, before=words.replace("in.pt", "other.pt"), **given)


@functools.cache
def _training() -> object:
    """Return a training checkpoint, made before a fork: torch's threads do not survive one."""
    from tests.fault.inputs import training

    return training()


def save_of_trainer() -> object:
    """Write the checkpoints of a run as the trainer does, and drop the old numbered one."""
    from train.checkpoint import files as checkpoint_files
    from train.launch import program as launch

    def work(kept: object) -> None:
        checkpoint_files.write(kept, "out", ["last.pt", "best.pt", "step-000004.pt"])
        checkpoint_files.drop_old("out", 1)

    launch.leave(launch.run_program(_training, work))


def save_of_trainer_with_deltas() -> object:
    """Write a checkpoint as the trainer does with `--keep-deltas`, and what it changes of the one before."""
    from ckpttool.errors import FileError
    from train.checkpoint import files
    from train.checkpoint import files as checkpoint_files
    from train.launch import program as launch

    def work(kept: object) -> None:
        checkpoint_files.write(kept, "out", ["last.pt", "step-000004.pt"])
        if failure := files.keep_delta("out", 4, 9, ""):  # of which a run says so, and goes on
            raise FileError("out", failure)
        files.drop_wholes("out", 4, "")

    launch.leave(launch.run_program(_training, work))


WHOLES = ("out/last.pt", "out/step-000001.pt", "out/step-000002.pt")
DELTAS = ("out/step-000004.delta.safetensors", "out/step-000002.delta.safetensors")
TRAINED = ("out/last.pt", "out/best.pt", "out/step-000002.pt", "out/step-000004.pt")

# Everything that is tried
SCENARIOS = [
    _new("strip-prefix in.pt out/model.safetensors", ".pt to a new .safetensors", "plain"),
    _over("strip-prefix in.pt out/model.safetensors", ".pt over .safetensors", "plain"),
    _over("strip-prefix in.pt out/model.pt", ".pt over .pt", "plain"),
    _new(
        "strip-prefix in.pt out/model.pt",
        "refused without --force",
        before="strip-prefix other.pt out/model.pt",
    ),
    _new(
        "strip-prefix out/model.safetensors out/model.safetensors --force",
        ".safetensors in place",
        "plain",
        before="convert in.safetensors out/model.safetensors",
        again="add-prefix out/model.safetensors out/model.safetensors",
    ),
    _over(
        "add-prefix in.pt out/model.pt --prefix x. --verify",
        ".pt over .pt",
        "twice prefixed",
        command="add-prefix --verify",
    ),
    _new(
        "rename-keys out/model out/model --map ^module=model --force",
        "shards in place",
        "renamed",
        before="convert in.pt out/model/ --shard-size 4MB",
        again="slim out/model out/model --force",
    ),
    _new("convert in.pt out/model/ --shard-size 4MB", ".pt to new shards", "prefixed"),
    _over("convert in.pt out/model/ --shard-size 4MB", ".pt over shards", "prefixed"),
    _over("convert in.pt out/model --to torch-sharded --shard-size 4MB", ".pt over torch shards", "prefixed"),
    _new("convert in.pt out/model/ --to dcp", ".pt to new DCP", "prefixed", imports_torch=True),
    _over("convert in.pt out/model --to dcp", ".pt over DCP", "prefixed", imports_torch=True),
    _over("convert in.pt out/model.safetensors --full", ".pt over it", command="convert --full"),
    _new("convert full.safetensors out/model.pt", "--full to .pt", "prefixed"),
    _new(
        "convert legacy.pt out/model.pt --force",
        "legacy over .pt",
        "prefixed",
        before="convert other.pt out/model.pt",
    ),
    _new("convert tar.pt out/model.safetensors", "tar to .safetensors"),
    _new("convert dcp out/model.pt", "DCP to .pt", "prefixed"),
    _new("convert shards out/model.safetensors", "shards to .safetensors", "prefixed"),
    _over(
        "convert in.pt out/model.pt --dtype bf16 --no-verify",
        ".pt over .pt",
        "bf16",
        command="convert --dtype",
    ),
    _new("merge dcp out/model.safetensors", "DCP to .safetensors", "prefixed"),
    _new("merge ranks out/model.pt", "files of two ranks to .pt", "prefixed"),
    _new(
        "conform in.pt out/model.safetensors --like out/ref.safetensors --check-values",
        ".pt under the names of another",
        "plain",
        before="strip-prefix in.pt out/ref.safetensors",
        targets=("out/model.safetensors",),
    ),
    _new("merge-lora in.pt adapter out/model.pt", ".pt and adapter to .pt", "adapted"),
    _new("extract-lora in.pt other.pt out/model --rank 1 --others drop", "two .pt to a new adapter"),
    _new("delta other.pt in.pt out/model.safetensors", "two .pt to a new delta"),
    _over("delta other.pt in.pt out/model.safetensors", "two .pt over a delta"),
    _new("apply other.pt delta.safetensors out/model.pt", ".pt and a delta to .pt", "prefixed"),
    _new("split in.pt out/model/ --ranks 2 --as dtensor --device cpu", ".pt to new files of two ranks"),
    _new("split in.pt out/model/ --ranks 2 --as dcp", ".pt to new DCP", "prefixed"),
    _over("disarm in.pt out/model.pt", ".pt over .pt", "prefixed"),
    _over("slim in.pt out/model.pt", ".pt over .pt", "prefixed"),
    _new("average in.pt other.pt out/model.safetensors", "two .pt to .safetensors", "mean"),
    _new(
        "average in.pt out/model.pt --method ties --base other.pt --density 0.5",
        "two .pt to .pt",
        command="average --method",
    ),
    _new(
        "convert-batchnorm in.pt other.pt out/model.pt --counts 4,4 --keep-first *",
        "two .pt to .pt",
    ),
    _over("optimizer in.pt out/model.pt --to names", ".pt over .pt"),
    _new("gather-metrics rank0.safetensors rank1.safetensors --out out/model.json", "two ranks to JSON"),
    _new("convert in.pt - --to safetensors", ".pt to stdout"),
    _new(
        "slim --in-place out --keep-newest 1 --drop optimizer",
        "three .pt of a run",
        before="; ".join(f"convert other.pt {name}" for name in WHOLES),
        again="slim --in-place out --keep-newest 1 --drop epoch",
        command="slim --in-place",
        targets=WHOLES,
    ),
    Scenario(
        "the trainer's save",
        "last and numbered, with deltas",
        inputs=(),
        targets=(*WHOLES, *DELTAS, "out/step-000004.pt"),
        before="; ".join(
            [
                *(f"convert other.pt {name}" for name in WHOLES),
                f"delta {WHOLES[1]} {WHOLES[2]} {DELTAS[1]}",
            ]
        ),
        program=save_of_trainer_with_deltas,
        imports_torch=True,
        ends_at_term=True,
    ),
    Scenario(
        "the trainer's save",
        "last, best and numbered",
        inputs=(),
        targets=TRAINED,
        before="; ".join(f"convert other.pt {name}" for name in TRAINED[:3]),
        program=save_of_trainer,
        imports_torch=True,
        ends_at_term=True,
    ),
]
