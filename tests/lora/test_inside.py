"""Adapters inside their base: a model in training, saved whole; folded, or taken out. PEFT is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, NothingToDo, Refused, Unsupported
from ckpttool.lora.inside import META, fold_lora, take_apart
from tests.support.comparing import saved

Tensors = dict[str, torch.Tensor]


class Net(torch.nn.Module):
    """An embedding whose table is the output's too, a layer, a convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(13, 6)
        self.up = torch.nn.Linear(6, 10)
        self.conv = torch.nn.Conv2d(6, 4, 3)
        self.score = torch.nn.Linear(6, 3)
        self.lm_head = torch.nn.Linear(6, 13, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"target_modules": ["up", "conv"], "r": 2, "lora_alpha": 3}),
    "rsLoRA with patterns": (
        "LoraConfig",
        {"target_modules": ["up", "conv"], "use_rslora": True, "r": 2, "lora_alpha": 3}
        | {"rank_pattern": {"up": 3}, "alpha_pattern": {"conv": 5}},
    ),
    "DoRA": ("LoraConfig", {"target_modules": ["up", "conv"], "r": 2, "use_dora": True}),
    "an embedding": ("LoraConfig", {"target_modules": ["embed_tokens"], "r": 2, "lora_alpha": 3}),
    "a module whole": ("LoraConfig", {"target_modules": ["up"], "r": 2, "modules_to_save": ["score"]}),
    "biases": ("LoraConfig", {"target_modules": ["up"], "r": 2, "bias": "all", "lora_bias": True}),
    "tokens": ("LoraConfig", {"target_modules": ["up"], "r": 2, "trainable_token_indices": [3, 1]}),
    "LoHa": ("LoHaConfig", {"target_modules": ["up", "conv"], "r": 2, "alpha": 3}),
    "LoKr": ("LoKrConfig", {"target_modules": ["up", "conv"], "r": 2, "alpha": 3}),
    "OFT": ("OFTConfig", {"target_modules": ["up"], "oft_block_size": 3}),
}


def model_of(folder: Path, case: str, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model with its adapter inside, and the settings beside it; return PEFT's model."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    kind, settings = SETTINGS[case]
    config = getattr(peft, kind)(**settings)
    model = peft.get_peft_model(Net().to(dtype), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(torch.randn_like(parameter) / 4)
    torch.save({"model": model.state_dict(), "epoch": 3}, folder / "whole.pt")
    config.save_pretrained(folder)
    return model


def folded(path: Path, **how: Any) -> Tensors:
    with ckpttool.open(path) as checkpoint:
        new, *_ = fold_lora(checkpoint, **how)
        ckpttool.save(new, path.with_name("out.pt"), force=True)
    held = torch.load(path.with_name("out.pt"), weights_only=True)
    found: Tensors = held.get("model", held)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SETTINGS)
def test_what_is_inside_is_folded_as_peft_merges_it(case: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, case, torch.float64)
    found, wanted = folded(tmp_path / "whole.pt"), model.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-13, atol=1e-13)
    assert found["lm_head.weight"].data_ptr() == found["embed_tokens.weight"].data_ptr()
    assert torch.load(tmp_path / "out.pt")["epoch"] == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["LoRA", "DoRA", "a module whole", "rsLoRA with patterns"])
def test_what_is_taken_out_is_the_adapter_that_peft_saves(case: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, case)
    model.save_pretrained(tmp_path / "wanted")
    with ckpttool.open(tmp_path / "whole.pt") as checkpoint:
        base, adapter, others = take_apart(checkpoint)
        ckpttool.save_adapter(adapter.checkpoint, adapter.config, tmp_path / "taken")
        ckpttool.save(base, tmp_path / "base.pt")
    found, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("taken", "wanted"))
    assert others == ()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    again = ckpttool.open_adapter(tmp_path / "taken")
    with ckpttool.open(tmp_path / "base.pt") as opened, again.checkpoint:
        ckpttool.save(ckpttool.merge_lora(opened, again)[0], tmp_path / "merged.pt")
    assert ckpttool.diff(tmp_path / "merged.pt", _written(tmp_path)).same


