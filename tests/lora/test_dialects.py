"""Adapters in any dialect and back: the same bits, and what a dialect can't hold is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Refused
from tests.support.adapters import REAL, Named, assert_same_bits, converted, tensors_of

DIALECTS = ("peft", "kohya", "diffusers", "comfy")


def components(named: Named) -> set[str]:
    """Return what the names say of the parts of a pipeline, apart from PEFT's."""
    return {name.split("_text" if "_te" in name else ".")[0][:9] for name in named.modules}


@pytest.mark.parametrize("to", DIALECTS)
@pytest.mark.parametrize("name", REAL)
def test_real_names_come_back_with_the_same_bits(name: str, to: str, tmp_path: Path) -> None:
    named = REAL[name]
    source = named.save(tmp_path / "in")
    said: dict[str, Any] = {"base": named.base, "component": named.component}
    try:
        there, done = converted(source, to, tmp_path / "there", **said)
    except Refused as refused:
        assert to == "peft" and "is for one model" in str(refused)
        return
    assert done.layers and done.to == to and not done.left_out
    back, again = converted(there, named.dialect, tmp_path / "back", base=done.model, component=named.component)
    assert again.dialect == to
    assert_same_bits(tensors_of(back), named.tensors())
    if named.dialect == "peft" and to == "diffusers":
        config = json.loads((back / "adapter_config.json").read_text())
        assert config == json.loads((source / "adapter_config.json").read_text())


# ---- Other programs load the result


def tiny_unet() -> Any:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    )


