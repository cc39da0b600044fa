"""LoRA adapters extracted from two models: the best factors, an honest error, and nothing lost in silence."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, NothingToDo, OutputExists, Refused, UsageFault
from ckpttool.lora.differences import Extracted
from tests.support.comparing import saved
from tests.support.running import MOST, peak

Tensors = dict[str, torch.Tensor]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def extracted(folder: Path, base: Tensors, tuned: Tensors, rank: int = 2, **given: Any) -> Extracted:
    """Save both models and the adapter between them."""
    for name, state in {"base": base, "tuned": tuned}.items():
        saved(state, folder / f"{name}.pt")
    with ckpttool.open(folder / "base.pt") as one, ckpttool.open(folder / "tuned.pt") as other:
        adapter, report = ckpttool.extract_lora(one, other, rank, **given)
        ckpttool.save_adapter(adapter, report.config, folder / "adapter", force=True, verify=True)
    return report


def merged(folder: Path) -> Tensors:
    """Merge the adapter back into the base, and return what torch loads."""
    adapter = ckpttool.open_adapter(folder / "adapter")
    with ckpttool.open(folder / "base.pt") as base, adapter.checkpoint:
        ckpttool.save(ckpttool.merge_lora(base, adapter)[0], folder / "out.pt", force=True)
    found: Tensors = torch.load(folder / "out.pt", weights_only=True)
    return found


def factors(folder: Path) -> Tensors:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def net(dtype: torch.dtype = torch.float32) -> tuple[Tensors, Tensors]:
    """Return a base with layers of each kind, and what was trained from it."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "up.weight": (10, 6),
        "down.weight": (6, 10),
        "conv.weight": (8, 3, 3, 3),
        "same.weight": (6, 6),
    }
    shapes |= {"line.weight": (5, 4, 3), "up.bias": (10,), "norm.weight": (6,)}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    kept = ("same.weight", "up.bias", "norm.weight")
    steps = {
        name: torch.randn(shape, generator=generator) / 8
        for name, shape in shapes.items()
        if name not in kept
    }
    tuned = {name: tensor + steps.get(name, 0) for name, tensor in base.items()}
    return tuple({name: each.to(dtype) for name, each in state.items()} for state in (base, tuned))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_merging_gives_the_tuned_model_within_the_error_that_is_said(
    rank: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    base, tuned = net(dtype)
    report = extracted(tmp_path, base, tuned, rank)
    found = merged(tmp_path)
    assert found.keys() == tuned.keys()
    assert {layer.name for layer in report.layers} == {"up", "down", "conv", "line"}
    assert {*report.same} == {"same.weight", "up.bias", "norm.weight"}
    for layer in report.layers:
        wanted, got = tuned[f"{layer.name}.weight"].double(), found[f"{layer.name}.weight"].double()
        rounding = wanted.abs().max() * torch.finfo(dtype).eps
        assert (got - wanted).abs().max() <= layer.max_abs + rounding
    for name in report.same:
        assert torch.equal(found[name], base[name])


@pytest.mark.parametrize("whole", [True, False])
def test_factors_are_the_best_of_their_rank(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory at once, and passed over in blocks of rows that are read again and again."""
    if not whole:
        for name, value in {"WHOLE": 0, "HELD": 0, "ROWS": 7000}.items():
            monkeypatch.setattr(import_module("ckpttool.lora.differences"), name, value)
    generator = torch.Generator().manual_seed(1)
    base = {f"{n}.weight": torch.randn(100, 150, generator=generator) for n in "abc"}
    sizes = 0.9 ** torch.arange(100)
    turns = [torch.linalg.qr(torch.randn(n, n, generator=generator))[0] for n in (100, 150)]
    steps = {
        "a.weight": turns[0] @ torch.diag(sizes) @ turns[1][:100],
        "b.weight": torch.randn(100, 150, generator=generator),
        "c.weight": torch.randn(100, 3, generator=generator) @ torch.randn(3, 150, generator=generator),
    }
    tuned = {name: tensor + steps[name] for name, tensor in base.items()}
    report = extracted(tmp_path, base, tuned, 5)
    for layer in report.layers:
        difference = tuned[f"{layer.name}.weight"].double() - base[f"{layer.name}.weight"].double()
        left, values, right = np.linalg.svd(difference.numpy())
        least = np.sqrt((values[5:] ** 2).sum() / (values**2).sum())
        assert layer.error == pytest.approx(least, rel=1e-4, abs=1e-6), layer.name
        rest = difference.numpy() - left[:, :5] * values[:5] @ right[:5]
        assert layer.max_abs == pytest.approx(np.abs(rest).max(), rel=0.2, abs=1e-5)
        found = factors(tmp_path)
        a, b = (found[f"base_model.model.{layer.name}.lora_{letter}.weight"].double() for letter in "AB")
        missed = torch.linalg.norm(difference - b @ a) / torch.linalg.norm(difference)
        assert layer.error == pytest.approx(float(missed), rel=1e-6)
    assert report.worst.name == "b"


def test_what_was_a_lora_is_found_again(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    base = {"fc.weight": torch.randn(40, 30, generator=generator, dtype=torch.float64)}
    product = (
        torch.randn(40, 4, generator=generator).double() @ torch.randn(4, 30, generator=generator).double()
    )
    report = extracted(tmp_path, base, {"fc.weight": base["fc.weight"] + product}, 4)
    assert report.worst.error < 1e-6


def test_a_conv1d_is_turned_as_peft_has_it(tmp_path: Path) -> None:
    """GPT-2 keeps its weights transposed, which only the biases tell, and of a square one those beside it."""
    base = {"h.attn.c_attn.weight": torch.randn(6, 18), "h.attn.c_attn.bias": torch.zeros(18)}
    base |= {"h.attn.c_proj.weight": torch.randn(6, 6), "h.attn.c_proj.bias": torch.zeros(6)}
    tuned = {name: tensor + torch.randn_like(tensor) * (tensor.dim() > 1) for name, tensor in base.items()}
    report = extracted(tmp_path, base, tuned, 6)
    held = {
        name.removeprefix("base_model.model."): tensor.shape for name, tensor in factors(tmp_path).items()
    }
    assert report.config["fan_in_fan_out"] is True
    assert held["h.attn.c_attn.lora_A.weight"] == (6, 6) and held["h.attn.c_attn.lora_B.weight"] == (18, 6)
    for name, tensor in merged(tmp_path).items():
        torch.testing.assert_close(tensor, tuned[name])
    tuned["lm_head.weight"] = base["lm_head.weight"] = torch.randn(20, 6)
    assert extracted(tmp_path, base, tuned, 6).config["fan_in_fan_out"] is True
    tuned["lm_head.weight"] = tuned["lm_head.weight"] + 1
    with pytest.raises(Refused, match=r"'lm_head' is a Linear, .* which 'h\.attn\.c_proj' is"):
        extracted(tmp_path, base, tuned, 6)


def test_a_rank_above_the_smaller_side_is_lowered_for_that_layer_alone(tmp_path: Path) -> None:
    base = {
        "fc.weight": torch.randn(9, 4),
        "block.fc.weight": torch.randn(9, 9),
        "x.weight": torch.randn(3, 9),
    }
    tuned = {name: tensor + torch.randn_like(tensor) for name, tensor in base.items()}
    report = extracted(tmp_path, base, tuned, 7)
    assert [layer.rank for layer in report.layers] == [4, 7, 3] and report.lowered == ("fc", "x")
    patterns = report.config["rank_pattern"]
    assert [*patterns.items()] == [("block.fc", 7), ("fc", 4), ("x", 3)], "the first that fits wins"
    assert patterns == report.config["alpha_pattern"]
    found = merged(tmp_path)
    torch.testing.assert_close(found["fc.weight"], tuned["fc.weight"])
    torch.testing.assert_close(found["x.weight"], tuned["x.weight"])


# What can't be factors.


def with_others() -> tuple[Tensors, Tensors]:
    base, tuned = net()
    base |= {"embed_tokens.weight": torch.randn(12, 6), "n": torch.tensor(3), "scale": torch.ones(2)}
    base["lm_head.weight"] = base["embed_tokens.weight"]
    tuned |= {"embed_tokens.weight": torch.randn(12, 6), "n": torch.tensor(4), "scale": torch.ones(2) * 2}
    tuned["lm_head.weight"] = tuned["embed_tokens.weight"]
    tuned |= {name: tuned[name] + 1 for name in ("up.bias", "norm.weight")}
    return base, tuned


OTHERS = {"embed_tokens.weight", "lm_head.weight", "n", "scale", "up.bias", "norm.weight"}


def test_they_are_refused_by_name_saved_whole_or_dropped_as_is_said(tmp_path: Path) -> None:
    base, tuned = with_others()
    with pytest.raises(
        Refused, match=r"6 tensors differ .* and can't be factors: '.*', '.*', '.*', …"
    ) as refused:
        extracted(tmp_path, base, tuned)
    assert "--others save" in (refused.value.hint or "") and not (tmp_path / "adapter").exists()
    report = extracted(tmp_path, base, tuned, 6, others="save")
    assert ({*report.saved}, report.dropped) == (OTHERS, ())
    found = merged(tmp_path)
    assert found.keys() == tuned.keys()
    assert all(torch.equal(found[name], tuned[name]) for name in OTHERS)
    torch.testing.assert_close(found["up.weight"], tuned["up.weight"])
    report = extracted(tmp_path, base, tuned, 6, others="drop")
    assert (report.saved, {*report.dropped}) == ((), OTHERS)
    assert all(".lora_" in name for name in factors(tmp_path))


@pytest.mark.parametrize("tied", [None, True, False])
def test_an_embedding_that_an_unnamed_output_layer_is_tied_to_takes_that_along(
    tied: bool | None, tmp_path: Path
) -> None:
    base, tuned = (
        {f"model.{name}": t for name, t in state.items() if name != "lm_head.weight"}
        for state in with_others()
    )
    if tied is not None:
        (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    extracted(tmp_path, base, tuned, 6, others="save")
    found = merged(tmp_path)
    assert found.keys() == tuned.keys()
    assert torch.equal(found["model.embed_tokens.weight"], tuned["model.embed_tokens.weight"])


def test_new_tensors_of_the_tuned_model_are_others(tmp_path: Path) -> None:
    base, tuned = net()
    tuned |= {"score.weight": torch.randn(2, 6)}
    with pytest.raises(Refused, match=r"1 tensor differs .*'score.weight'"):
        extracted(tmp_path, base, tuned)
    extracted(tmp_path, base, tuned, others="save")
    assert torch.equal(merged(tmp_path)["score.weight"], tuned["score.weight"])


def test_a_tied_layer_gets_factors_once_and_stays_tied(tmp_path: Path) -> None:
    (weight, other), step = torch.randn(2, 6, 5), torch.randn(6, 5)
    base = {"a.weight": weight, "b.weight": weight, "c.weight": other}
    changed = weight + step
    tuned = {"a.weight": changed, "b.weight": changed, "c.weight": other + step}
    assert [layer.name for layer in extracted(tmp_path, base, tuned, 5).layers] == ["a", "c"]
    found = merged(tmp_path)
    assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()
    torch.testing.assert_close(found["b.weight"], changed)
    extracted(tmp_path, base, tuned | {"b.weight": changed.clone()}, 5)
    with pytest.raises(Refused, match=r"ties 'a\.weight' and 'b\.weight', which are two tensors"):
        extracted(tmp_path, base, tuned | {"b.weight": weight + 1}, 5)


# Neighbours.

FC = {"fc.weight": torch.ones(4, 3)}
MORE = {"fc.weight": torch.ones(4, 3) * 2}
WRONG: dict[str, tuple[Tensors, Tensors, dict[str, Any], type[CkptToolError], str]] = {
    "the same model": (FC, FC, {}, NothingToDo, "no layer differs"),
    "another zero": (
        {"fc.weight": torch.zeros(2, 2)}, {"fc.weight": -torch.zeros(2, 2)}, {}, NothingToDo, "no layer"
    ),
    "others alone": (
        FC | {"norm.weight": torch.ones(3)}, FC | {"norm.weight": torch.zeros(3)}, {"others": "save"},
        NothingToDo, "no layer differs .*; 1 tensor does that can't",
    ),
    "a missing name": (FC | {"b.weight": torch.ones(2, 2)}, FC, {}, Refused, "has no 'b.weight'"),
    "another shape": (FC, {"fc.weight": torch.ones(5, 3)}, {}, Refused, r"\[4, 3\], and \[5, 3\]"),
    "NaN": (FC, {"fc.weight": torch.full((4, 3), float("nan"))}, {}, Refused, "'fc.weight' has NaN or"),
    "more than float32 holds": (
        {"fc.weight": torch.zeros(4, 3).double()}, {"fc.weight": torch.ones(4, 3).double() * 1e200}, {},
        Refused, "'fc.weight' differs from .* by more than factors of float32 hold",
    ),
    "infinity": (FC, {"fc.weight": torch.full((4, 3), float("inf"))}, {}, Refused, "has NaN or infinity"),
    "rank 0": (FC, MORE, {"rank": 0}, UsageFault, "--rank 0"),
    "others of no kind": (FC, MORE, {"others": "keep"}, UsageFault, "neither save nor drop"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_adapter_is_refused_by_name(case: str, tmp_path: Path) -> None:
    base, tuned, given, error, said = WRONG[case]
    with pytest.raises(error, match=said):
        extracted(tmp_path, base, tuned, **given)
    assert not (tmp_path / "adapter").exists()


def test_the_same_infinities_and_layouts_and_types_that_differ(tmp_path: Path) -> None:
    base = {
        "a.weight": torch.randn(6, 5),
        "b.weight": torch.randn(6, 5).bfloat16(),
        "e.weight": torch.ones(0, 5),
    }
    base["a.weight"][0, 0] = float("inf")
    tuned = {
        "a.weight": (base["a.weight"] + 1).t().contiguous().t(),
        "b.weight": base["b.weight"].float() + 0.1,
    }
    report = extracted(tmp_path, base, tuned | {"e.weight": torch.ones(0, 5)}, 5)
    assert (report.cast, report.same) == (("b.weight",), ("e.weight",))
    found = merged(tmp_path)
    torch.testing.assert_close(found["a.weight"], tuned["a.weight"])
    torch.testing.assert_close(found["b.weight"], tuned["b.weight"].bfloat16())


def test_embeddings_are_known_by_their_names(tmp_path: Path) -> None:
    names = (
        "embed_tokens",
        "wte",
        "wpe",
        "shared",
        "embeddings.position_embeddings",
        "tok_embeddings",
        "embed_in",
    )
    base = FC | {f"{name}.weight": torch.ones(4, 3) for name in names}
    tuned = {name: tensor * 2 for name, tensor in base.items()}
    assert [layer.name for layer in extracted(tmp_path, base, tuned, others="drop").layers] == ["fc"]


def test_an_existing_folder_is_replaced_only_if_it_holds_an_adapter_alone(tmp_path: Path) -> None:
    extracted(tmp_path, FC, MORE)
    with ckpttool.open(tmp_path / "base.pt") as base, ckpttool.open(tmp_path / "tuned.pt") as tuned:
        adapter, report = ckpttool.extract_lora(base, tuned, 1)
        with pytest.raises(OutputExists, match="already exists"):
            ckpttool.save_adapter(adapter, report.config, tmp_path / "adapter")
        (tmp_path / "adapter" / "notes.txt").write_text("mine")
        with pytest.raises(OutputExists, match=re.escape("holds other files too (notes.txt)")):
            ckpttool.save_adapter(adapter, report.config, tmp_path / "adapter", force=True)
        for path in ("-", tmp_path / "no" / "folder"):
            with pytest.raises(UsageFault):
                ckpttool.save_adapter(adapter, report.config, path)


@pytest.mark.long
def test_memory_stays_flat(tmp_path: Path) -> None:
    """The difference is too large to stay in memory between passes."""
    base = {"x.weight": torch.randn(4500, 2000)}
    step = torch.randn(4500, 2) @ torch.randn(2, 2000)
    save_file(base, tmp_path / "base.safetensors")
    save_file({name: tensor + step for name, tensor in base.items()}, tmp_path / "tuned.safetensors")
    paths = (tmp_path / name for name in ("base.safetensors", "tuned.safetensors", "adapter"))
    assert peak("extract-lora", *paths, "--rank", 2) < 2 * MOST


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    base, tuned = net()
    extracted(tmp_path, base, tuned)
    raw = bytearray((tmp_path / "tuned.pt").read_bytes())
    raw[raw.index(tuned["same.weight"].numpy().tobytes())] ^= 1
    (tmp_path / "tuned.pt").write_bytes(raw)
    with ckpttool.open(tmp_path / "base.pt") as one, ckpttool.open(tmp_path / "tuned.pt") as other:
        with pytest.raises(Damaged, match=r"tuned\.pt: the bytes of 'same\.weight' do not match"):
            ckpttool.extract_lora(one, other, 2)
        ckpttool.extract_lora(one, other, 2, verify=False, others="drop")


# The command.


def test_the_command_says_the_error_of_each_layer(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base, tuned = net()
    saved(base, tmp_path / "base.pt")
    saved(tuned, tmp_path / "tuned.pt")
    words = ["extract-lora", "base.pt", "tuned.pt", "adapter/", "--rank", "5"]
    ran = cli(*words, "--dry-run", "-v")
    assert ran.code == 0, ran.err
    assert re.fullmatch(
        r"would have extracted 4 layers -> adapter/ \(.* kB, largest error .* % in conv, .* s\)\n", ran.out
    )
    assert re.search("\nline +5 x 4 x 3 +5 ", ran.err) and not (tmp_path / "adapter").exists()
    made = cli(*words, "--json").json
    assert made["bytes"] == sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
    assert (made["output"], made["rank"], made["keys"], made["worst"]["name"]) == ("adapter/", 5, 8, "conv")
    assert [layer["name"] for layer in made["layers"]] == ["up", "down", "conv", "line"]
    assert cli(*words).code == 2
    assert cli(*words, "--force", "-q").out == ""
    assert cli("merge-lora", "base.pt", "adapter", "merged.pt").code == 0
    assert cli("extract-lora", "base.pt", "base.pt", "new/", "--rank", "5").code == 1
    saved(with_others()[0], tmp_path / "base.pt")
    saved(with_others()[1], tmp_path / "tuned.pt")
    ran = cli(*words, "--force")
    assert (ran.code, ran.err.count("\n")) == (3, 2)
    assert "left out, though they differ: " in cli(*words, "--force", "--others", "drop").err


# PEFT.


@pytest.mark.parametrize("others", ["save", "drop"])
def test_peft_loads_it_and_merges_the_same(others: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6, bias=False)
            self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.LayerNorm(6)
            self.block = torch.nn.ModuleDict({"up": torch.nn.Linear(3, 3)})

    torch.manual_seed(0)
    base, tuned = Net(), Net()
    if others == "drop":
        tuned.norm.load_state_dict(base.norm.state_dict())
        for one, other in (
            (tuned.up, base.up),
            (tuned.conv, base.conv),
            (tuned.block["up"], base.block["up"]),
        ):
            one.bias.data = other.bias.data.clone()
    report = extracted(tmp_path, base.state_dict(), tuned.state_dict(), 5, others=others)
    assert report.lowered == ("block.up",)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    found = merged(tmp_path)
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], tensor)
    torch.testing.assert_close(found["block.up.weight"], tuned.block["up"].weight.data)
    torch.testing.assert_close(found["norm.weight"], tuned.norm.weight.data)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # between PEFT and transformers
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_tied_models_of_transformers_are_what_they_were(kind: str, tmp_path: Path) -> None:
    """Their output layer is tied to the embedding, and not named; GPT-2's layers are Conv1D."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    given = {
        "GPT2": {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 16},
        "Llama": {
            "hidden_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 20,
        },
    }[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, tie_word_embeddings=True, **given)
    torch.manual_seed(0)
    models = [transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    for name, model in zip(("base", "tuned"), models, strict=True):
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) / 9
        model.save_pretrained(tmp_path / name)
    with ckpttool.open(tmp_path / "base") as base, ckpttool.open(tmp_path / "tuned") as tuned:
        adapter, report = ckpttool.extract_lora(base, tuned, 12, others="save")
        ckpttool.save_adapter(adapter, report.config, tmp_path / "adapter")
        merged, _ = ckpttool.merge_lora(base, ckpttool.open_adapter(tmp_path / "adapter"))
        ckpttool.save(merged, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    for name, tensor in load_file(tmp_path / "tuned" / "model.safetensors").items():
        torch.testing.assert_close(found.pop(name), tensor)
    assert not found
    words = torch.arange(10)[None]
    loaded = peft.PeftModel.from_pretrained(models[0], tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(loaded(words).logits, models[1](words).logits, rtol=1e-4, atol=1e-4)
