"""Names of LoRA adapters: kohya's and diffusers', and regular expressions as PEFT uses them."""

from __future__ import annotations

import contextlib
import re
import time
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, NothingToDo, Refused, Unsupported
from ckpttool.lora.adapter import FirstMatch, TooMuchWork, UnknownPattern, fits
from tests.support.comparing import saved
from tests.support.quantised import save_adapter

# ---- LoRA adapters under kohya's and diffusers' names: a layer finds its place in the model, or is refused


Tensors = dict[str, torch.Tensor]

A, B = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12.0).reshape(6, 2)
PRODUCT = B @ A
WEIGHT = torch.ones(6, 4)


def merge(folder: Path, base: Tensors, held: Tensors, name: str = "lora.safetensors") -> Tensors:
    """Save both, merge the adapter and return what torch loads."""
    saved({key: tensor.clone() for key, tensor in base.items()}, folder / "base.pt")  # nothing is tied
    save_file({key: tensor.clone() for key, tensor in held.items()}, folder / name)
    adapter = ckpttool.open_adapter(folder / name if name == "lora.safetensors" else folder)
    with ckpttool.open(folder / "base.pt") as opened, adapter.checkpoint:
        new, _ = ckpttool.merge_lora(opened, adapter)
        ckpttool.save(new, folder / "out.pt", force=True)
    found: Tensors = torch.load(folder / "out.pt", weights_only=True)
    return found


def kohya(layer: str, a: torch.Tensor = A, b: torch.Tensor = B, alpha: float | None = None) -> Tensors:
    held = {f"{layer}.lora_down.weight": a, f"{layer}.lora_up.weight": b}
    return held if alpha is None else held | {f"{layer}.alpha": torch.tensor(alpha)}


def changed(base: Tensors, found: Tensors) -> set[str]:
    assert base.keys() == found.keys()
    return {name for name in base if not torch.equal(base[name], found[name])}


