"""What is known of the run whose ranks each wrote a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import Damaged
from ..words import first_few

HINT = "each rank wrote its own: copy the files of all ranks into one folder"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that wrote a checkpoint, each a part of it.

    Attributes:
        framework: what wrote the files, as users call it: `FSDP2 (DTensor)`, `DeepSpeed ZeRO-3`.
        world_size: how many ranks there were; None when no file says.
        mesh: the axes of the device mesh with their sizes, as `fsdp 2 x tp 2`; empty when there was none.
        step: the training step that the files state; None when they do not.
        held: rank -> bytes of the tensors that its files hold, whoever else holds them too.
        replicated: the dotted names of the tensors that several ranks hold; they are compared when the values
            are read.
        missing: ranks whose files are not there. The checkpoint can be looked at, but not used.
        lacking: the names of these files, the first few, where those of the others tell them.
    """

    framework: str
    world_size: int | None = None
    mesh: str = ""
    step: int | None = None
    held: Mapping[int, int] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    lacking: tuple[str, ...] = ()
    device: str = ""  # the type of the devices in the mesh

    @property
    def axes(self) -> str:
        """The mesh as `mesh fsdp 2 x tp 2`; empty when it is one axis without a name, of all ranks."""
        return f"mesh {self.mesh}" if self.mesh and self.mesh != str(self.world_size) else ""


def require_all(
    path: str, missing: Sequence[int], world_size: int | None, lacking: Sequence[str] = ()
) -> None:
    """Check that no rank's file is missing."""
    if missing:
        of = "" if world_size is None else f" of {world_size}"
        files, are = ("file of rank", "is") if len(missing) == 1 else ("files of ranks", "are")
        names = f": {', '.join(lacking[:4])}{' …' if lacking[4:] else ''}" if lacking else ""
        raise Damaged(path, f"the {files} {first_few(missing, 8)}{of} {are} missing{names}", hint=HINT)
