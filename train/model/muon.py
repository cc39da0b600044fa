"""Muon for the matrices inside a model, AdamW for the rest. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpttool.errors import UsageFault
from train.model.names import found_in

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm)  # whose weights may have two axes


class Muon(Optimizer):
    """Muon for the matrices inside a model, AdamW for the rest, at one learning rate and decay.

    As its author advises (Jordan et al. 2024, kellerjordan.github.io/posts/muon), embeddings, the last layer,
    offsets, norms and kernels are AdamW's. The steps of both have the same size (arXiv 2502.16982). `betas`,
    `eps` and `fused` are of AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        inside = [group for group in groups if group["muon"]]
        others = [group for group in groups if not group["muon"]]
        if not inside:
            raise ValueError("it has no matrix before the last one that muon could orthogonalise")
        muon = torch.optim.Muon(inside, lr, weight_decay, momentum, nesterov, adjust_lr_fn="match_rms_adamw")
        self.parts: list[Optimizer] = [muon]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr, betas, eps, weight_decay, fused=fused))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        start = 0
        for part in self.parts:  # a restored state is in new dicts, which the parts shall have too
            part.state, end = self.state, start + len(part.param_groups)
            part.param_groups, start = self.param_groups[start:end], end

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.state = self.state
            part.step()


def matrices(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    """Return the `id` of each parameter that muon takes: those that match a pattern, or else those inside.

    Inside are the weights of two axes but the last one, that of the scores; of layers without layers in them
    and of attention, and none that is an embedding too. So what a model holds of its own, such as a table of
    places, is not among them.
    """
    if patterns:
        return _chosen(model, patterns)
    weights: list[nn.Parameter] = []
    for layer in model.modules():
        has_layers = any(True for _ in layer.children()) and not isinstance(layer, nn.MultiheadAttention)
        if has_layers or isinstance(layer, EMBEDDINGS + NORMS):
            continue
        own = layer.named_parameters(recurse=False)
        weights += [p for name, p in own if p.dim() == 2 and "weight" in name and not p.is_complex()]
    embeddings = {id(layer.weight) for layer in model.modules() if isinstance(layer, EMBEDDINGS)}
    return {id(weight) for weight in weights[:-1]} - {id(weight) for weight in weights[-1:]} - embeddings


def _chosen(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    chosen = found_in("--muon-for", patterns, model)
    for name, parameter in model.named_parameters():
        if name in chosen and (parameter.dim() != 2 or parameter.is_complex()):
            shape = "×".join(map(str, parameter.shape)) or "one number"
            what = (
                f"--muon-for {patterns[chosen[name]]}: parameter {name} is {shape}, and muon takes matrices"
            )
            raise UsageFault(what, hint="give an expression that only matrices match")
    return {id(parameter) for name, parameter in model.named_parameters() if name in chosen}
