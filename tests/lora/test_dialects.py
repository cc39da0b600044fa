"""Adapters in any dialect and back: the same bits, and what a dialect can't hold is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, Refused
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
    back, again = converted(
        there, named.dialect, tmp_path / "back", base=done.model, component=named.component
    )
    assert again.dialect == to
    assert_same_bits(tensors_of(back), named.tensors())
    if named.dialect == "peft" and to == "diffusers":
        config = json.loads((back / "adapter_config.json").read_text())
        assert config == json.loads((source / "adapter_config.json").read_text())


# Whose layers have the same names in two models, and others in kohya's or ComfyUI's files: attention of
# transformer_blocks alone (Flux, SD 3, Qwen-Image), and CLIP alone.
AMBIGUOUS = {"SD 3 of diffusers", "SD 1.5, ComfyUI's CLIP"}


def hint_of_refusal(adapter: Any, to: str, component: str | None) -> str | None:
    try:
        ckpttool.convert_adapter(adapter, to, component=component)
    except Refused as error:
        return str(error.hint)
    return None


def test_a_model_is_known_by_its_names_unless_two_have_them(tmp_path: Path) -> None:
    hints = {}
    for name, named in REAL.items():
        adapter = ckpttool.open_adapter(named.save(tmp_path / name))
        with adapter.checkpoint:
            for to in ("kohya", "comfy", "diffusers"):
                if hint := hint_of_refusal(adapter, to, named.component):
                    hints[name] = hint
    assert {*hints} == AMBIGUOUS
    assert all("--base and --component say which" in hint for hint in hints.values())


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
    assert {"diffusion_model.out.2.set_weight", "diffusion_model.out.2.bias.set_weight"} <= {
        *tensors_of(comfy)
    }
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


# ---- Dialects that are only read


A, B = torch.randn(4, 8), torch.randn(8, 4)
LLAMA = "model.layers.0.self_attn"


def of_peft(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    found = tensors_of(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    return {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}, config


def test_mlx_has_a_scale_and_turned_factors(tmp_path: Path) -> None:
    source = tmp_path / "mlx"
    source.mkdir()
    turned = {f"{LLAMA}.q_proj.lora_a": A.T.contiguous(), f"{LLAMA}.q_proj.lora_b": B.T.contiguous()}
    save_file(turned | {f"{LLAMA}.q_proj.m": torch.ones(8)}, source / "adapters.safetensors")
    said = {"fine_tune_type": "dora", "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    (source / "adapter_config.json").write_text(json.dumps(said))
    there, done = converted(source, "peft", tmp_path / "peft")
    found, config = of_peft(there)
    assert done.dialect == "mlx" and (config["r"], config["lora_alpha"]) == (4, 80) and config["use_dora"]
    assert torch.equal(found[f"{LLAMA}.q_proj.lora_A.weight"], A)
    assert torch.equal(found[f"{LLAMA}.q_proj.lora_B.weight"], B)
    said["lora_parameters"]["scale"] = "much"
    (source / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(Damaged, match="no finite positive alpha or scale"):
        converted(source, "peft", tmp_path / "again")


def test_torchtune_s_pairs_of_rows_become_halves(tmp_path: Path) -> None:
    held = {
        f"layers.0.attn.{x}.lora_{y}.weight": t for x in ("q_proj", "v_proj") for y, t in (("a", A), ("b", B))
    }
    torch.save({name: tensor.clone() for name, tensor in held.items()}, tmp_path / "adapter_0.pt")
    said = {"alpha": 16.0}
    with pytest.raises(Refused, match="pairs, head by head"):
        converted(tmp_path / "adapter_0.pt", "peft", tmp_path / "peft", **said)
    save_file({f"{LLAMA}.q_proj.weight": torch.ones(8, 8)}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with ckpttool.open(tmp_path / "model.safetensors") as base:
        there, _ = converted(tmp_path / "adapter_0.pt", "peft", tmp_path / "peft", base=base, **said)
    found, config = of_peft(there)
    assert config["lora_alpha"] == 16
    wanted = B.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)
    assert torch.equal(found[f"{LLAMA}.q_proj.lora_B.weight"], wanted)
    assert torch.equal(found[f"{LLAMA}.v_proj.lora_B.weight"], B)
    with pytest.raises(Refused, match="does not say the alpha"):
        converted(tmp_path / "adapter_0.pt", "peft", tmp_path / "peft")


def test_litgpt_s_one_layer_becomes_q_k_and_v(tmp_path: Path) -> None:
    a, b = torch.randn(8, 8), torch.randn(12, 4)  # q of 8 rows and v of 4; k has no factors
    key = "transformer.h.0.attn"
    held = {f"{key}.qkv.lora_A": a, f"{key}.qkv.lora_B": b, f"{key}.proj.lora_A": A, f"{key}.proj.lora_B": B}
    torch.save({"model": held}, tmp_path / "lit_model.pth.lora")
    (tmp_path / "hyperparameters.yaml").write_text("lora_r: 4\nlora_alpha: 16\nlora_key: false\n")
    with pytest.raises(Refused, match="sizes that it does not say"):
        converted(tmp_path, "peft", tmp_path / "peft")
    rows = {"q": 8, "k": 4, "v": 4}
    model = {f"{LLAMA}.{x}_proj.weight": torch.ones(n, 8) for x, n in rows.items()}
    save_file(model, tmp_path / "model.safetensors")
    with ckpttool.open(tmp_path / "model.safetensors") as base:
        there, done = converted(tmp_path, "peft", tmp_path / "peft", base=base)
    found, config = of_peft(there)
    assert done.dialect == "litgpt" and (config["r"], config["lora_alpha"]) == (4, 16)
    for name, left, right in (("q", a[:4], b[:8]), ("v", a[4:], b[8:]), ("o", A, B)):
        assert torch.equal(found[f"{LLAMA}.{name}_proj.lora_A.weight"], left)
        assert torch.equal(found[f"{LLAMA}.{name}_proj.lora_B.weight"], right)


# ---- What is refused, by name


def kohya(layer: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    held = {f"{layer}.lora_down.weight": A, f"{layer}.lora_up.weight": B, f"{layer}.alpha": torch.tensor(2.0)}
    return held | {f"{layer}.{end}": tensor for end, tensor in more.items()}


def refusal(folder: Path, held: dict[str, torch.Tensor], to: str, **said: Any) -> CkptToolError:
    config = said.pop("config", None)
    name = "adapter_model" if config else "lora"
    save_file({key: tensor.clone() for key, tensor in held.items()}, folder / f"{name}.safetensors")
    if config:
        said_of_peft = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config
        (folder / "adapter_config.json").write_text(json.dumps(said_of_peft))
    with pytest.raises(CkptToolError) as caught:
        converted(folder if config else folder / "lora.safetensors", to, folder / "out", **said)
    assert caught.value.exit_code == 3 and not [*folder.glob("out*")]
    return caught.value


QKV = {f"transformer_blocks.0.attn.to_{x}": 8 for x in "qkv"}
Q_OF_LLAMA = {
    f"base_model.model.{LLAMA}.q_proj.lora_A.weight": A,
    f"base_model.model.{LLAMA}.q_proj.lora_B.weight": B,
}
CLIP = "base_model.model.text_model.encoder.layers.0.mlp.fc1"


def parts(name: str, a: torch.Tensor = A, b: torch.Tensor = B) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}


WRONG: dict[str, tuple[dict[str, torch.Tensor], str, dict[str, Any], str]] = {
    "dots": (kohya("lora_unet_a_b"), "diffusers", {}, "'lora_unet_a_b', which is no layer of a model whose"),
    "ComfyUI's names of an unknown model": (parts("diffusion_model.a.b"), "diffusers", {}, "is no layer"),
    "two models": (parts("transformer.transformer_blocks.0.attn.to_q"), "kohya", {}, "is 'lora_unet_double"),
    "which CLIP": (parts(CLIP), "kohya", {"config": {"use_rslora": False}}, "'lora_te_text_model_"),
    "rslora of 8": (
        parts(f"base_model.model.{LLAMA}.q_proj", torch.ones(8, 8), torch.ones(8, 8)),
        "kohya",
        {"config": {"r": 8, "use_rslora": True}},
        "by 8 / √8, and no alpha",
    ),
    "alpha of no float32": (Q_OF_LLAMA, "comfy", {"config": {"lora_alpha": 0.1}}, "by 0.1 / 4, and no alpha"),
    "a whole module": (
        Q_OF_LLAMA | {"base_model.model.lm_head.weight": B},
        "kohya",
        {"config": {"modules_to_save": ["lm_head"]}},
        "has 'base_model.model.lm_head' with weight, which kohya's files have no name for",
    ),
    "an embedding": (
        {f"base_model.model.model.embed_tokens.lora_embedding_{x}": t for x, t in (("A", A), ("B", B))},
        "comfy",
        {"config": {"lora_bias": False}},
        "embedding_A, which ComfyUI's files",
    ),
    "LoHa": (
        {f"lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w{n}_{x}": A for n in (1, 2) for x in "ab"},
        "diffusers",
        {},
        "with hada_w1_a, which diffusers' files have no name for",
    ),
    "one factor": (
        {"lora_unet_a.lora_up.weight": B},
        "peft",
        {},
        "only one of the two factors of 'lora_unet_a'",
    ),
    "no pair": (parts("unet.a", A[:2]), "peft", {}, "that are no pair"),
    "an alpha alone": (
        kohya("lora_unet_a") | {"lora_unet_b.alpha": A[0, 0]},
        "peft",
        {},
        "'lora_unet_b.alpha'",
    ),
    "a rank that settings deny": (Q_OF_LLAMA, "kohya", {"config": {"r": 3}}, "of rank 4, and settings say 3"),
    "Conv1D": (Q_OF_LLAMA, "kohya", {"config": {"fan_in_fan_out": True}}, "transposed layers"),
    "PiSSA": (Q_OF_LLAMA, "kohya", {"config": {"init_lora_weights": "pissa"}}, "init_lora_weights=pissa"),
    "another kind": (Q_OF_LLAMA, "kohya", {"config": {"peft_type": "IA3"}}, "of type IA3"),
    "a kind that is merged": (Q_OF_LLAMA, "diffusers", {"config": {"peft_type": "LOHA"}}, "of type LOHA"),
    "a fused layer of other ranks": (
        parts("transformer.single_transformer_blocks.0.attn.to_q")
        | parts("transformer.single_transformer_blocks.0.attn.to_k", A[:2], B[:, :2]),
        "kohya",
        {},
        "of other ranks, alphas or kinds",
    ),
    "a difference in a fused layer": (
        {
            "lora_unet_double_blocks_0_img_attn_qkv.diff": torch.ones(24, 8),
            **kohya("lora_unet_double_blocks_0_img_attn_proj"),
        },
        "diffusers",
        {},
        "no factors that come apart",
    ),
    "a fused layer of other types": (
        parts("transformer.single_transformer_blocks.0.attn.to_q")
        | parts("transformer.single_transformer_blocks.0.attn.to_k", A.half(), B.half()),
        "kohya",
        {},
        "of other ranks, alphas or kinds",
    ),
    "a fused layer of other sizes": (
        parts("transformer.single_transformer_blocks.0.attn.to_q")
        | parts("transformer.single_transformer_blocks.0.proj_mlp"),
        "comfy",
        {},
        "of other ranks, alphas or kinds",
    ),
    "complex numbers": (parts("unet.a", A.to(torch.complex64), B.to(torch.complex64)), "peft", {}, "no pair"),
    "no adapter": ({"a.weight": A}, "kohya", {}, "no factor as a program known here names it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_dialect_can_t_hold_is_named(case: str, tmp_path: Path) -> None:
    held, to, said, expected = WRONG[case]
    error = refusal(tmp_path, held, to, **said)
    assert expected in error.message, error.message


@pytest.mark.parametrize(
    "text", ["[]", "{", "1", '{"r": "many"}', '{"r": 4, "lora_alpha": 1e999}', '{"r": null}']
)
def test_hostile_metadata_is_one_line(text: str, tmp_path: Path) -> None:
    save_file(
        parts("unet.mid_block.attentions.0.proj_in"),
        tmp_path / "a.safetensors",
        {"lora_adapter_metadata": text},
    )
    with pytest.raises(Damaged):
        converted(tmp_path / "a.safetensors", "kohya", tmp_path / "out", base="sd15")


# ---- Ambiguous names, by a base; fused layers that are not as usual; parts that only two dialects have


def test_a_base_model_gives_kohya_s_names_their_dots(tmp_path: Path) -> None:
    save_file(kohya("lora_unet_my_block_0_to_q"), tmp_path / "lora.safetensors")
    modules = ("my_block.0.to_q", "my.block_0.to_q")
    said: dict[str, Any] = {"component": "transformer"}
    for count, names in ((1, modules[:1]), (2, modules)):
        save_file({f"{name}.weight": torch.ones(8, 8) for name in names}, tmp_path / "base.safetensors")
        with ckpttool.open(tmp_path / "base.safetensors") as base:
            if count == 2:
                with pytest.raises(Refused, match=r"'my\.block_0\.to_q' or 'my_block\.0\.to_q'"):
                    converted(tmp_path / "lora.safetensors", "peft", tmp_path / "out", base=base, **said)
                continue
            there, _ = converted(tmp_path / "lora.safetensors", "peft", tmp_path / "out", base=base, **said)
            assert "my_block.0.to_q.lora_A.weight" in of_peft(there)[0]
            back, _ = converted(there, "kohya", tmp_path / "back", base=base, **said)
    assert_same_bits(tensors_of(back), tensors_of(tmp_path / "lora.safetensors"))


FUSED = "transformer.single_transformer_blocks.0."
SHARES = {"attn.to_q": 8, "attn.to_k": 8, "attn.to_v": 8, "proj_mlp": 32}
ZERO = torch.zeros(8, 4)


@pytest.mark.parametrize("kind", ["apart", "one A", "untrained", "untrained, one A", "only q and v"])
@pytest.mark.parametrize("is_dora", [False, True])
def test_layers_that_are_fused_come_apart_as_they_were(kind: str, is_dora: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    held: dict[str, torch.Tensor] = {}
    for name, rows in SHARES.items():
        if kind == "only q and v" and name not in ("attn.to_q", "attn.to_v"):
            continue
        a = A if "one A" in kind else torch.randn(4, 8)
        b = torch.zeros(rows, 4) if "untrained" in kind else torch.randn(rows, 4)
        held |= parts(FUSED + name, a, b)
        if is_dora:
            held[f"{FUSED}{name}.lora_magnitude_vector"] = torch.rand(rows)
    said = json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.use_dora": is_dora})
    save_file(
        {key: t.clone() for key, t in held.items()},
        tmp_path / "a.safetensors",
        {"lora_adapter_metadata": said},
    )
    if is_dora and kind == "only q and v":
        with pytest.raises(Refused, match="would not come apart"):
            converted(tmp_path / "a.safetensors", "kohya", tmp_path / "k")
        return
    there, _ = converted(tmp_path / "a.safetensors", "kohya", tmp_path / "k")
    fused = tensors_of(there)
    a, b = (fused[f"lora_unet_single_blocks_0_linear1.lora_{x}.weight"] for x in ("down", "up"))
    product = torch.cat(
        [
            held[f"{FUSED}{n}.lora_B.weight"] @ held[f"{FUSED}{n}.lora_A.weight"]
            if f"{FUSED}{n}.lora_A.weight" in held
            else torch.zeros(rows, 8)
            for n, rows in SHARES.items()
        ]
    )
    assert fused["lora_unet_single_blocks_0_linear1.alpha"] / len(a) == 2
    torch.testing.assert_close(b @ a, product)
    back, _ = converted(there, "diffusers", tmp_path / "d")
    assert_same_bits(tensors_of(back), held)


def test_kohya_and_comfy_share_what_others_have_no_name_for(tmp_path: Path) -> None:
    layer = "lora_te_text_model_encoder_layers_{}_mlp_fc1"
    held = kohya(layer.format(0), **{"lora_mid.weight": torch.ones(4, 4)})
    held |= {f"{layer.format(1)}.hada_w{n}_{x}": torch.randn(2, 8) for n in (1, 2) for x in "ab"}
    held |= {
        f"{layer.format(1)}.alpha": torch.tensor(1.0),
        f"{layer.format(2)}.lokr_w1": A,
        f"{layer.format(2)}.lokr_w2": B,
    }
    metadata = {"ss_training_comment": "mine", "sshs_model_hash": "of other bytes"}
    save_file({key: tensor.clone() for key, tensor in held.items()}, tmp_path / "k.safetensors", metadata)
    there, done = converted(tmp_path / "k.safetensors", "comfy", tmp_path / "c")
    assert done.left_out == ("metadata: sshs_model_hash",)
    back, _ = converted(there, "kohya", tmp_path / "b", base="sd15")
    assert_same_bits(tensors_of(back), held)
    with ckpttool.open(back) as opened:
        assert dict(opened.metadata) == {
            "format": "pt",
            "ss_base_model_version": "sd_v1",
            "ss_network_alpha": "2",
            "ss_network_dim": "4",
            "ss_network_module": "networks.lora",
            "ss_training_comment": "mine",
        }


# ---- The command, and inspect


def test_the_command_writes_and_says_what_is_left_out(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "base_model_name_or_path": "my/llama"}
    Named("peft", REAL["Llama of PEFT"].modules, config=said).save(tmp_path / "peft")
    ran = cli("adapter", "peft", "k.safetensors", "--to", "kohya")
    assert ran.code == 0 and ran.out.startswith("wrote 21 layers of peft as kohya -> k.safetensors")
    assert "left out" in ran.err and "lora_dropout" in ran.err
    found = cli("adapter", "peft", "k.safetensors", "--to", "kohya", "--force", "--json").json
    assert found["left_out"] == [f"setting: {name}" for name in said] and found["keys"] == 63
    assert cli("adapter", "peft", "k.safetensors", "--to", "kohya").code == 2, "it is there"
    assert cli("adapter", "peft", "new.safetensors", "--to", "comfy", "--dry-run").code == 0
    assert not Path("new.safetensors").exists()
    adapter = cli("inspect", "k.safetensors", "--json").json["adapter"]
    assert (adapter["dialect"], adapter["rank"], adapter["alpha"]) == ("kohya", 4, 2)
    targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {*adapter["targets"]} == targets
    of_peft = cli("inspect", "peft", "--json").json["adapter"]
    assert (of_peft["dialect"], of_peft["base"], {*of_peft["targets"]}) == ("peft", "my/llama", targets)
    assert "  adapter     peft, rank 4, alpha 2, for down_proj" in cli("inspect", "peft").out
    assert "adapter" not in cli("inspect", "peft/adapter_config.json", "--json").json
