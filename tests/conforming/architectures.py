"""Public architectures in tiny configurations, each in the names of two libraries, which are imported late.

The truth of a pair is either the library's own conversion, or that both models give the same outputs once the
weights are brought over.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.support.dialects import State, meta, value


@dataclass
class Made:
    """The same model in two dialects.

    Attributes:
        left, right: the states; where `right` is another model's, its values are not the truth.
        is_right: whether a state under the names of `right` holds the model of `left`; `is_left` the reverse.
        same: `right` holds the values of `left`.
    """

    left: State
    right: State
    is_right: Callable[[State], bool]
    is_left: Callable[[State], bool]
    same: bool = True


@dataclass
class Pair:
    """Two dialects."""

    left: str
    right: str
    truth: str
    make: Callable[[], Made]


def equal(wanted: State) -> Callable[[State], bool]:
    """Return whether a state has all of these tensors, bit for bit, and no others."""
    return lambda found: (
        found.keys() == wanted.keys()
        and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    )


def converted(left: State, right: State) -> Made:
    """Return a pair whose truth is a library's conversion."""
    return Made(left, right, equal(right), equal(left))


def scrambled(model: nn.Module) -> nn.Module:
    """Give a model values everywhere that follow from the names, so that no two of its tensors are equal."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(value(name, tuple(tensor.shape)))
    return model.eval()


def compared(left: nn.Module, right: nn.Module, *inputs: Any, pick: Callable[[Any], torch.Tensor]) -> Made:
    """Return a pair whose truth is that both models give the same outputs for the same inputs."""
    for model in (left, right):
        scrambled(model).double()
        for module in model.modules():
            for name in ("eps", "variance_epsilon"):  # settings, which no checkpoint holds
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 1e-6)

    def outputs(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return pick(model(*(x.double() if x.is_floating_point() else x for x in inputs)))

    def check(model: nn.Module, wanted: torch.Tensor) -> Callable[[State], bool]:
        def holds(state: State) -> bool:
            model.load_state_dict(state)
            found = outputs(model)
            return bool(wanted.std() > 0) and torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)

        return holds

    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in (left, right)]
    of_left, of_right = outputs(left), outputs(right)
    return Made(before[0], before[1], check(right, of_left), check(left, of_right), same=False)


def first(out: Any) -> torch.Tensor:
    """Return the logits, or the first output."""
    if isinstance(out, torch.Tensor):
        return out
    found = getattr(out, "logits", None)
    return found if found is not None else out[0]


def hugging_face(
    kind: str, task: str = "AutoModelForCausalLM", *, tiny: bool = True, **settings: Any
) -> nn.Module:
    """Return a model of transformers, a tiny one."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(kind)
    for name, setting in {**(TINY if tiny else {}), **settings}.items():
        if hasattr(config, name) or name in settings:
            setattr(config, name, setting)
    with suppress(AttributeError, TypeError):  # some configurations compute it
        config.layer_types = config.layer_types[:2]
    return scrambled(getattr(transformers, task).from_config(config))


TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 1,
}


def plain(state: Any) -> State:
    """Return a state dict whose tensors share no memory, but for those that are tied."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def saved(kind: str) -> Made:
    """Return what a model of transformers 5 has, and what it writes, which is the names of version 4."""
    from safetensors.torch import load_file

    model = hugging_face(kind)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = load_file(Path(folder) / "model.safetensors")
    return converted(plain(model.state_dict()), written)


MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "deepseek_v2", "olmoe", "glm4_moe", "phimoe")
MIXTURES += ("jamba", "ernie4_5_moe", "dots1", "hunyuan_v1_moe", "granitemoe", "qwen3_next", "minimax_m2")


def mixtures() -> Iterator[Pair]:
    """Yield mixtures of experts in the names of transformers 4 and 5."""
    for kind in MIXTURES:
        truth = "transformers' conversion (save_pretrained)"
        yield Pair(f"{kind}, transformers 5", "transformers 4", truth, lambda kind=kind: saved(kind))


# ---- torchtitan, Meta, nanoGPT -------------------------------------------------------------------------


def titan(kind: str, module: str, adapter: str, *, experts: bool = False) -> Made:
    """Return a model of transformers and what torchtitan's adapter makes of it."""
    import importlib

    made = importlib.import_module(f"torchtitan.models.{module}.state_dict_adapter")
    attention = SimpleNamespace(n_heads=4, n_kv_heads=2, head_dim=8, q_lora_rank=12)
    layer = SimpleNamespace(attention=attention, moe=SimpleNamespace(num_experts=4))
    config = SimpleNamespace(layers=[layer] * 2, dim=32, enable_weight_tying=False, mtp_layers=[])
    convert = getattr(made, adapter)(config, None)
    convert._validate_hf_rope_config = lambda *_: None
    written = saved(kind).right if experts else plain(hugging_face(kind).state_dict())
    written = {name: value(name, tuple(tensor.shape)) for name, tensor in written.items()}
    return converted(written, plain(convert.from_hf({**written})))