def _written(folder: Path) -> Path:
    folded(folder / "whole.pt")
    return folder / "out.pt"


# ---- Without PEFT: which adapter, and its alpha


W, A, B = torch.randn(5, 4), torch.randn(2, 4), torch.randn(5, 2)


def live(module: str = "fc", adapter: str = "default", begin: str = "base_model.model.") -> Tensors:
    """Return a layer with an adapter inside."""
    return {
        f"{begin}{module}.base_layer.weight": W.clone(),
        f"{begin}{module}.lora_A.{adapter}.weight": A.clone(),
        f"{begin}{module}.lora_B.{adapter}.weight": B.clone(),
    }


def write(folder: Path, state: Tensors, **beside: dict[str, Any]) -> Path:
    """Save a state, with files of settings beside it, named without their ends."""
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    for name, said in beside.items():
        place = folder / f"{name}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(said))
    return folder / "model.safetensors"


ALPHA = {"peft_type": "LORA", "r": 2, "lora_alpha": 3}
SAID: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "PEFT's settings": ({"adapter_config": ALPHA}, {}, 1.5),
    "PEFT's settings with rsLoRA": ({"adapter_config": {**ALPHA, "use_rslora": True}}, {}, 3 / 2**0.5),
    "verl's settings": ({"lora_train_meta": {"r": 2, "lora_alpha": 8, "task_type": None}}, {}, 4),
    "those of verl's export": ({"lora_adapter/adapter_config": ALPHA}, {}, 1.5),
    "the flag": ({}, {"alpha": 5.0}, 2.5),
    "the flag before the settings": ({"adapter_config": {**ALPHA, "lora_alpha": 0}}, {"alpha": 5.0}, 2.5),
}


@pytest.mark.parametrize("case", SAID)
def test_alpha_is_what_is_said_beside_the_file_or_by_a_flag(case: str, tmp_path: Path) -> None:
    beside, how, scale = SAID[case]
    found = folded(write(tmp_path, live(), **beside), **how)
    assert found.keys() == {"fc.weight"}
    exact = W.double() + scale * (B.double() @ A.double())
    torch.testing.assert_close(found["fc.weight"], exact.float(), rtol=1e-7, atol=1e-7)


