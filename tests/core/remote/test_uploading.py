"""Outputs at URLs: whole or not at all, nothing replaced unasked, and the same bytes as on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.core.remote.store import TRAFFIC
from tests.support.hub_server import Hub
from tests.support.running import Cli, assert_says


@pytest.fixture(scope="module", autouse=True)
def places(s3: Any, hub_server: Hub) -> None:
    """A bucket and a repository, both `model…`."""
    s3.create_bucket(Bucket="models")
    hub_server.create("me/model")


@pytest.fixture(params=["s3://models/a", "hf://me/model/a"])
def top(request: pytest.FixtureRequest) -> str:
    """Return the URL of a folder that nobody else has."""
    top.number = getattr(top, "number", 0) + 1  # type: ignore[attr-defined]
    return f"{request.param}{top.number}"  # type: ignore[attr-defined]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spool").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "spool"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "in").mkdir()
    torch.save({f"module.{n}": torch.full((1000,), float(n)) for n in range(20)}, tmp_path / "in" / "a.pt")
    return tmp_path / "in" / "a.pt"


def test_an_output_at_a_url_has_the_bytes_of_a_local_one(
    top: str, model: Path, tmp_path: Path, cli: Cli
) -> None:
    ran = cli("strip-prefix", model, f"{top}/m.safetensors")
    assert (ran.code, f"-> {top}/m.safetensors (" in ran.out) == (0, True), ran.err
    assert cli("strip-prefix", model, tmp_path / "m.safetensors").code == 0
    assert cli("verify", f"{top}/m.safetensors", "--against", tmp_path / "m.safetensors").code == 0
    assert os.listdir(tmp_path / "spool") == []


def test_nothing_is_replaced_unasked(top: str, model: Path, cli: Cli) -> None:
    words = ("convert", model, f"{top}/m.safetensors")
    assert cli(*words).code == 0
    assert_says(
        cli(*words), 2, f"error: {top}/m.safetensors: already exists\nhint: write it anyway with --force"
    )
    assert cli("slim", model, f"{top}/m.safetensors", "--force").code == 0
    assert cli("convert", model, f"{top}/shards/").code == 0
    assert_says(cli("convert", model, f"{top}/shards/"), 2, "already exists")


def test_a_folder_and_its_companions_go_up_and_come_back(
    top: str, model: Path, tmp_path: Path, cli: Cli
) -> None:
    source = tmp_path / "model"
    assert cli("convert", model, f"{source}/", "--shard-size", "20kB").code == 0
    (source / "config.json").write_text("{}")
    assert_says(cli("convert", source, f"{top}/", "--companions"), 0, "copying along")
    assert cli("convert", f"{top}/", f"{tmp_path}/back/", "--companions").code == 0
    assert ckpttool.digest(tmp_path / "back") == ckpttool.digest(model)
    assert (tmp_path / "back" / "config.json").read_text() == "{}"


def test_a_dry_run_sends_nothing(top: str, model: Path, cli: Cli) -> None:
    before = TRAFFIC.nbytes
    assert_says(cli("convert", model, f"{top}/m.safetensors", "--dry-run"), 0)
    assert TRAFFIC.nbytes == before
    assert cli("inspect", f"{top}/m.safetensors").code == 3


def test_from_url_to_url(top: str, model: Path, cli: Cli) -> None:
    assert cli("convert", model, f"{top}/a.pt").code == 0
    assert cli("strip-prefix", f"{top}/a.pt", f"{top}/b.safetensors").code == 0
    assert cli("diff", model, f"{top}/b.safetensors", "--ignore-prefix").code == 0


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("https://127.0.0.1:9/a.pt", 2, "is a URL of a kind that is not written here"),
        ("s3://nowhere/a.pt", 3, "error: s3://nowhere/: there is no such bucket"),
        ("hf://me/nothing/a.pt", 3, "error: hf://me/nothing"),
        ("s3://models/a.gguf", 2, "can't write GGUF"),
    ],
)
def test_a_place_that_takes_nothing_is_named(
    output: str, code: int, said: str, model: Path, cli: Cli
) -> None:
    assert_says(cli("convert", model, output), code, said)
    assert os.listdir(model.parents[1] / "spool") == []


def test_an_upload_is_announced_and_counted_as_a_work_of_its_own(
    top: str, model: Path, tmp_path: Path
) -> None:
    works: list[tuple[int, list[int]]] = []
    with ckpttool.open(model) as checkpoint:
        saved = ckpttool.save(
            checkpoint,
            f"{top}/m.safetensors",
            expect=lambda total: works.append((total, [])),
            progress=lambda nbytes: works[-1][1].append(nbytes),
        )
    assert [(total, sum(counted)) for total, counted in works] == [(80_000, 80_000), (saved.nbytes,) * 2]


def test_the_bar_begins_again_with_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.core.cli import console

    monkeypatch.setattr(console, "BAR_FROM", 10)
    bar = console.ProgressBar("convert", drawn=True)
    bar.expect(100)
    bar.add(100)
    bar.expect(30)
    bar.add(20)
    assert (bar._shown.n, bar._shown.total) == (20, 30)
    bar.expect(9)  # too little for a bar
    bar.add(9)
    assert bar._shown is None