def of_meta() -> Made:
    """Return a Llama in transformers' names and in Meta's."""
    state = plain(hugging_face("llama").state_dict())
    return converted(state, meta(state))


def nano() -> Made:
    """Return GPT-2 as transformers has it and as nanoGPT does: all but embeddings and norms transposed."""
    state = plain(hugging_face("gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=16).state_dict())
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    return converted(state, {k: v.t().contiguous() if k.endswith(turned) else v for k, v in state.items()})


def fused() -> Made:
    """Return a Llama, and the Phi-3 that has its layers fused."""
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-6}
    left, right = hugging_face("llama", **settings), hugging_face("phi3", **settings)
    return compared(left, right, torch.arange(7)[None], pick=first)


def whisper() -> Made:
    """Return Whisper in transformers' names and in OpenAI's."""
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    model = hugging_face("whisper", "AutoModel", **sizes, max_source_positions=20, max_target_positions=10)
    rules = [(r"\.layers\.", ".blocks."), (r"\.fc1\.", ".mlp.0."), (r"\.fc2\.", ".mlp.2.")]
    rules += [(r"(?<=\d)\.final_layer_norm", ".mlp_ln"), (r"self_attn_layer_norm", "attn_ln")]
    rules += [
        ("encoder_attn_layer_norm", "cross_attn_ln"),
        ("encoder_attn", "cross_attn"),
        ("self_attn", "attn"),
    ]
    rules += [("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out")]
    rules += [("^decoder.layer_norm", "decoder.ln"), ("^encoder.layer_norm", "encoder.ln_post")]
    rules += [("embed_tokens", "token_embedding"), (r"embed_positions\.weight", "positional_embedding")]
    state = plain(model.state_dict())
    other: State = {}
    for name, tensor in state.items():
        for old, new in rules:
            name = re.sub(old, new, name)
        other[name] = tensor
    return converted(state, other)


def clip() -> Made:
    """Return CLIP in open_clip and in transformers."""
    import open_clip
    from transformers import CLIPConfig, CLIPModel

    vision = {"layers": 2, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32}
    text = {"context_length": 12, "vocab_size": 50, "width": 48, "heads": 4, "layers": 2}
    parts = open_clip.model.CLIPVisionCfg(**vision), open_clip.model.CLIPTextCfg(**text)
    left = open_clip.model.CLIP(40, *parts)
    config = CLIPConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "hidden_act": "gelu",
        },
        text_config={
            "hidden_size": 48,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 50,
            "max_position_embeddings": 12,
            "hidden_act": "gelu",
            "eos_token_id": 49,
        },
        projection_dim=40,
    )
    right = CLIPModel(config)

    def features(out: Any) -> torch.Tensor:
        pair = (out.image_embeds, out.text_embeds) if hasattr(out, "image_embeds") else (out[0], out[1])
        return torch.cat([nn.functional.normalize(each.float(), dim=-1) for each in pair])

    torch.manual_seed(0)
    image = torch.rand(1, 3, 32, 32)
    words = torch.cat([torch.randint(0, 48, (1, 11)), torch.tensor([[49]])], 1)
    right.forward = lambda i, w, run=right.forward: run(input_ids=w, pixel_values=i)  # type: ignore[method-assign]
    return compared(left, right, image, words, pick=features)