BAD = {"adapter_config": {**ALPHA, "lora_alpha": 0}}
REFUSED: dict[str, tuple[Tensors, dict[str, Any], dict[str, Any], type[CkptToolError], str]] = {
    "alpha is not said": (live(), {}, {}, Refused, f"alpha of its adapter, and no .* or {META}"),
    "nothing in the settings": (live(), {"lora_train_meta": {"r": 2}}, {}, Refused, "does not say the alpha"),
    "alpha is 0 in PEFT's": (live(), BAD, {}, Damaged, "adapter_config.json says lora_alpha = 0,"),
    "alpha is 0 in verl's": (
        live(), {"lora_train_meta": {"r": 2, "lora_alpha": 0}}, {}, Damaged, f"{META} says lora_alpha = 0"
    ),
    "alpha is 0 by the flag": (live(), {}, {"alpha": 0.0}, Damaged, "lora_alpha = 0.0"),
    "another rank": (live(), {"lora_train_meta": {"r": 4, "lora_alpha": 1}}, {}, Damaged, "says rank 4"),
    "no other name": (live(), {}, {"alpha": 1.0, "adapter": "x"}, Refused, "adapter 'default', and no 'x'"),
    "which of two": (
        {**live(), **live("other", "second")}, {}, {"alpha": 1.0}, Refused, "adapters 'default', 'second'"
    ),
    "the alpha of another adapter": (
        {**live(), **live(adapter="second")}, {"adapter_config": ALPHA}, {"adapter": "second"},
        Refused, "does not say the alpha",
    ),
    "a part of another kind": (
        live() | {"base_model.model.fc.vera_lambda_b.default": B}, {}, {"alpha": 1.0},
        Unsupported, "vera_lambda_b.default', which is no part of an adapter",
    ),
    "no factor": (
        {"fc.base_layer.weight": W}, {}, {"alpha": 1.0}, NothingToDo, "though layers are wrapped for one"
    ),
    "a plain model": ({"fc.weight": W}, {}, {"alpha": 1.0}, NothingToDo, "no adapter is inside"),
    "an adapter alone": (
        {"fc.lora_A.weight": A, "fc.lora_B.weight": B}, {}, {"alpha": 1.0}, NothingToDo, "no adapter is"
    ),
    "an adapter alone with a bias": (
        {"fc.lora_A.weight": A, "fc.lora_B.weight": B, "fc.base_layer.bias": W[0]}, {}, {"alpha": 1.0},
        NothingToDo, "no adapter is inside",
    ),
    "one factor": (
        {key: tensor for key, tensor in live().items() if "lora_B" not in key}, {}, {"alpha": 1.0},
        Damaged, "only one of the two factors of 'fc'",
    ),
    "codes": (
        {**live(), "base_model.model.fc.base_layer.weight": W.to(torch.int8)}, {}, {"alpha": 1.0},
        Refused, "the weight is int8",
    ),
    "codes with scales": (
        {**live(), "base_model.model.fc.base_layer.weight": W.to(torch.float8_e4m3fn)}
        | {"base_model.model.fc.base_layer.weight_scale": torch.ones(())}, {}, {"alpha": 1.0},
        Refused, "'fc.weight' is packed, and nothing can be added to codes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_said_or_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    state, beside, how, error, said = REFUSED[case]
    path = write(tmp_path, {key: tensor.clone() for key, tensor in state.items()}, **beside)
    with pytest.raises(error, match=said):
        folded(path, **how)
    assert not (tmp_path / "out.pt").exists()


def test_the_adapter_that_is_named_is_folded_and_others_are_said_to_be_left_out(tmp_path: Path) -> None:
    second = {key.replace("default", "second"): tensor * 2 for key, tensor in live().items() if "lora" in key}
    path = write(tmp_path, {**live(), **second}, adapter_config=BAD["adapter_config"])
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "adapter_config.json").write_text(json.dumps({**ALPHA, "lora_alpha": 2}))
    torch.testing.assert_close(folded(path, adapter="second")["fc.weight"], W + 4 * B @ A)
    with ckpttool.open(path) as checkpoint:
        *_, others = fold_lora(checkpoint, adapter="second")
    assert others == ("default",)


def test_torchtune_s_full_state_is_folded(tmp_path: Path) -> None:
    begin = "layers.0.attn.q_proj"
    state = {
        f"{begin}.weight": W,
        f"{begin}.lora_a.weight": A,
        f"{begin}.lora_b.weight": B,
        "magnitude": W[0].clone(),
    }
    found = folded(write(tmp_path, state, adapter_config=ALPHA))
    assert found.keys() == {f"{begin}.weight", "magnitude"}
    torch.testing.assert_close(found[f"{begin}.weight"], W + 1.5 * B @ A)
    norms = torch.rand(5) + 1
    found = folded(
        write(tmp_path, {**state, f"{begin}.magnitude": norms}, adapter_config={**ALPHA, "use_dora": True})
    )
    whole = W + 1.5 * B @ A
    torch.testing.assert_close(
        found[f"{begin}.weight"], norms[:, None] * whole / whole.norm(dim=1, keepdim=True)
    )


@pytest.mark.parametrize(
    "begin", ["", "base_model.model.", "module.base_model.model.", "_fsdp_wrapped_module."]
)
def test_a_wrapper_s_prefix_stays_and_peft_s_goes(begin: str, tmp_path: Path) -> None:
    found = folded(write(tmp_path, live(begin=begin)), alpha=2.0)
    assert found.keys() == {f"{begin}fc.weight".replace("base_model.model.", "")}


# ---- The commands


def test_convert_folds_and_says_so(cli: Any, tmp_path: Path) -> None:
    path = write(tmp_path, live(), adapter_config=ALPHA)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    out = tmp_path / "out" / "model.safetensors"
    out.parent.mkdir()
    done = cli("convert", path, out, "--fold", "lora", "--companions", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["folded"] == {"lora": 1}
    torch.testing.assert_close(load_file(out)["fc.weight"], W + 1.5 * B @ A)
    assert json.loads((out.parent / "config.json").read_text()) == {"tie_word_embeddings": True}
    assert "1 tensor folded" in cli("convert", path, out, "--fold", "lora", "--alpha", "3", "--force").out


def test_a_tie_that_a_whole_module_parts_is_said_in_the_settings(cli: Any, tmp_path: Path) -> None:
    table = torch.arange(24.0).reshape(6, 4)
    state = {
        **live(),
        "base_model.model.model.embed_tokens.original_module.weight": table,
        "base_model.model.model.embed_tokens.modules_to_save.default.weight": table + 1,
    }
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in", state, adapter_config={**ALPHA, "task_type": "CAUSAL_LM"})
    (tmp_path / "in" / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    done = cli("convert", path.parent, f"{tmp_path}/out/", "--fold", "lora", "--companions")
    assert done.code == 0, done.err
    assert 'no longer tied: set "tie_word_embeddings": false in config.json: lm_head.weight' in done.err
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"tie_word_embeddings": False}
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found = load_file(file)
    assert torch.equal(found["lm_head.weight"], table)
    assert torch.equal(found["model.embed_tokens.weight"], table + 1)


def test_packed_weights_are_made_plain_before_they_are_folded(cli: Any, tmp_path: Path) -> None:
    base = "base_model.model.fc.base_layer"
    packed = {f"{base}.weight": W.to(torch.float8_e4m3fn), f"{base}.weight_scale": torch.tensor(2.0)}
    path = write(tmp_path, {**live(), **packed})
    out = tmp_path / "out.safetensors"
    done = cli("convert", path, out, "--dequantize", "--fold", "lora", "--alpha", "2", "--dtype", "fp32")
    assert done.code == 0, done.err
    wanted = W.to(torch.float8_e4m3fn).float() * 2 + B @ A
    torch.testing.assert_close(load_file(out)["fc.weight"], wanted)


def test_extract_takes_the_adapter_out_as_it_is(cli: Any, tmp_path: Path) -> None:
    path = write(tmp_path, live(), lora_train_meta={"r": 2, "lora_alpha": 8, "task_type": None})
    done = cli("extract-lora", path, tmp_path / "taken", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (said["rank"], said["alpha"], said["keys"], said["adapters_left"]) == (2, 8, 2, [])
    adapter = ckpttool.open_adapter(tmp_path / "taken")
    assert adapter.config["target_modules"] == ["fc"]
    assert torch.equal(
        load_file(tmp_path / "taken" / "adapter_model.safetensors")["base_model.model.fc.lora_A.weight"], A
    )
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    net = torch.nn.Sequential()
    net.fc = torch.nn.Linear(4, 5, bias=False)
    net.fc.weight.data = W.clone()
    whole = peft.PeftModel.from_pretrained(net, str(tmp_path / "taken")).merge_and_unload()
    torch.testing.assert_close(whole.fc.weight.data, W + 4 * B @ A)


@pytest.mark.parametrize(
    "words",
    [["--rank", "2"], ["--others", "save"], ["x.safetensors", "--alpha", "2"], ["x.safetensors"]],
    ids=["rank", "others", "alpha of two", "no rank"],
)
def test_flags_of_the_other_way_are_wrong_usage(cli: Any, words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, live())
    files, flags = [word for word in words if word[0] == "x"], [word for word in words if word[0] != "x"]
    assert cli("extract-lora", path, *files, tmp_path / "taken", *flags).code == 2
    assert cli("convert", path, tmp_path / "o.pt", "--alpha", "2").code == 2
    assert cli("convert", path, tmp_path / "o.pt", "--fold", "").code == 2


def test_merge_folds_what_the_ranks_of_a_run_wrote(cli: Any, tmp_path: Path) -> None:
    """As verl's actor folder has it: each rank a piece, and the settings beside them."""
    whole = write(tmp_path, {**live(), "base_model.model.fc.base_layer.bias": torch.ones(5)})
    actor = tmp_path / "actor"
    assert cli("split", whole, actor, "--ranks", "2", "--as", "dtensor").code == 0
    out = tmp_path / "out.safetensors"
    refused = cli("merge", actor, out, "--fold", "lora")
    assert refused.code == 3 and "--alpha" in refused.err
    (actor / META).write_text(json.dumps({"r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM"}))
    done = cli("merge", actor, out, "--fold", "lora", "--dtype", "fp32")
    assert done.code == 0, done.err
    torch.testing.assert_close(load_file(out)["fc.weight"], W + 1.5 * B @ A)
    (actor / META).write_text(json.dumps({"r": 2, "lora_alpha": 0}))
    refused = cli("merge", actor, out, "--fold", "lora", "--force")
    assert refused.code == 3 and f"{META} says lora_alpha = 0" in refused.err


def test_an_optimizer_that_stays_is_told_of(cli: Any, tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    torch.save({"model": live(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    done = cli("convert", tmp_path / "last.pt", tmp_path / "out.pt", "--fold", "lora", "--alpha", "2")
    assert "optimizer is kept whole, with what it has of parameters that were folded: --drop" in done.err


def test_inspect_and_doctor_say_that_an_adapter_is_inside(cli: Any, tmp_path: Path) -> None:
    path = write(tmp_path, live(), adapter_config=ALPHA)
    assert "computed    an adapter is inside: 2 tensors; convert --fold lora" in cli("inspect", path).out
    assert json.loads(cli("inspect", path, "--json").out)["folds"] == {"lora": 2}
    save_file({"fc.weight": W}, tmp_path / "like.safetensors")
    said = cli("doctor", path, "--like", tmp_path / "like.safetensors", "--json")
    (problem, *_) = json.loads(said.out)["problems"]
    assert (problem["kind"], problem["command"].split()[-2:]) == ("wrapped", ["--fold", "lora"])
    (tmp_path / "adapter_config.json").unlink()
    said = cli("doctor", path, "--like", tmp_path / "like.safetensors")
    assert "--fold lora adds it, or says what it needs" in " ".join(said.out.replace("#", "").split())


def test_an_export_with_alpha_0_is_refused_and_not_byte_for_byte_its_base(cli: Any, tmp_path: Path) -> None:
    saved({"fc.weight": W}, tmp_path / "base.pt")
    (tmp_path / "lora_adapter").mkdir()
    held = {key: tensor for key, tensor in live().items() if "lora" in key}
    held = {key.replace(".default", ""): tensor for key, tensor in held.items()}
    save_file(held, tmp_path / "lora_adapter" / "adapter_model.safetensors")
    (tmp_path / "lora_adapter" / "adapter_config.json").write_text(json.dumps({**ALPHA, "lora_alpha": 0}))
    done = cli("merge-lora", tmp_path / "base.pt", tmp_path / "lora_adapter", tmp_path / "out.pt")
    assert done.code == 3
    assert "lora_alpha = 0, which is no finite positive number" in done.err
    assert not (tmp_path / "out.pt").exists()
