"""What is tried: commands that read from a URL, or write to one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from tests.fault.remote.sites import Bucket, HubSite, Site, Web

# Bytes of the first tensor: enough for `--resume` to go on with it where the next one fails.
FIRST = 1_100_000
# Bytes of a file that goes out in several parts
LARGE = 17 << 20
LOCAL, SERVED = "local", "served"  # folders of inputs


@dataclass(frozen=True)
class Scenario:
    """A command, and what it leaves."""

    command: str  # of the table
    formats: str
    words: str  # the command line; `@NAME` is an object by its URL, `IN/NAME` a local input
    site: type[Site] = Web
    target: str = ""  # what it writes: a path, or `@NAME`
    before: str = ""  # the command line that writes the old output at a path

    @property
    def name(self) -> str:
        return f"{self.command}, {self.formats}"

    @property
    def uploads(self) -> str:
        """The name of the object that it writes; "" if none."""
        return self.target[1:] if self.target.startswith("@") else ""


OLD_FILE = "strip-prefix IN/other.pt out/model.safetensors"
OLD_FOLDER = "strip-prefix IN/other.pt out/model/ --shard-size 1MB"
RANKS = " ".join(f"@ranks/model_world_size_3_rank_{rank}.pt" for rank in range(3))
FILE, FOLDER = "out/model.safetensors", "out/model"

SCENARIOS = [
    Scenario("inspect", ".pt", "inspect @in.pt"),
    Scenario("inspect", "index of three shards", "inspect @shards/model.safetensors.index.json"),
    Scenario("inspect", "repository of the hub", "inspect @shards", HubSite),
    Scenario(
        "strip-prefix",
        ".pt over .safetensors",
        f"strip-prefix @in.pt {FILE} --drop module.left --force",
        target=FILE,
        before=OLD_FILE,
    ),
    Scenario(
        "strip-prefix",
        "index of three shards over shards",
        f"strip-prefix @shards/model.safetensors.index.json {FOLDER}/ --force",
        target=FOLDER,
        before=OLD_FOLDER,
    ),
    Scenario(
        "strip-prefix",
        ".pt on the hub over .safetensors",
        f"strip-prefix @in.pt {FILE} --drop module.left --force",
        HubSite,
        FILE,
        OLD_FILE,
    ),
    Scenario("merge", "files of three ranks", f"merge {RANKS} {FILE} --force", Web, FILE, OLD_FILE),
    Scenario("merge", "DCP folder", f"merge @dcp/ {FILE} --force", Web, FILE, OLD_FILE),
    Scenario(
        "convert",
        ".pt over an object of the hub",
        "convert IN/in.pt @out.safetensors --force",
        HubSite,
        "@out.safetensors",
    ),
    Scenario(
        "convert",
        ".pt over an object in a bucket",
        "convert IN/in.pt @out.safetensors --force",
        Bucket,
        "@out.safetensors",
    ),
    Scenario(
        "convert",
        "large .pt over an object in a bucket, in parts",
        "convert IN/large.pt @out.safetensors --force",
        Bucket,
        "@out.safetensors",
    ),
]


def write(folder: Path) -> None:
    """Write the inputs: those that servers have, and those that lie here. Imports torch."""
    import torch

    import ckpttool
    from ckpttool.formats import splitting
    from tests.support.every_format import as_dcp

    def state(seed: int, sizes: dict[str, int]) -> OrderedDict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(seed)
        return OrderedDict(
            (f"module.{name}", torch.rand(3, nbytes // 12, generator=made)) for name, nbytes in sizes.items()
        )

    sizes = {"bias": 36, "first": FIRST, "left": 400_000, "last": 300_000}
    for place in (folder / LOCAL, folder / SERVED):
        place.mkdir(parents=True)
        torch.save({"model": state(0, sizes), "epoch": 3}, place / "in.pt")
    torch.save({"model": state(1, sizes), "epoch": 2}, folder / LOCAL / "other.pt")
    torch.save(state(2, {"all": LARGE}), folder / LOCAL / "large.pt")
    served = folder / SERVED
    as_dcp(lambda: {"model": state(0, sizes)})(served / "dcp")
    with ckpttool.open(served / "in.pt") as checkpoint:
        ckpttool.save(checkpoint, served / "shards", to="safetensors-sharded", shard_size=500_000)
        splitting.split(checkpoint, served / "ranks", 3)
