"""torchtitan's own adapters to Hugging Face, without the rest of it, which few machines can import."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

STUBS = ("protocols.model", "tools.logging", "models.common.rope", "models.common.decoder")


class _Empty(ModuleType):
    """A module in which every name is a class with nothing in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"Config": type("Config", (), {}), "__getattr__": lambda *_: print})


def adapter(model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the adapter of `llama3`, `qwen3` or `deepseek_v3`, for two layers of which one has experts."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torchtitan is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    folders = ("", "protocols", "tools", "models", "models.common", f"models.{model}")
    for name in (*folders, *STUBS, f"models.{model}.model"):
        full = f"torchtitan.{name}".rstrip(".")
        module = _Empty(full)
        module.__path__, module.__spec__ = [], ModuleSpec(full, None)
        monkeypatch.setitem(sys.modules, full, module)
    for name in ("protocols.state_dict_adapter", "models.utils", f"models.{model}.state_dict_adapter"):
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        found = importlib.util.spec_from_file_location(f"torchtitan.{name}", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        monkeypatch.setitem(sys.modules, f"torchtitan.{name}", module)
        found.loader.exec_module(module)
    attention = SimpleNamespace(n_heads=4, n_kv_heads=2, head_dim=4, q_lora_rank=5)
    layers = [SimpleNamespace(attention=attention, moe=moe) for moe in (None, SimpleNamespace(num_experts=3))]
    config = SimpleNamespace(layers=layers, dim=8, enable_weight_tying=False)
    kind = next(
        each
        for name, each in vars(module).items()
        if name.lower().startswith(model.replace("_", "")) and name.endswith("Adapter")
    )
    return kind(config, None)
