"""A LoRA adapter in PEFT's format: its folder, its settings, and what each of its tensors is."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from sys import float_info
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Damaged, Refused, Unreadable, Unsupported
from ...files.failures import reason
from ...formats.reading import open as open_any
from ...tensors.ref import TensorRef
from .name_pattern import UnknownPattern, fits

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."

FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")

NAMED = re.compile(r".+\.lora_(?:embedding_)?[AB]\.(?!bias$)([^.]+)(?:\.weight)?")
"""A factor as it is in the model's own `state_dict`, where several adapters may be."""

PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the model's own weights as they are."""

_WAYS = (
    "use_dora lora_bias use_qalora use_bdlora megatron_config layer_replication target_parameters "
    "trainable_token_indices alora_invocation_tokens arrow_config kasa_config velora_config monteclora_config"
)
UNKNOWN_WAYS = tuple(_WAYS.split())
"""Settings by which a layer computes something else than W + scale · B·A."""

IN_PYTHON = "merge it in Python: PeftModel.from_pretrained(model, ADAPTER).merge_and_unload()"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in PEFT's format.

    Attributes:
        checkpoint: its tensors; open until `checkpoint.close()`.
        config: what its `adapter_config.json` says.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]

    def require_known(self) -> None:
        """Raise Unsupported unless it is a LoRA that adds a product to the weights, and nothing else."""
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise Unsupported(
                self.checkpoint.path, f"is an adapter of type {str(kind)[:40]}, and only LORA is added"
            )
        odd = [name for name in UNKNOWN_WAYS if self.config.get(name)]
        start = self.config.get("init_lora_weights", True)
        if start not in PLAIN_STARTS:
            odd.append(f"init_lora_weights={str(start)[:40]}")
        if odd:
            raise Unsupported(
                self.checkpoint.path,
                f"is a LoRA with {', '.join(odd)}, which is more than a product added to the weights",
                hint=IN_PYTHON,
            )

    def saved_modules(self) -> list[str]:
        """Return the names of the modules that it holds whole; raises Damaged where they are no names."""
        saved = self.config.get("modules_to_save") or []
        if not isinstance(saved, list) or not all(isinstance(each, str) for each in saved):
            said = f"modules_to_save = {saved!r:.40}"
            raise Damaged(self.checkpoint.path, f"{CONFIG} says {said}, which is no list of names")
        return saved

    def setting(self, pattern: str, usual: str, module: str) -> float:
        """Return a number of the configuration: that of the first pattern that fits a layer, or the usual.

        Args:
            pattern: the name of the patterns, such as `rank_pattern`.
            usual: the name of the number for all other layers.
            module: the layer.

        Raises:
            Damaged: it is no finite positive number, or a pattern is malformed.
            Unsupported: a pattern is one that `name_pattern.fits` does not take.
        """
        chosen = self.config.get(usual)
        try:
            for key, value in (self.config.get(pattern) or {}).items():
                if fits(key, module):
                    chosen = value
                    break
        except UnknownPattern as error:
            raise Unsupported(
                self.checkpoint.path,
                f"{CONFIG} has {pattern} '{error!s:.80}', more than names, '.*', '|' and plain groups",
                hint="name the layers there instead, as they are called in the model",
            ) from None
        except (AttributeError, re.error, RecursionError, OverflowError):
            raise Damaged(self.checkpoint.path, f"{CONFIG} has a malformed {pattern}") from None
        if type(chosen) not in (int, float) or not 0 < chosen <= float_info.max:  # type: ignore[operator]
            raise Damaged(
                self.checkpoint.path,
                f"{CONFIG} says {usual} = {chosen!r:.40}, which is no finite positive number",
            )
        return chosen  # type: ignore[return-value]

    def parts(self) -> tuple[dict[str, dict[str, TensorRef]], dict[str, TensorRef]]:
        """Return the factors of each layer, and by their names in the model the tensors that it holds whole.

        Raises:
            Unsupported: one is of a layer's, and no factor of a product.
            Refused: two are the same tensor of the model.
        """
        whole: dict[str, TensorRef] = {}
        factors: dict[str, dict[str, TensorRef]] = {}
        keys: dict[tuple[str, str], str] = {}
        for key, tensor in self.checkpoint.state().tensors.items():
            name = key.removeprefix(PREFIX)
            match = FACTOR.fullmatch(name)
            if match:
                module, embedding, factor = match.groups()
                part = f"{embedding or ''}{factor}"
                factors.setdefault(module, {})[part] = tensor
            elif ".lora_" in name:
                raise self._no_factor(key)
            else:
                module, part = name.replace(".base_layer.", "."), ""  # of a layer that has factors too
                whole[module] = tensor
            other = keys.setdefault((module, part), key)
            if other != key:
                raise Refused(
                    self.checkpoint.path,
                    f"holds '{other[:80]}' and '{key[:80]}', which are the same tensor of the model",
                    hint="leave one of both out: ckpttool convert FILE NEWFILE --exclude KEY",
                )
        return factors, whole

    def _no_factor(self, key: str) -> Unsupported:
        named = NAMED.fullmatch(key)
        if named is None:
            said = "which is no factor of a product (DoRA, or a bias)"
            return Unsupported(self.checkpoint.path, f"holds '{key[:80]}', {said}")
        file, adapter = shlex.quote(self.checkpoint.path), named[1]
        wanted = shlex.quote(rf"(\.lora_(?:embedding_)?[AB])\.{re.escape(adapter)}=\1")
        return Unsupported(
            self.checkpoint.path,
            f"holds '{key[:80]}' with the adapter's name '{adapter[:40]}' in it, which PEFT's files lack",
            hint=f"take it out: ckpttool rename-keys {file} {file} --force --map {wanted}",
        )


def open_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Open an adapter's folder.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors` or `.bin`.

    Returns:
        The adapter, whose `checkpoint` the caller closes.

    Raises:
        Unreadable: one of both files is missing.
        Damaged: the configuration is no JSON object; or as `ckpttool.open` raises it.
    """
    path = os.fspath(folder)
    config = os.path.join(path, CONFIG)
    try:
        with open(config, encoding="utf-8") as file:
            said = json.load(file)
    except OSError as error:
        hint = "ADAPTER is the folder that PEFT's save_pretrained wrote"
        raise Unreadable(config, reason(error), hint=hint) from None
    except (ValueError, RecursionError):
        raise Damaged(config, "is not JSON") from None
    if not isinstance(said, dict):
        raise Damaged(config, "is not a JSON object")
    there = [os.path.join(path, name) for name in WEIGHTS if os.path.lexists(os.path.join(path, name))]
    if not there:
        raise Unreadable(path, f"holds neither {WEIGHTS[0]} nor {WEIGHTS[1]}")
    return Adapter(open_any(there[0]), said)