# An adapter's name of a layer, how it writes its factors, and the layer's name in the model.
FORMS = {
    "kohya": ("lora_unet_down_blocks_0_attn_1_to_q.lora_{}.weight", "down_blocks.0.attn_1.to_q"),
    "kohya, in a whole pipeline": (
        "lora_unet_input_blocks_4_proj_in.lora_{}.weight",
        "model.diffusion_model.input_blocks.4.proj_in",
    ),
    "kohya's text encoder": (
        "lora_te1_text_model_encoder_layers_3_self_attn_q_proj.lora_{}.weight",
        "text_model.encoder.layers.3.self_attn.q_proj",
    ),
    "diffusers": ("unet.mid_block.attn1.to_q.lora.{}.weight", "mid_block.attn1.to_q"),
    "diffusers, as PEFT": ("transformer.blocks.0.to_q.lora_{AB}.weight", "blocks.0.to_q"),
    "diffusers, in a whole pipeline": ("unet.mid_block.to_q.lora_{AB}.weight", "unet.mid_block.to_q"),
    "diffusers without a component": ("blocks.0.to_q.lora_{AB}.weight", "blocks.0.to_q"),
    "diffusers' old form": ("unet.mid.attn1.processor.to_q_lora.{}.weight", "mid.attn1.to_q"),
    "diffusers' old output": ("unet.mid.attn1.processor.to_out_lora.{}.weight", "mid.attn1.to_out.0"),
    "diffusers' old text encoder": (
        "text_encoder.layers.0.self_attn.to_out_lora.{}.weight",
        "layers.0.self_attn.out_proj",
    ),
    "diffusers' linear layers": ("text_encoder_2.l.0.fc1.lora_linear_layer.{}.weight", "l.0.fc1"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_found_by_the_model_s_own_names(form: str, tmp_path: Path) -> None:
    key, module = FORMS[form]
    down, up = (key.format(side, AB=letter) for side, letter in (("down", "A"), ("up", "B")))
    base = {f"{module}.weight": WEIGHT, "other.to_q.weight": WEIGHT, f"{module}.bias": torch.ones(6)}
    found = merge(tmp_path, base, {down: A, up: B})
    assert changed(base, found) == {f"{module}.weight"}
    torch.testing.assert_close(found[f"{module}.weight"], 1 + PRODUCT)


def test_alpha_scales_by_the_rank_of_each_layer(tmp_path: Path) -> None:
    base = {"a.weight": WEIGHT, "b.weight": WEIGHT, "c.a.weight": WEIGHT}
    held = (
        kohya("lora_unet_a", alpha=1.0)
        | kohya("lora_unet_b", A[:1], B[:, :1])
        | kohya("lora_unet_c_a", alpha=6.0)
    )
    found = merge(tmp_path, base, held)
    torch.testing.assert_close(found["a.weight"], 1 + PRODUCT / 2)
    torch.testing.assert_close(found["b.weight"], 1 + B[:, :1] @ A[:1])
    torch.testing.assert_close(found["c.a.weight"], 1 + 3 * PRODUCT)


def test_convolutions_have_factors_of_their_kernel_or_of_1_x_1(tmp_path: Path) -> None:
    down, up = torch.randn(2, 3, 3, 3), torch.randn(5, 2, 1, 1)
    base = {"conv.weight": torch.zeros(5, 3, 3, 3), "point.weight": torch.zeros(6, 4, 1, 1)}
    held = kohya("lora_unet_conv", down, up) | kohya(
        "lora_unet_point", A[..., None, None], B[..., None, None]
    )
    found = merge(tmp_path, base, held)
    torch.testing.assert_close(found["conv.weight"], torch.einsum("or,rihw->oihw", up[:, :, 0, 0], down))
    torch.testing.assert_close(found["point.weight"][..., 0, 0], PRODUCT)


def test_a_folder_of_diffusers_and_a_file_of_peft_s_are_adapters_too(tmp_path: Path) -> None:
    held = {"unet.a.to_q.lora.down.weight": A, "unet.a.to_q.lora.up.weight": B}
    found = merge(tmp_path, {"a.to_q.weight": WEIGHT}, held, "pytorch_lora_weights.safetensors")
    torch.testing.assert_close(found["a.to_q.weight"], 1 + PRODUCT)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    save_file(
        {f"base_model.model.fc.lora_{n}.weight": t for n, t in zip("AB", (A, B), strict=True)},
        tmp_path / "adapter_model.safetensors",
    )
    adapter = ckpttool.open_adapter(tmp_path / "adapter_model.safetensors")
    assert adapter.is_of_peft and adapter.config["lora_alpha"] == 4


def test_all_layers_of_a_component_are_at_one_place(tmp_path: Path) -> None:
    base = {f"{place}{name}.weight": WEIGHT for place in ("", "x.") for name in ("a.fc", "b.fc")}
    del base["a.fc.weight"]
    found = merge(tmp_path, base, kohya("lora_unet_a_fc") | kohya("lora_unet_b_fc"))
    assert changed(base, found) == {"x.a.fc.weight", "x.b.fc.weight"}
    base |= {"a.fc.weight": WEIGHT}
    found = merge(tmp_path, base, kohya("lora_unet_a_fc") | kohya("lora_unet_b_fc"))
    assert changed(base, found) == {"a.fc.weight", "b.fc.weight"}, "a whole name comes first"


def test_one_file_may_have_both_kinds_of_names(tmp_path: Path) -> None:
    base = {"a_b.fc.weight": WEIGHT, "c.fc.weight": WEIGHT, "d.weight": WEIGHT}
    held = kohya("lora_unet_a_b_fc") | {"unet.c.fc.lora_A.weight": A, "unet.c.fc.lora_B.weight": B}
    assert changed(base, merge(tmp_path, base, held)) == {"a_b.fc.weight", "c.fc.weight"}


TWO = {
    "underscores": (
        ["a_b.c", "a.b_c"],
        kohya("lora_unet_a_b_c"),
        "'lora_unet_a_b_c' may be 'a_b.c' or 'a.b_c'",
    ),
    "places": (["x.fc", "y.fc"], kohya("lora_te_fc"), "'lora_te_fc' may be 'x.fc' or 'y.fc'"),
    "old forms": (
        ["a.to_q", "a.q_proj"],
        {"unet.a.to_q_lora.down.weight": A, "unet.a.to_q_lora.up.weight": B},
        "'unet.a.to_q' may be 'a.to_q' or 'a.q_proj'",
    ),
    "two adapters": (["fc"], kohya("lora_te1_fc") | kohya("lora_te2_fc"), "are both for 'fc'"),
}


@pytest.mark.parametrize("case", TWO)
def test_what_fits_twice_is_refused_naming_both(case: str, tmp_path: Path) -> None:
    modules, held, said = TWO[case]
    with pytest.raises(Refused, match=re.escape(said)):
        merge(tmp_path, {f"{module}.weight": WEIGHT for module in modules}, held)
    assert not (tmp_path / "out.pt").exists()


FC = kohya("lora_unet_fc")
WRONG: dict[str, tuple[Tensors, type[CkptToolError], str]] = {
    "a part of LoHa": (
        {"lora_unet_fc.hada_w1_a": A},
        Damaged,
        "only one of the two factors of 'lora_unet_fc'",
    ),
    "a part of LoKr": ({"lora_unet_fc.lokr_w1": A}, Damaged, "only one of the two factors of 'lora_unet_fc'"),
    "norms of inputs": (
        FC | {"lora_unet_fc.dora_scale": torch.ones(1, 4)},
        Unsupported,
        "that are not of its outputs",
    ),
    "norms of another number": (
        FC | {"lora_unet_fc.dora_scale": torch.ones(4, 1)},
        Damaged,
        "4 magnitudes of 'fc', which needs 6",
    ),
    "a core of another rank": (
        FC | {"lora_unet_fc.lora_mid.weight": torch.ones(3, 3, 1, 1)},
        Damaged,
        "factors of 'fc'",
    ),
    "a difference beside factors": (
        FC | {"lora_unet_fc.diff": A},
        Unsupported,
        "'fc' together: lora_diff, lora_A, lora_B",
    ),
    "a bias": (FC | {"lora_unet_fc.bias": A}, Unsupported, "is no factor of a product, nor an alpha"),
    "a module called diff": (
        FC | {"unet.fc.diff.weight": A},
        Unsupported,
        "is no factor of a product, nor an alpha",
    ),
    "a whole model": ({"fc.weight": WEIGHT}, Unsupported, "of a whole model: ckpttool extract-lora BASE"),
    "an unknown part": (kohya("lora_vae_fc"), Unsupported, "'lora_vae_fc'"),
    "another layer": (FC | kohya("lora_unet_up"), Refused, "'lora_unet_up' is no layer of the model"),
    "one factor": (
        {"lora_unet_fc.lora_up.weight": B},
        Damaged,
        "only one of the two factors of 'lora_unet_fc'",
    ),
    "an alpha alone": (FC | {"lora_unet_up.alpha": torch.ones(())}, Damaged, "'lora_unet_up.alpha', and no"),
    "rank 0": (
        {"lora_unet_fc.lora_down.weight": A[:0], "lora_unet_fc.lora_up.weight": B[:, :0]},
        Damaged,
        "'lora_unet_fc' has factors of rank 0",
    ),
    "alpha 0": (kohya("lora_unet_fc", alpha=0.0), Damaged, "no finite positive number"),
    "alpha of no number": (kohya("lora_unet_fc", alpha=float("nan")), Damaged, "no finite positive"),
    "alphas": (FC | {"lora_unet_fc.alpha": torch.ones(2)}, Damaged, "no finite positive number"),
    "other ranks": (kohya("lora_unet_fc", A[:1], B), Damaged, "says rank 1|rank 1"),
    "another size": (kohya("lora_unet_fc", A[:, :3], B), Refused, r"\[6, 3\] is to be added to \[6, 4\]"),
    "a factor twice": (FC | {"lora_unet_fc.lora_A.weight": A}, Refused, "under two names"),
    "no dimension": (kohya("lora_unet_fc", torch.ones(()), B), Damaged, "factors of 'fc'"),
    "nothing": ({}, NothingToDo, "holds no tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_plain_lora_is_refused_by_name(case: str, tmp_path: Path) -> None:
    held, error, said = WRONG[case]
    with pytest.raises(error, match=said) as fault:
        merge(tmp_path, {"fc.weight": WEIGHT}, held)
    assert fault.value.hint or error is not Unsupported, "the usual hint lists formats"
    assert not (tmp_path / "out.pt").exists()


def test_the_part_of_a_component_that_is_not_there_can_be_left_out(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved({"fc.weight": WEIGHT}, tmp_path / "base.pt")
    held = FC | kohya("lora_te_up", A.clone(), B.clone())
    save_file(held, "lora.safetensors")
    ran = cli(*["merge-lora", "base.pt", "lora.safetensors", "out.pt"])
    assert ran.code == 3 and "'lora_te_up' is no layer of the model" in ran.err
    command = ran.err[ran.err.index("ckpttool ") :].split()[1:]
    assert cli(*(word.strip("'") for word in command)).code == 0
    ran = cli(*["merge-lora", "base.pt", "PART.safetensors", "out.pt"])
    assert ran.code == 0 and ran.out.startswith("added 1 update of PART.safetensors -> out.pt")


def test_diffusers_own_file_gives_what_diffusers_fuses(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    )
    unet.save_pretrained(tmp_path / "unet")
    targets = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1"]
    unet.add_adapter(peft.LoraConfig(r=3, lora_alpha=3, target_modules=targets))
    for name, parameter in unet.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    layers = diffusers.utils.convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(unet))
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path / "lora", unet_lora_layers=layers)
    unet.fuse_lora()
    unet.unload_lora()
    adapter = ckpttool.open_adapter(tmp_path / "lora")
    with ckpttool.open(tmp_path / "unet" / "diffusion_pytorch_model.safetensors") as base:
        new, report = ckpttool.merge_lora(base, adapter)
        ckpttool.save(new, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert len(report.updated) > 10
    for name, tensor in unet.state_dict().items():
        torch.testing.assert_close(found[name], tensor)


# ---- Regular expressions of layer names: Python's `re` is the oracle, as PEFT uses it -----------------


PATTERNS = [
    *("q", "q_proj", "0.q", r"0\.q", "^q", "^l.0.q", "q$", ".*q", ".+q", r"l\.\d+\.q", r"l\.[0-9]\.q"),
    *("l.[01].(q|k)", "q|k", "(q|k)|l", "(?:l.0|l.1).q", "l.*.q_?", r"l\.(0|1\d)\..*", "", "()", "l?"),
    *("[^.]+.k", "(l|l.0).q", r"\w+", "a*b", "^", "$", "q^", "ll*", "l.(.*|q).k"),
]  # fmt: skip

NAMES = [
    *("", ".", "q", "k", "qq", "q_proj", "l", "l.0.q", "l.1.k", "l.10.q", "x.l.0.q", "l.0.q.k", "lll"),
    "l.0.q_",
]  # fmt: skip


def python_fits(pattern: str, name: str) -> bool:
    return bool(re.match(rf"(.*\.)?({pattern})\Z", name))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_fits_the_names_that_peft_finds(pattern: str) -> None:
    for name in NAMES:
        assert fits(pattern, name) == python_fits(pattern, name), name


def test_pieces_in_any_order_fit_as_in_python() -> None:
    pieces = ["a", ".", r"\.", ".*", "a+", "|", "(a", "(?:", ")", "ab?", "$"]
    for pattern, name in product(map("".join, product(pieces, repeat=3)), ("a", "a.b", "ab.a", "aa")):
        with contextlib.suppress(UnknownPattern, re.error):
            assert fits(pattern, name) == python_fits(pattern, name), (pattern, name)


@pytest.mark.parametrize("pattern", [".*" * 30 + "b", "(a|a)" * 40 + "c", "a?" * 40 + "a" * 41])
def test_a_pattern_takes_no_exponential_time(pattern: str) -> None:
    assert not fits(pattern, "a" * 40)


@pytest.mark.parametrize(
    "pattern", ["((.+)+)+!", "(a)*", "(?=a)", "a{2}", "a*?", "a*+", r"\bq", r"(a)\1", "a" * 1001]
)
def test_other_pieces_are_refused(pattern: str) -> None:
    with pytest.raises(UnknownPattern):
        fits(pattern, "a")


@pytest.mark.parametrize("pattern", ["a)(", "(", "[b-a]", "*"])
def test_what_is_no_pattern_is_told_apart(pattern: str) -> None:
    with pytest.raises(re.error):
        fits(pattern, "a")


def test_the_first_of_many_patterns_is_the_one_that_peft_takes() -> None:
    names = [*NAMES, "l_0_q", "l.q.0_q"]
    for patterns in permutations([*PATTERNS[:3], *PATTERNS[7:9], "l.0.q", "q.", "l.....q"], 3):
        first = FirstMatch(patterns)
        for name in names:
            wanted = next((pattern for pattern in patterns if python_fits(pattern, name)), None)
            assert first.of(name) == wanted, (patterns, name)


def test_a_pattern_for_each_of_thousands_of_layers_takes_no_time() -> None:
    """Mixtures of experts: 32 layers of 64 experts, each with its rank."""
    places = product(range(32), range(64), "gud")
    names = [f"model.layers.{i}.mlp.experts.{j}.{p}_proj" for i, j, p in places]
    first = FirstMatch(names)
    begun = time.process_time()
    assert [first.of(f"x.{name}") for name in names] == names
    assert time.process_time() - begun < 3


def test_patterns_that_would_take_minutes_are_refused() -> None:
    first = FirstMatch([r"\w*" * 60 + f"x{number}" for number in range(1000)])
    begun = time.process_time()
    with pytest.raises(TooMuchWork):
        [first.of("y" * 200) for _ in range(1000)]
    assert time.process_time() - begun < 20


# ---- Layers whose names have words of other kinds of adapters in them


ODD = (
    "diffusion_head",
    "diff",
    "oft_x",
    "hada_x",
    "lokr_w",
    "boft",
    "dora_scale_net",
    "lora_mid_block",
    "w_norm",
)
ODD += ("lora_magnitude_vector_net", "on_input_layer", "lora_A_proj", "alpha_net")


@pytest.mark.parametrize("word", ODD)
@pytest.mark.parametrize(
    "form", ["{}.lora_A.weight {}.lora_B.weight", "{}.lora.down.weight {}.lora.up.weight"]
)
def test_a_layer_s_name_may_have_words_of_other_kinds(tmp_path: Path, word: str, form: str) -> None:
    for layer in (word, f"blocks.0.{word}", f"{word}.fc", f"blocks.{word}.0.fc"):
        names = [each.format(f"transformer.{layer}") for each in form.split()]
        held = dict(zip(names, (A, B), strict=True)) | {f"transformer.{layer}.alpha": torch.tensor(2.0)}
        found = merge(tmp_path, {f"{layer}.weight": WEIGHT}, held)
        assert torch.allclose(found[f"{layer}.weight"], WEIGHT + PRODUCT)


@pytest.mark.parametrize("word", ODD)
def test_a_module_that_is_saved_whole_may_have_them_too(tmp_path: Path, word: str) -> None:
    names = f"blocks.0.{word}", f"{word}.lora_head", f"lora_embedding_net.{word}"
    base = {f"{name}.weight": WEIGHT for name in names} | {"fc.weight": WEIGHT, "fc.bias": torch.ones(6)}
    whole = {f"{name}.weight": WEIGHT * 2 for name in names} | {"fc.base_layer.bias": torch.zeros(6)}
    factors = {"fc.lora_A.weight": A, "fc.lora_B.weight": B}
    saved({key: tensor.clone() for key, tensor in base.items()}, tmp_path / "base.pt")
    save_adapter(tmp_path, {name: each.clone() for name, each in (whole | factors).items()}, lora_alpha=2)
    adapter = ckpttool.open_adapter(tmp_path / "adapter")
    with ckpttool.open(tmp_path / "base.pt") as opened, adapter.checkpoint:
        new, report = ckpttool.merge_lora(opened, adapter)
        ckpttool.save(new, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(found[f"{name}.weight"], WEIGHT * 2) for name in names)
    assert torch.equal(found["fc.bias"], torch.zeros(6))
    assert {*report.replaced} == {*(f"{name}.weight" for name in names), "fc.bias"}


@pytest.mark.parametrize("layer", ["fc", "processor.fc", "processor"])
def test_a_processor_in_the_model_s_own_names_is_found(tmp_path: Path, layer: str) -> None:
    held = {f"unet.blocks.{layer}.lora.down.weight": A, f"unet.blocks.{layer}.lora.up.weight": B}
    found = merge(tmp_path, {f"blocks.{layer}.weight": WEIGHT}, held)
    assert torch.allclose(found[f"blocks.{layer}.weight"], WEIGHT + PRODUCT)


OTHERS = {
    "lokr_t1": "LoKr with a core for its first factor",
    "oft_blocks": "OFT",
    "oft_R.weight": "OFT",
    "boft_R": "BOFT",
    "on_input": "IA3",
    "lora_A.bias": "a bias of a factor",
}


@pytest.mark.parametrize("end", OTHERS)
def test_other_kinds_are_still_named(tmp_path: Path, end: str) -> None:
    held = {"transformer.fc.lora_A.weight": A, "transformer.fc.lora_B.weight": B, f"transformer.fc.{end}": A}
    with pytest.raises(Unsupported, match=f"'transformer.fc.{end}', which is {OTHERS[end]}"):
        merge(tmp_path, {"fc.weight": WEIGHT}, held)


# ---- Adapters of programs that are not read here: named, with a way that works


FOREIGN = {
    "torchtune": ("layers.0.attn.q_proj.lora_a.weight", "layers.0.attn.q_proj.lora_b.weight"),
    "torchtune's DoRA": ("layers.0.attn.q_proj.lora_a.weight", "layers.0.attn.q_proj.magnitude"),
    "MLX": ("model.layers.0.self_attn.q_proj.lora_a", "model.layers.0.self_attn.q_proj.lora_b"),
    "litgpt": ("transformer.h.0.attn.qkv.lora_A", "transformer.h.0.attn.qkv.lora_B"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_adapter_is_taken_for_a_whole_model(kind: str, tmp_path: Path) -> None:
    held = {name: torch.ones(2, 2) for name in FOREIGN[kind]}
    with pytest.raises(
        Unsupported, match=f"'{FOREIGN[kind][0]}', which is a factor as .* names it"
    ) as caught:
        merge(tmp_path, {"fc.weight": WEIGHT}, held)
    assert "extract-lora" not in str(caught.value.hint)
    assert "ckpttool adapter" in str(caught.value.hint)


def test_the_way_for_a_whole_model_works(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unsupported) as caught:
        merge(tmp_path, {"fc.weight": WEIGHT}, {"fc.weight": WEIGHT + PRODUCT})
    words = str(caught.value.hint).split(": ")[1].replace("BASE", "base.pt").split()
    assert words[:2] == ["ckpttool", "extract-lora"]
    assert cli(*words[1:]).code == 0
