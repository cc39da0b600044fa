"""What is tried: commands that read from a URL or write to one, and the servers behind it."""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from tests.support.bucket_servers import moto
from tests.support.hub_server import SECRET, Hub
from tests.support.range_server import Answer, RangeServer, Request, asked

# ---- Where the objects of a scenario lie: servers on the loopback, each behind one whose answers go wrong


OLD = b"what was there before"


class Front(RangeServer):
    """Passes requests on to another server, so that its answers can go wrong as those of a range server."""

    def __init__(self, behind: str, host: str = "127.0.0.1") -> None:
        super().__init__({}, host=host)
        self._behind = behind.removeprefix("http://")

    def right(self, request: Request) -> Answer:
        """Return the answer of the server behind."""
        return asked(self._behind, request)


class Site(contextlib.ExitStack):
    """Objects under a URL. A context manager.

    Attributes:
        fronts: the servers whose answers go wrong.
        url: what stands before a name, in commands and in errors.
        query: what signs the URLs of commands.
        env: the variables that lead commands there.
        secrets: what no output may hold.
    """

    fronts: list[RangeServer]
    url: str
    query = ""
    env: dict[str, str]
    secrets: tuple[str, ...]

    def address(self, name: str) -> str:
        """Return the URL of an object as a user types it."""
        is_signed = not name.endswith("/")  # what signs a URL is good for one object
        return f"{self.url}/{name}{self.query if is_signed else ''}"

    def begin(self, target: str) -> None:
        """Put an old object under a name, and nothing else that a command may have left."""

    def found(self, target: str) -> bytes | None:
        """Return the object of a name; None if there is none."""
        return None

    def wrongs(self) -> list[str]:
        """Say what is wrong with what is left, or with what was asked."""
        return []


class Web(Site):
    """Files behind http://, signed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.fronts = [self.enter_context(RangeServer(folder))]
        self.url, self.query = self.fronts[0].url, "?sig=signed-with-this"
        self.env, self.secrets = {}, ("signed-with-this",)


class HubSite(Site):
    """A repository of the hub, whose large files lie on another host."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.hub = hub = self.enter_context(Hub())
        behind = {server.host: server.url for server in hub.servers}
        self.fronts = [self.enter_context(Front(url, host)) for host, url in behind.items()]
        hub.endpoint, hub.elsewhere = (front.url for front in self.fronts)
        self._repo = hub.create("o/r")
        self._repo.commit_folder(folder)
        self._begin = self._repo.refs["main"]
        self.url, self.secrets = "hf://o/r", (hub.token, SECRET)
        self.env = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
        self.env["HF_HOME"] = str(folder / "nowhere")

    def begin(self, target: str) -> None:
        self.hub.requests()
        self._repo.refs["main"] = self._begin
        self._repo.commit({target: OLD})

    def found(self, target: str) -> bytes | None:
        return self._repo.commits[self._repo.refs["main"]].get(target)

    def wrongs(self) -> list[str]:
        elsewhere = [seen for seen in self.hub.seen if seen.host == "127.0.0.2"]
        return ["the token went to another host"] * any(seen.authorization for seen in elsewhere)


class Bucket(Site):
    """A bucket of moto's S3."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._moto = self.enter_context(moto()).removeprefix("http://")
        self.fronts = [self.enter_context(Front(self._moto))]
        self.url, self.secrets = "s3://bucket", ("secret-of-the-bucket",)
        self.env = {
            "AWS_ENDPOINT_URL": self.fronts[0].url,
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": self.secrets[0],
            "AWS_REGION": "us-east-1",
        }

    def _ask(self, method: str, path: str, query: str = "", body: bytes = b"") -> Answer:
        return asked(self._moto, Request(method, path, query, {"authorization": "AWS id:any"}, body))

    def begin(self, target: str) -> None:
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", "/bucket")
        self._ask("PUT", f"/bucket/{target}", body=OLD)

    def found(self, target: str) -> bytes | None:
        answer = self._ask("GET", f"/bucket/{target}")
        return bytes(answer.body) if answer.status == 200 else None

    def wrongs(self) -> list[str]:
        # An upload whose answer was lost can't be aborted, as nobody knows its name; it holds nothing.
        told = bytes(self._ask("GET", "/bucket", "uploads=").body).decode()
        uploads = re.findall("<Key>(.*?)</Key>.*?<UploadId>(.*?)</UploadId>", told, re.DOTALL)
        lists = [self._ask("GET", f"/bucket/{key}", f"uploadId={name}").body for key, name in uploads]
        parts = sum(bytes(each).count(b"<Part>") for each in lists)
        return [f"{parts} parts of unfinished uploads are left"] if parts else []


# ---- What is tried: commands that read from a URL, or write to one ------------------------------------


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
    from ckpttool.ranks import splitting
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
