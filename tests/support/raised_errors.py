"""The errors that docs/errors/ is about, each as torch or safetensors raises it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_model, save_file
from torch import nn

import ckpttool
from tests.support.comparing import prefixed

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