class Encoder(nn.Module):
    """torch.nn's encoder, called as BERT's is."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 40, 0, "gelu", 1e-12, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def encoders() -> Made:
    """Return BERT's layers in transformers and as torch.nn.TransformerEncoder."""
    left = hugging_face("bert", "AutoModel").encoder  # type: ignore[assignment]
    return compared(left, Encoder(), torch.randn(2, 5, 32), pick=first)


# ---- images --------------------------------------------------------------------------------------------

VISION = {
    "mobilenet_v2": "mobilenetv2_100",
    "mobilenet_v3_small": "mobilenetv3_small_100",
    "mobilenet_v3_large": "mobilenetv3_large_100",
    "efficientnet_b0": "efficientnet_b0",
    "efficientnet_v2_s": "efficientnetv2_s",
    "convnext_tiny": "convnext_tiny",
    "regnet_y_400mf": "regnety_004",
    "mnasnet1_0": "mnasnet_100",
    "swin_t": "swin_tiny_patch4_window7_224",
    "swin_v2_t": "swinv2_tiny_window8_256",
    "vit_b_16": "vit_base_patch16_224",
}


def pictures(side: int = 64) -> torch.Tensor:
    """Return one picture of noise."""
    torch.manual_seed(3)
    return torch.randn(1, 3, side, side)


def torchvision_timm(theirs: str, ours: str) -> Made:
    """Return a model of torchvision and timm's of the same architecture."""
    import timm
    import torchvision

    settings = {"inception_v3": {"aux_logits": True, "init_weights": False}}.get(theirs, {})
    left = getattr(torchvision.models, theirs)(weights=None, **settings)
    more = {"aux_logits": True} if theirs == "inception_v3" else {}
    right = timm.create_model(ours, num_classes=1000, **more)
    side = {"swin_t": 224, "swin_v2_t": 256, "vit_b_16": 224, "inception_v3": 299}.get(theirs, 64)
    return compared(left, right, pictures(side), pick=first)


def small_vit(**more: Any) -> nn.Module:
    """Return a tiny ViT of timm."""
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 7}
    return timm.models.vision_transformer.VisionTransformer(**{**sizes, **more})


def vit_torchvision() -> Made:
    """Return a tiny ViT in timm and torchvision."""
    from torchvision.models.vision_transformer import VisionTransformer

    right = VisionTransformer(32, 8, 3, 4, 32, 128, num_classes=7)
    return compared(small_vit(), right, pictures(32), pick=first)


VIT = {"image_size": 32, "patch_size": 8, "num_hidden_layers": 3, "intermediate_size": 128, "num_labels": 7}


def vit_hugging_face() -> Made:
    """Return a tiny ViT in timm and in transformers."""
    right = hugging_face("vit", "AutoModelForImageClassification", **VIT, layer_norm_eps=1e-6)
    return compared(small_vit(), right, pictures(32), pick=first)


def dino() -> Made:
    """Return a tiny DINOv2 in timm and in transformers."""
    settings = {**VIT, "layer_norm_eps": 1e-6, "mlp_ratio": 4}
    del settings["num_labels"], settings["intermediate_size"]
    right = hugging_face("dinov2", "AutoModel", **settings)
    left = small_vit(num_classes=0, init_values=1.0, global_pool="token")
    return compared(left, right, pictures(32), pick=lambda out: getattr(out, "pooler_output", out))


def image_pair(kind: str, name: str, settings: dict[str, Any], **more: Any) -> Made:
    """Return a model of transformers for images, and timm's of the same architecture."""
    import timm

    left = hugging_face(kind, "AutoModelForImageClassification", tiny=False, num_labels=7, **settings)
    right = timm.create_model(name, num_classes=7, **more)
    return compared(left, right, pictures(settings.get("image_size", 64)), pick=first)


IMAGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("resnet", "resnet50", {}),
    ("convnext", "convnext_tiny", {"hidden_act": "gelu"}),
    ("convnextv2", "convnextv2_atto", {"hidden_sizes": [40, 80, 160, 320], "depths": [2, 2, 6, 2]}),
    ("regnet", "regnety_040", {}),
    ("swin", "swin_tiny_patch4_window7_224", {"image_size": 224}),
    ("mobilenet_v2", "mobilenetv2_100", {}),
    ("mobilevit", "mobilevit_s", {"image_size": 256}),
    ("poolformer", "poolformer_s12", {"image_size": 224}),
)


