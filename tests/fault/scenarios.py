"""What is tried: commands that write, with files to read, to replace and to leave alone."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpttool import cli


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


def _over(words: str, target: str, command: str, formats: str, **given: object) -> Scenario:
    """Return a scenario that replaces what the same command made of another checkpoint."""
    return Scenario(
        command,
        formats,
        f"{words} --force",
        targets=(target,),
        before=words.replace("in.pt", "other.pt"),
        **given,
    )  # type: ignore[arg-type]


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


TRAINED = ("out/last.pt", "out/best.pt", "out/step-000002.pt", "out/step-000004.pt")

# Everything that is tried
SCENARIOS = [
    Scenario(
        "strip-prefix",
        ".pt to a new .safetensors",
        "strip-prefix in.pt out/model.safetensors",
        targets=("out/model.safetensors",),
        wanted="plain",
    ),
    _over(
        "strip-prefix in.pt out/model.safetensors",
        "out/model.safetensors",
        "strip-prefix",
        ".pt over .safetensors",
        wanted="plain",
    ),
    _over("strip-prefix in.pt out/model.pt", "out/model.pt", "strip-prefix", ".pt over .pt", wanted="plain"),
    Scenario(
        "strip-prefix",
        "refused without --force",
        "strip-prefix in.pt out/model.pt",
        targets=("out/model.pt",),
        before="strip-prefix other.pt out/model.pt",
    ),
    Scenario(
        "strip-prefix",
        ".safetensors in place",
        "strip-prefix out/model.safetensors out/model.safetensors --force",
        inputs=(),
        targets=("out/model.safetensors",),
        before="convert in.safetensors out/model.safetensors",
        wanted="plain",
        again="add-prefix out/model.safetensors out/model.safetensors",
    ),
    _over(
        "add-prefix in.pt out/model.pt --prefix x. --verify",
        "out/model.pt",
        "add-prefix --verify",
        ".pt over .pt",
        wanted="twice prefixed",
    ),
    Scenario(
        "rename-keys",
        "shards in place",
        "rename-keys out/model out/model --map ^module=model --force",
        inputs=(),
        targets=("out/model",),
        before="convert in.pt out/model/ --shard-size 4MB",
        wanted="renamed",
        again="slim out/model out/model --force",
    ),
    Scenario(
        "convert",
        ".pt to new shards",
        "convert in.pt out/model/ --shard-size 4MB",
        targets=("out/model",),
        wanted="prefixed",
    ),
    _over(
        "convert in.pt out/model/ --shard-size 4MB",
        "out/model",
        "convert",
        ".pt over shards",
        wanted="prefixed",
    ),
    _over(
        "convert in.pt out/model --to torch-sharded --shard-size 4MB",
        "out/model",
        "convert",
        ".pt over torch shards",
        wanted="prefixed",
    ),
    Scenario(
        "convert",
        ".pt to new DCP",
        "convert in.pt out/model/ --to dcp",
        targets=("out/model",),
        imports_torch=True,
        wanted="prefixed",
    ),
    _over(
        "convert in.pt out/model --to dcp",
        "out/model",
        "convert",
        ".pt over DCP",
        wanted="prefixed",
        imports_torch=True,
    ),
    _over(
        "convert in.pt out/model.safetensors --full", "out/model.safetensors", "convert --full", ".pt over it"
    ),
    Scenario(
        "convert",
        "--full to .pt",
        "convert full.safetensors out/model.pt",
        inputs=("full.safetensors",),
        targets=("out/model.pt",),
        wanted="prefixed",
    ),
    Scenario(
        "convert",
        "legacy over .pt",
        "convert legacy.pt out/model.pt --force",
        inputs=("legacy.pt",),
        targets=("out/model.pt",),
        before="convert other.pt out/model.pt",
        wanted="prefixed",
    ),
    Scenario(
        "convert",
        "tar to .safetensors",
        "convert tar.pt out/model.safetensors",
        inputs=("tar.pt",),
        targets=("out/model.safetensors",),
    ),
    Scenario(
        "convert",
        "DCP to .pt",
        "convert dcp out/model.pt",
        inputs=("dcp",),
        targets=("out/model.pt",),
        wanted="prefixed",
    ),
    Scenario(
        "convert",
        "shards to .safetensors",
        "convert shards out/model.safetensors",
        inputs=("shards",),
        targets=("out/model.safetensors",),
        wanted="prefixed",
    ),
    _over(
        "convert in.pt out/model.pt --dtype bf16 --no-verify",
        "out/model.pt",
        "convert --dtype",
        ".pt over .pt",
        wanted="bf16",
    ),
    Scenario(
        "merge",
        "DCP to .safetensors",
        "merge dcp out/model.safetensors",
        inputs=("dcp",),
        targets=("out/model.safetensors",),
        wanted="prefixed",
    ),
    Scenario(
        "merge",
        "files of two ranks to .pt",
        "merge ranks out/model.pt",
        inputs=("ranks",),
        targets=("out/model.pt",),
        wanted="prefixed",
    ),
    Scenario(
        "merge-lora",
        ".pt and adapter to .pt",
        "merge-lora in.pt adapter out/model.pt",
        inputs=("in.pt", "adapter"),
        targets=("out/model.pt",),
        wanted="adapted",
    ),
    Scenario(
        "split",
        ".pt to new files of two ranks",
        "split in.pt out/model/ --ranks 2 --as dtensor --device cpu",
        targets=("out/model",),
    ),
    Scenario(
        "split",
        ".pt to new DCP",
        "split in.pt out/model/ --ranks 2 --as dcp",
        targets=("out/model",),
        wanted="prefixed",
    ),
    _over("disarm in.pt out/model.pt", "out/model.pt", "disarm", ".pt over .pt", wanted="prefixed"),
    _over("slim in.pt out/model.pt", "out/model.pt", "slim", ".pt over .pt", wanted="prefixed"),
    Scenario(
        "average",
        "two .pt to .safetensors",
        "average in.pt other.pt out/model.safetensors",
        inputs=("in.pt", "other.pt"),
        targets=("out/model.safetensors",),
        wanted="mean",
    ),
    Scenario(
        "convert-batchnorm",
        "two .pt to .pt",
        "convert-batchnorm in.pt other.pt out/model.pt --counts 4,4 --keep-first *",
        inputs=("in.pt", "other.pt"),
        targets=("out/model.pt",),
    ),
    _over("optimizer in.pt out/model.pt --to names", "out/model.pt", "optimizer", ".pt over .pt"),
    Scenario(
        "gather-metrics",
        "two ranks to JSON",
        "gather-metrics rank0.safetensors rank1.safetensors --out out/model.json",
        inputs=("rank0.safetensors", "rank1.safetensors"),
        targets=("out/model.json",),
    ),
    Scenario("convert", ".pt to stdout", "convert in.pt - --to safetensors"),
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
