"""docs/errors/: each page's error is raised by what it says, and its commands answer as it shows."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_file
from torch import nn

import ckpttool
from tests.support.running import ROOT
from tests.support.saved import prefixed
from train import main

PAGES = {
    page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "errors").glob("*.md"))
}
SOURCE = """
from torch import nn

def net(classes=3):
    return nn.Sequential(nn.Linear(4, classes), nn.BatchNorm1d(classes))
"""
LAST = Path("last.pt")


def net(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, classes), nn.BatchNorm1d(classes))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 3), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight


def load(path: str) -> None:
    net().load_state_dict(torch.load(path))


def of_ddp() -> None:
    torch.save(prefixed(net().state_dict(), "module."), LAST)
    load("last.pt")


def of_compile() -> None:
    torch.save(prefixed(net().state_dict(), "_orig_mod."), LAST)
    load("last.pt")


def without_counter() -> None:
    state = net().state_dict()
    del state["1.num_batches_tracked"]
    torch.save(state, LAST)
    load("last.pt")


def with_arguments() -> None:
    torch.save({"model": net().state_dict(), "args": argparse.Namespace(lr=0.1)}, LAST)
    torch.load(LAST)


def tied() -> None:
    state = Tied().state_dict()
    torch.save(state, LAST)
    save_file(state, "model.safetensors")


def of_a_gpu() -> None:
    torch.save(net().state_dict(), "of-cpu.pt")
    with ckpttool.open("of-cpu.pt") as checkpoint:
        ckpttool.save(checkpoint, LAST, device="cuda:0")
    torch.load(LAST)


def of_ten_classes() -> None:
    torch.save(net(10).state_dict(), LAST)
    load("last.pt")


def one_value() -> None:
    net().train()(torch.ones(1, 4))


def cut_short() -> None:
    torch.save(net().state_dict(), LAST)
    LAST.write_bytes(LAST.read_bytes()[:-200])
    torch.load(LAST)


def pointer() -> None:
    LAST.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    torch.load(LAST, weights_only=False)


def old_and_cut_short() -> None:
    torch.save(net().state_dict(), LAST, _use_new_zipfile_serialization=False)
    LAST.write_bytes(LAST.read_bytes()[:-2])
    torch.load(LAST)


def load_tied() -> None:
    model = Tied()
    assert not load_model(model, "model.safetensors")[0]
    assert model.head.weight is model.embed.weight


RAISED: dict[str, tuple[Callable[[], None], int, Callable[[], object] | None]] = {
    "unexpected-key-module": (of_ddp, 0, lambda: load("model.pt")),
    "orig-mod": (of_compile, 0, lambda: load("model.pt")),
    "num-batches-tracked": (without_counter, 0, lambda: load("model.pt")),
    "weights-only": (with_arguments, 0, lambda: net().load_state_dict(torch.load("safe.pt")["model"])),
    "tensors-share-memory": (tied, 0, load_tied),
    "cuda-device": (of_a_gpu, 0, lambda: load("model.pt")),
    "size-mismatch": (of_ten_classes, 1, None),
    "one-value-per-channel": (one_value, 0, None),
    "pytorch-stream-reader": (cut_short, 3, None),
    "invalid-load-key": (pointer, 3, None),
    "unexpected-eof": (old_and_cut_short, 3, None),
}
"""By page: what raises its error, the exit code of its commands, and what works after them."""


def test_every_page_has_a_test_and_a_line_in_the_list() -> None:
    assert {*PAGES} == {*RAISED, "monitored-barrier"}
    listed = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name, text in PAGES.items():
        assert f"[{text.splitlines()[0].removeprefix('# ')}](errors/{name}.md)" in listed


def title(page: str) -> str:
    """Return the error text that a page is about, up to what differs from case to case."""
    found = re.match(r"# `(.+)`$", PAGES[page].splitlines()[0])
    assert found
    return found[1].partition("…")[0]


@pytest.mark.parametrize("page", RAISED)
def test_the_error_is_raised_and_the_commands_answer_as_the_page_shows(
    page: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(SOURCE)
    raises, code, works = RAISED[page]
    with pytest.raises(Exception) as caught:
        raises()
    assert title(page) in str(caught.value)
    for command, shown in sessions(page):
        program, *words = shlex.split(command)
        if program == "ckpttool":
            ran = cli(*words)
            assert ran.code == code, ran.err
            answer = ran.err + ran.out
        else:
            assert main.main(words[1:]) == code
            answer = capsys.readouterr().out
        lines = [*map(alike, answer.splitlines())]
        assert [line for line in map(alike, shown) if line not in lines] == [], answer
    if works:
        works()


def sessions(page: str) -> list[tuple[str, list[str]]]:
    """Return each command of a page with the lines that it answers there."""
    found: list[tuple[str, list[str]]] = []
    for line in re.findall(r"^    (\S.*)$", PAGES[page], re.MULTILINE):
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line)
    return found


def alike(line: str) -> str:
    """Return a line without sizes, times and names of storages, which differ."""
    return re.sub(r"\(.* s\)$|'\d+'", "", line.strip())


def leave_one_out(rank: int, world_size: int) -> str:
    if rank:
        return ""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_monitored_barrier_names_the_rank_and_not_where_it_is(fresh_ranks: Any) -> None:
    assert title("monitored-barrier") in fresh_ranks(2, leave_one_out)[0]