def trained(model: Any, folder: Path, **said: Any) -> dict[str, torch.Tensor]:
    """Save a model and an adapter of PEFT's for it; return what PEFT merges."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model.save_pretrained(folder / "base")
    tuned = peft.get_peft_model(model, peft.LoraConfig(**said))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name or parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter).abs() / 4)
    tuned.save_pretrained(folder / "peft")
    found: dict[str, torch.Tensor] = tuned.merge_and_unload().state_dict()
    return {name: tensor.clone() for name, tensor in found.items()}


def merged(base: Path, adapter: Path, out: Path) -> dict[str, torch.Tensor]:
    opened = ckpttool.open_adapter(adapter)
    with ckpttool.open(base) as model, opened.checkpoint:
        new, _ = ckpttool.merge_lora(model, opened)
        ckpttool.save(new, out, force=True)
    return load_file(out)


UNET: dict[str, Any] = {"target_modules": ["to_q", "to_v", "to_out.0", "conv1"], "r": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": UNET | {"lora_alpha": 2},
    "rslora": UNET | {"lora_alpha": 3, "use_rslora": True},
    "patterns": UNET
    | {"lora_alpha": 2, "rank_pattern": {"conv1": 2}, "alpha_pattern": {"to_v": 5, "conv1": 4}},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_diffusers_and_merge_lora_add_what_peft_does(settings: str, tmp_path: Path) -> None:
    wanted = trained(tiny_unet(), tmp_path, **SETTINGS[settings])
    base = tmp_path / "base" / "diffusion_pytorch_model.safetensors"
    said = {"base": "sd15", "component": "unet"}
    of_diffusers, _ = converted(tmp_path / "peft", "diffusers", tmp_path / "d", **said)
    model = tiny_unet()
    model.load_state_dict(load_file(base))
    model.load_lora_adapter(str(of_diffusers.parent), weight_name=of_diffusers.name, prefix="unet")
    model.fuse_lora()
    model.unload_lora()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name])
    of_kohya, _ = converted(of_diffusers, "kohya", tmp_path / "k", **said)
    again, _ = converted(of_kohya, "peft", tmp_path / "again", base="sd15")
    for adapter in (of_diffusers, of_kohya, again):
        found = merged(base, adapter, tmp_path / "out.safetensors")
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    assert_same_bits(tensors_of(again), tensors_of(tmp_path / "peft"))


def test_peft_loads_what_was_diffusers_with_dora_and_whole_modules(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    said = {"target_modules": ["to_q", "conv1"], "r": 4, "use_dora": True, "modules_to_save": ["conv_out"]}
    wanted = trained(tiny_unet(), tmp_path, lora_alpha=2, **said)
    there, _ = converted(tmp_path / "peft", "diffusers", tmp_path / "d", component="unet")
    assert "unet.conv_out.weight" in tensors_of(there)
    back, _ = converted(there, "peft", tmp_path / "back")
    assert_same_bits(tensors_of(back), tensors_of(tmp_path / "peft"))
    comfy, _ = converted(tmp_path / "peft", "comfy", tmp_path / "c", base="sd15", component="unet")
    assert {"diffusion_model.out.2.set_weight", "diffusion_model.out.2.bias.set_weight"} <= {*tensors_of(comfy)}
    again, _ = converted(comfy, "peft", tmp_path / "again", base="sd15")
    assert_same_bits(tensors_of(again), tensors_of(tmp_path / "peft"))
    model = tiny_unet()
    model.load_state_dict(load_file(tmp_path / "base" / "diffusion_pytorch_model.safetensors"))
    for folder in (back, again):
        loaded = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
        for name, tensor in loaded.state_dict().items():
            torch.testing.assert_close(tensor, wanted[name])
        model = tiny_unet()
        model.load_state_dict(load_file(tmp_path / "base" / "diffusion_pytorch_model.safetensors"))


def test_flux_in_kohya_s_form_is_for_diffusers_what_ours_is(tmp_path: Path) -> None:
    """diffusers' own conversion has the same layers, with the same products."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    from diffusers.loaders import FluxLoraLoaderMixin

    real = {"linear1": (21504, 6), "linear2": (3072, 5)}  # which diffusers takes apart by numbers
    modules = {name: real.get(name.rpartition("_")[2], size) for name, size in REAL["Flux"].modules.items()}
    named = Named("kohya", modules, dtype=torch.float32, alpha=2)
    source = named.save(tmp_path / "in")
    there, _ = converted(source, "diffusers", tmp_path / "there")
    theirs = FluxLoraLoaderMixin.lora_state_dict(str(source.parent), weight_name=source.name)
    ours = tensors_of(there)
    assert diffusers and ours.keys() == theirs.keys()
    for name in (name for name in ours if ".lora_B" in name):
        other = name.replace("lora_B", "lora_A")
        torch.testing.assert_close(ours[name] @ ours[other] / 2, theirs[name] @ theirs[other])


@pytest.mark.parametrize("name", ["SD 1.5, UNet and CLIP", "SDXL, UNet and both CLIPs", "Wan", "Qwen-Image"])
def test_diffusers_own_conversion_of_kohya_s_names_is_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from diffusers import loaders
    from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft

    mixins = {"SD 1": "StableDiffusion", "SDXL": "StableDiffusionXL", "Wan": "Wan", "Qwen": "QwenImage"}
    mixin = getattr(loaders, f"{mixins[name[:4].strip()]}LoraLoaderMixin")
    source = REAL[name].save(tmp_path / "in")
    unet = tiny_unet().config if "SDXL" not in name else type("C", (), {"layers_per_block": 2})()
    found = mixin.lora_state_dict(str(source.parent), weight_name=source.name, unet_config=unet)
    found = found[0] if isinstance(found, tuple) else found
    there, _ = converted(source, "diffusers", tmp_path / "there", base=REAL[name].base)
    theirs = set()
    for part in {key.partition(".")[0] for key in found}:
        those = {key: tensor for key, tensor in found.items() if key.startswith(f"{part}.")}
        convert = convert_state_dict_to_peft if part.startswith("text") else convert_unet_state_dict_to_peft
        is_new = all("lora_A" in key or "lora_B" in key for key in those)
        theirs |= {*(those if is_new else convert(those))}
    assert theirs == {*tensors_of(there)}