# ---- wrappers ------------------------------------------------------------------------------------------


def prefixed(prefix: str, *, inside: str = "") -> Made:
    """Return a ResNet and the same with a wrapper's prefix."""
    import torchvision

    state = plain(scrambled(torchvision.models.resnet18(num_classes=5)).state_dict())
    return converted({prefix + re.sub(r"^(layer\d)", rf"\1{inside}", k): v for k, v in state.items()}, state)


def base_of_bert() -> Made:
    """Return a BERT with its head, and the same below a prefix of another wrapper."""
    state = plain(hugging_face("bert", "AutoModelForMaskedLM").state_dict())
    return converted(state, {f"model.{name}": tensor for name, tensor in state.items()})


def gammas() -> Made:
    """Return BERT with TensorFlow's names for the parameters of norms."""
    state = plain(hugging_face("bert", "AutoModel").state_dict())
    old = {
        re.sub(r"(?<=LayerNorm\.)weight", "gamma", re.sub(r"(?<=LayerNorm\.)bias", "beta", k)): v
        for k, v in state.items()
    }
    return converted(old, state)


def pairs() -> Iterator[Pair]:
    """Yield all pairs."""
    outputs = "equal outputs (float64)"
    for theirs, ours in VISION.items():
        make = lambda theirs=theirs, ours=ours: torchvision_timm(theirs, ours)  # noqa: E731
        yield Pair(f"{theirs}, torchvision", f"{ours}, timm", outputs, make)
    yield Pair("ViT, timm", "torchvision", outputs, vit_torchvision)
    yield Pair("ViT, timm", "transformers", outputs, vit_hugging_face)
    yield Pair("DINOv2, timm", "transformers", outputs, dino)
    for kind, name, settings in IMAGES:
        make = lambda kind=kind, name=name, settings=settings: image_pair(kind, name, settings)  # noqa: E731
        yield Pair(f"{kind}, transformers", f"{name}, timm", outputs, make)
    yield Pair("CLIP, open_clip", "transformers", outputs, clip)
    yield Pair("BERT's encoder, transformers", "torch.nn.TransformerEncoder", outputs, encoders)
    yield Pair("Llama, transformers", "Phi-3, transformers", outputs, fused)
    yield from mixtures()
    adapter = "torchtitan's StateDictAdapter"
    yield Pair(
        "Llama 3, transformers",
        "torchtitan",
        adapter,
        lambda: titan("llama", "llama3", "Llama3StateDictAdapter"),
    )
    yield Pair(
        "Qwen 3, transformers",
        "torchtitan",
        adapter,
        lambda: titan("qwen3", "qwen3", "Qwen3StateDictAdapter"),
    )
    yield Pair(
        "Qwen 3 MoE, transformers 4",
        "torchtitan",
        adapter,
        lambda: titan("qwen3_moe", "qwen3", "Qwen3StateDictAdapter", experts=True),
    )
    yield Pair(
        "DeepSeek V3, transformers 4",
        "torchtitan",
        adapter,
        lambda: titan("deepseek_v3", "deepseek_v3", "DeepSeekV3StateDictAdapter", experts=True),
    )
    yield Pair("Llama, transformers", "Meta", "Meta's permutation of heads", of_meta)
    yield Pair("GPT-2, transformers", "nanoGPT", "nanoGPT's list of transposed layers", nano)
    yield Pair("Whisper, transformers", "OpenAI", "transformers' table of names", whisper)
    yield Pair("BERT with its head", "below 'model.'", "the same values", base_of_bert)
    yield Pair("BERT, gamma and beta", "weight and bias", "the same values", gammas)
    yield Pair("ResNet-18 of DDP", "plain", "the same values", lambda: prefixed("module."))
    yield Pair("ResNet-18 of torch.compile", "plain", "the same values", lambda: prefixed("_orig_mod."))
    yield Pair("ResNet-18 of Lightning", "plain", "the same values", lambda: prefixed("model.net."))
    inside = "._checkpoint_wrapped_module"
    yield Pair("ResNet-18, layers wrapped", "plain", "the same values", lambda: prefixed("", inside=inside))
