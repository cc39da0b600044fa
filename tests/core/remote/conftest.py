"""Servers on the loopback that hold a folder of checkpoints, and a cache of each test's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.remote.store import Patience
from tests.support.bucket_servers import moto
from tests.support.hub_server import Hub
from tests.support.range_server import RangeServer

with contextlib.suppress(ImportError):  # it reads its settings once: before a test says that it is offline
    import huggingface_hub.constants  # noqa: F401


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of this test, empty at its start."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CKPTTOOL_CACHE", str(folder))
    return folder


@pytest.fixture
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a refused request come again at once; a slow machine has its time to answer all the same."""
    monkeypatch.setattr(Patience, "usual", lambda: Patience(first_wait=0.03, longest_wait=0.3))


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """Return AWS's own client of a server of buckets that the environment leads to."""
    pytest.importorskip("obstore")
    boto3 = pytest.importorskip("boto3")
    settings = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_REGION": "us-east-1"}
    with moto() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings, "AWS_ENDPOINT_URL": address}.items():
            patch.setenv(name, value)
        yield boto3.client("s3", endpoint_url=address, region_name="us-east-1")


@pytest.fixture(scope="module")
def hub_server() -> Iterator[Hub]:
    """A stand-in of the hub, to which its library and the environment lead."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with Hub() as running, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", running.token)
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """A server of the folder `there`, by https's rules without its certificate."""
    os.makedirs(tmp_path / "there", exist_ok=True)
    with RangeServer(tmp_path / "there") as running:
        yield running
