"""LoRA adapters under the names that programs truly give them, from their public lists of modules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.lora.translating import ConvertedAdapter

Tensors = dict[str, torch.Tensor]
Sizes = tuple[int, ...]  # rows and columns, and a kernel
Modules = dict[str, Sizes]

ENDS = {
    "kohya": ("lora_down.weight", "lora_up.weight"),
    "comfy": ("lora_down.weight", "lora_up.weight"),
    "diffusers": ("lora_A.weight", "lora_B.weight"),
    "peft": ("lora_A.weight", "lora_B.weight"),
}


@dataclass(frozen=True)
class Named:
    """An adapter: its dialect, its modules under full names, and what is said of all of them."""

    dialect: str
    modules: Modules
    base: str | None = None  # what says the model, where names are of several
    component: str | None = None
    rank: int = 4
    alpha: float = 2.0
    dtype: torch.dtype = torch.float16
    config: Mapping[str, Any] = field(default_factory=dict)
    is_dora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)  # of modules whose names hold this

    def tensors(self) -> Tensors:
        made: Tensors = {}
        torch.manual_seed(len(self.modules))
        down, up = ENDS[self.dialect]
        begin = "base_model.model." if self.dialect == "peft" else ""
        for module, (rows, columns, *kernel) in self.modules.items():
            rank = next((rank for part, rank in self.ranks.items() if part in module), self.rank)
            key, ones = f"{begin}{module}", [1 for _ in kernel]
            made[f"{key}.{down}"] = torch.randn(rank, columns, *kernel).to(self.dtype)
            made[f"{key}.{up}"] = torch.randn(rows, rank, *ones).to(self.dtype)
            if self.dialect in ("kohya", "comfy"):
                made[f"{key}.alpha"] = torch.tensor(self.alpha, dtype=self.dtype)
            if self.is_dora:
                of_peft = self.dialect in ("peft", "diffusers")
                magnitude = torch.rand(rows).to(self.dtype)
                end = "lora_magnitude_vector" if of_peft else "dora_scale"
                made[f"{key}.{end}"] = magnitude if of_peft else magnitude.reshape(rows, 1, *ones)
        return made

    def save(self, folder: Path) -> Path:
        """Write it as its program does, and return where."""
        folder.mkdir(parents=True, exist_ok=True)
        said = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, **self.config}
        if self.is_dora:
            said["use_dora"] = True
        if self.dialect == "peft":
            (folder / "adapter_config.json").write_text(json.dumps(said))
            save_file(self.tensors(), folder / "adapter_model.safetensors")
            return folder
        metadata = {"format": "pt"}
        if self.dialect == "diffusers":
            parts = dict.fromkeys(module.partition(".")[0] for module in self.modules)
            both = {f"{part}.{key}": value for part in parts for key, value in said.items()}
            metadata["lora_adapter_metadata"] = json.dumps(both)
        save_file(self.tensors(), folder / "lora.safetensors", metadata)
        return folder / "lora.safetensors"


def converted(source: Path, to: str, target: Path, **said: Any) -> tuple[Path, ConvertedAdapter]:
    """Write an adapter in another dialect."""
    adapter = ckpttool.open_adapter(source)
    with adapter.checkpoint:
        made, done = ckpttool.convert_adapter(adapter, to, **said)
        if to == "peft":
            ckpttool.save_adapter(made, done.config, target, force=True)
            return target, done
        path = target.with_suffix(".safetensors")
        ckpttool.save(made, path, force=True, keep_copies=True)
    return path, done


def tensors_of(path: Path) -> Tensors:
    return load_file(path / "adapter_model.safetensors" if path.is_dir() else path)


def assert_same_bits(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:6]
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(found[name].view(bits), tensor.view(bits)), name


# ---- Names, as the programs' own lists have them


def kohya(prefix: str, modules: Modules) -> Modules:
    return {f"{prefix}_{name.replace('.', '_')}": sizes for name, sizes in modules.items()}


def under(prefix: str, modules: Modules) -> Modules:
    return {f"{prefix}.{name}": sizes for name, sizes in modules.items()}


ATTENTION = {f"attn{n}.{to}": (6, 4) for n in (1, 2) for to in ("to_q", "to_k", "to_v", "to_out.0")}
INNER = ATTENTION | {"ff.net.0.proj": (8, 6), "ff.net.2": (6, 8)}


def transformer(block: str, depth: int = 1, sizes: Sizes = (6, 6)) -> Modules:
    """Return the modules of one spatial transformer of a UNet."""
    made = {f"{block}.{end}": sizes for end in ("proj_in", "proj_out")}
    return made | {
        f"{block}.transformer_blocks.{n}.{name}": s for n in range(depth) for name, s in INNER.items()
    }


SD15_BLOCKS = [f"down_blocks.{i}.attentions.{j}" for i in range(3) for j in range(2)]
SD15_BLOCKS += [
    "mid_block.attentions.0",
    *(f"up_blocks.{i}.attentions.{j}" for i in (1, 2, 3) for j in range(3)),
]
SD15 = {name: size for block in SD15_BLOCKS for name, size in transformer(block, 1, (6, 6, 1, 1)).items()}
RESNETS = [f"down_blocks.{i}.resnets.{j}" for i in range(4) for j in range(2)]
RESNETS += ["mid_block.resnets.0", *(f"up_blocks.{i}.resnets.{j}" for i in range(4) for j in range(3))]
CONVOLUTIONS: Modules = {f"{block}.conv{n}": (6, 5, 3, 3) for block in RESNETS for n in (1, 2)}
CONVOLUTIONS |= {f"{block}.time_emb_proj": (6, 5) for block in RESNETS}
CONVOLUTIONS |= {
    "up_blocks.0.upsamplers.0.conv": (6, 6, 3, 3),
    "down_blocks.0.downsamplers.0.conv": (6, 6, 3, 3),
}

SDXL_DEPTH = {1: 2, 2: 10}
SDXL: Modules = {}
SDXL_SGM: Modules = {}
for n, block in ((4, "1.attentions.0"), (5, "1.attentions.1"), (7, "2.attentions.0"), (8, "2.attentions.1")):
    SDXL |= transformer(f"down_blocks.{block}", SDXL_DEPTH[int(block[0])])
    SDXL_SGM |= transformer(f"input_blocks.{n}.1", SDXL_DEPTH[int(block[0])])
SDXL |= transformer("mid_block.attentions.0", 10)
SDXL_SGM |= transformer("middle_block.1", 10)
for n in range(6):
    SDXL |= transformer(f"up_blocks.{n // 3}.attentions.{n % 3}", 10 if n < 3 else 2)
    SDXL_SGM |= transformer(f"output_blocks.{n}.1", 10 if n < 3 else 2)
SGM_CONVOLUTIONS: Modules = {
    f"{block}.{end}": sizes
    for block in ("input_blocks.1.0", "input_blocks.7.0", "middle_block.0", "output_blocks.8.0")
    for end, sizes in {
        "in_layers.2": (6, 5, 3, 3),
        "out_layers.3": (6, 5, 3, 3),
        "emb_layers.1": (6, 5),
    }.items()
}
SGM_CONVOLUTIONS |= {"input_blocks.3.0.op": (6, 6, 3, 3), "output_blocks.2.2.conv": (6, 6, 3, 3)}

CLIP_LAYERS = [f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")] + ["mlp.fc1", "mlp.fc2"]


def clip(layers: int) -> Modules:
    return {f"text_model.encoder.layers.{n}.{name}": (6, 6) for n in range(layers) for name in CLIP_LAYERS}


T5: Modules = {f"encoder.block.{n}.layer.0.SelfAttention.{x}": (6, 6) for n in range(3) for x in "qkvo"}
T5 |= {
    f"encoder.block.{n}.layer.1.DenseReluDense.{x}": (6, 6) for n in range(3) for x in ("wi_0", "wi_1", "wo")
}


def bfl(double: int = 3, single: int = 4) -> Modules:
    """Return Flux's modules as Black Forest Labs' code names them."""
    parts = {"attn.qkv": (18, 6), "attn.proj": (6, 6), "mlp.0": (24, 6), "mlp.2": (6, 24), "mod.lin": (36, 6)}
    made = {
        f"double_blocks.{n}.{side}_{name}": sizes
        for n in range(double)
        for side in ("img", "txt")
        for name, sizes in parts.items()
    }
    ends = {"linear1": (42, 6), "linear2": (6, 30), "modulation.lin": (18, 6)}
    return made | {f"single_blocks.{n}.{name}": sizes for n in range(single) for name, sizes in ends.items()}


def flux(double: int = 3, single: int = 4, *, only_attention: bool = False) -> Modules:
    """Return Flux's modules as diffusers names them."""
    joint = [f"attn.{x}" for x in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")]
    attention = dict.fromkeys([*joint, "attn.to_out.0", "attn.to_add_out"], (6, 6))
    rest = {
        f"{ff}.net.{n}": s for ff in ("ff", "ff_context") for n, s in (("0.proj", (24, 6)), ("2", (6, 24)))
    }
    rest |= {"norm1.linear": (36, 6), "norm1_context.linear": (36, 6)}
    alone = dict.fromkeys([f"attn.to_{x}" for x in "qkv"], (6, 6))
    more = {"proj_mlp": (24, 6), "proj_out": (6, 30), "norm.linear": (18, 6)}
    blocks = attention | ({} if only_attention else rest)
    singles = alone | ({} if only_attention else more)
    made = {f"transformer_blocks.{n}.{name}": s for n in range(double) for name, s in blocks.items()}
    return made | {
        f"single_transformer_blocks.{n}.{name}": s for n in range(single) for name, s in singles.items()
    }


SD3 = {
    f"joint_blocks.{n}.{side}.{name}": sizes
    for n in range(3)
    for side in ("x_block", "context_block")
    for name, sizes in {
        "attn.qkv": (18, 6),
        "attn.proj": (6, 6),
        "mlp.fc1": (24, 6),
        "mlp.fc2": (6, 24),
    }.items()
}
SD3_ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
SD3_DIFFUSERS = {f"transformer_blocks.{n}.attn.{name}": (6, 6) for n in range(3) for name in SD3_ATTENTION}
WAN = {f"blocks.{n}.{a}_attn.{x}": (6, 6) for n in range(4) for a in ("self", "cross") for x in "qkvo"}
WAN |= {f"blocks.{n}.ffn.{i}": s for n in range(4) for i, s in ((0, (12, 6)), (2, (6, 12)))}
WAN_ENDS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
WAN_DIFFUSERS = {f"blocks.{n}.attn{i}.{x}": (6, 6) for n in range(4) for i in (1, 2) for x in WAN_ENDS}
WAN_DIFFUSERS |= {
    f"blocks.{n}.ffn.net.{i}": s for n in range(4) for i, s in (("0.proj", (12, 6)), ("2", (6, 12)))
}
QWEN_ENDS = [f"attn.{name}" for name in SD3_ATTENTION]
QWEN_ENDS += [f"{side}_{end}" for side in ("img", "txt") for end in ("mlp.net.0.proj", "mlp.net.2", "mod.1")]
QWEN_IMAGE = {f"transformer_blocks.{n}.{name}": (6, 6) for n in range(12) for name in QWEN_ENDS}


def llama(layers: int, names: Iterable[str] = ("q", "k", "v", "o"), mlp: bool = True) -> Modules:
    made: Modules = {}
    for n in range(layers):
        made |= {f"model.layers.{n}.self_attn.{x}_proj": (4 if x in "kv" else 8, 8) for x in names}
        made |= {f"model.layers.{n}.mlp.{x}_proj": (8, 8) for x in ("gate", "up", "down") if mlp}
    return made


PIPELINE_SDXL = kohya("lora_te1", clip(12)) | kohya("lora_te2", clip(32))
NATIVE_CLIP = "text_encoders.clip_l.transformer"
F, P, K = "flux", "diffusers", "kohya"
BF16 = torch.bfloat16

REAL: dict[str, Named] = {
    "SD 1.5, UNet": Named(K, kohya("lora_unet", SD15), "sd15"),
    "SD 1.5, UNet and CLIP": Named(K, kohya("lora_unet", SD15) | kohya("lora_te", clip(12))),
    "SD 1.5, CLIP alone": Named(K, kohya("lora_te", clip(12)), rank=8, alpha=1),
    "SD 1.5, LoCon": Named(
        K, kohya("lora_unet", SD15 | CONVOLUTIONS), "sd15", ranks={"conv1": 2, "resnets": 3}
    ),
    "SD 1.5, UNet of diffusers": Named(P, under("unet", SD15), "sd15", rank=16, alpha=16),
    "SD 1.5, UNet and CLIP of diffusers": Named(
        P, under("unet", SD15) | under("text_encoder", clip(12)), "sd15"
    ),
    "SD 1.5, UNet of PEFT": Named("peft", SD15, "sd15", "unet", dtype=torch.float32),
    "SD 1.5, ComfyUI's CLIP": Named("comfy", under(NATIVE_CLIP, clip(12)), "sd15", alpha=3),
    "SDXL, UNet": Named(K, kohya("lora_unet", SDXL_SGM)),
    "SDXL, UNet and both CLIPs": Named(K, kohya("lora_unet", SDXL_SGM) | PIPELINE_SDXL, dtype=BF16),
    "SDXL, LoCon": Named(K, kohya("lora_unet", SDXL_SGM | SGM_CONVOLUTIONS), ranks={"layers": 2}),
    "SDXL, UNet of diffusers": Named(P, under("unet", SDXL), "sdxl", alpha=4),
    "SDXL, all of diffusers": Named(
        P,
        under("unet", SDXL) | under("text_encoder", clip(12)) | under("text_encoder_2", clip(32)),
        "sdxl",
        rank=2,
        alpha=5,
    ),
    "SDXL, ComfyUI's": Named("comfy", under("diffusion_model", SDXL_SGM), "sdxl", alpha=1),
    "SDXL, DoRA": Named(K, kohya("lora_unet", SDXL_SGM | SGM_CONVOLUTIONS), is_dora=True),
    "Flux": Named(K, kohya("lora_unet", bfl()), alpha=4),
    "Flux, with CLIP and T5": Named(
        K, kohya("lora_unet", bfl()) | kohya("lora_te1", clip(12)) | kohya("lora_te3", T5), dtype=BF16
    ),
    "Flux of diffusers": Named(P, under("transformer", flux()), dtype=BF16),
    "Flux of diffusers, attention alone": Named(P, under("transformer", flux(only_attention=True)), alpha=8),
    "Flux of PEFT": Named("peft", flux(), None, "transformer", dtype=torch.float32, rank=3),
    "Flux, ComfyUI's": Named("comfy", under("diffusion_model", bfl()), alpha=16, rank=8),
    "SD 3": Named(K, kohya("lora_unet", SD3) | kohya("lora_te2", clip(32)), rank=6),
    "SD 3 of diffusers": Named(P, under("transformer", SD3_DIFFUSERS), "sd3"),
    "SD 3, ComfyUI's": Named("comfy", under("diffusion_model", SD3), alpha=1),
    "Wan": Named(K, kohya("lora_unet", WAN), dtype=BF16, rank=8),
    "Wan of diffusers": Named(P, under("transformer", WAN_DIFFUSERS), rank=8, alpha=8),
    "Wan, ComfyUI's": Named("comfy", under("diffusion_model", WAN), alpha=1),
    "Qwen-Image": Named(K, kohya("lora_unet", QWEN_IMAGE), dtype=BF16),
    "Qwen-Image of diffusers": Named(P, under("transformer", QWEN_IMAGE), "qwen-image"),
    "Qwen-Image, ComfyUI's": Named("comfy", under("diffusion_model", QWEN_IMAGE), "qwen-image"),
    "Llama of PEFT": Named("peft", llama(3), dtype=torch.float32, alpha=16, rank=8),
    "Llama of PEFT, patterns": Named(
        "peft",
        llama(12, "qv", mlp=False),
        ranks={"layers.1.self_attn.v": 2},
        config={"rank_pattern": {"layers.1.self_attn.v_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    ),
    "Qwen of PEFT, rslora": Named(
        "peft", llama(4), rank=16, alpha=32, dtype=BF16, config={"use_rslora": True}
    ),
    "Llama of PEFT, DoRA": Named("peft", llama(2), is_dora=True, dtype=BF16),
}
