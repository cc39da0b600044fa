"""Adapters with a module saved whole, and bases that tie it: what PEFT 0.21 merges, measured with Llama."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Refused
from ckpttool.transforms.lora.merge import Merged
from tests.support.adapters import pair, save_adapter

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
Q = "model.layers.0.q_proj"
OLD, NEW = torch.arange(42.0).reshape(7, 6), -torch.arange(42.0).reshape(7, 6)


def base_state() -> dict[str, torch.Tensor]:
    return {EMBEDDING: OLD.clone(), f"{Q}.weight": torch.ones(4, 6), "model.norm.weight": torch.ones(6)}


def config(folder: Path, **settings: object) -> None:
    (folder / "config.json").write_text(json.dumps(settings))


def in_memory(folder: Path) -> str:
    state = base_state()
    torch.save({**state, OUTPUT: state[EMBEDDING]}, folder / "base.pt")
    return "base.pt"


def in_metadata(folder: Path) -> str:
    save_file(base_state(), folder / "base.safetensors", metadata={OUTPUT: EMBEDDING})
    return "base.safetensors"


def unnamed(folder: Path) -> str:
    save_file(base_state(), folder / "model.safetensors", metadata={"format": "pt"})
    return "model.safetensors"


def unnamed_and_configured(folder: Path) -> str:
    config(folder, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    return unnamed(folder)


def copied(folder: Path) -> str:
    save_file({**base_state(), OUTPUT: OLD.clone()}, folder / "model.safetensors")
    return "model.safetensors"


def shards(folder: Path) -> str:
    whole = unnamed_and_configured(folder)
    (folder / "hf").mkdir()
    with ckpttool.open(folder / whole) as checkpoint:
        ckpttool.save(checkpoint, folder / "hf", to="safetensors-sharded", shard_size=200, force=True)
    (folder / "config.json").rename(folder / "hf" / "config.json")
    return "hf"


TIED: dict[str, Callable[[Path], str]] = {
    "shared memory": in_memory,
    "metadata": in_metadata,
    "one name, and the task says": unnamed,
    "one name, and the settings say": unnamed_and_configured,
    "two equal copies": copied,
    "a folder of shards": shards,
}


def adapter(folder: Path, whole: dict[str, torch.Tensor], **settings: object) -> None:
    given = {"task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, **settings}
    save_adapter(folder, {**pair(Q, torch.ones(1, 6), torch.ones(4, 1)), **whole}, **given)


def merged(folder: Path, base: str) -> tuple[dict[str, torch.Tensor], Merged]:
    opened = ckpttool.open_adapter(folder / "adapter")
    with ckpttool.open(folder / base) as checkpoint, opened.checkpoint:
        new, report = ckpttool.merge_lora(checkpoint, opened)
        ckpttool.save(new, folder / "out.pt", force=True)
        ckpttool.save(new, folder / "out.safetensors", force=True)
    state = torch.load(folder / "out.pt", weights_only=True)
    for name, tensor in load_file(folder / "out.safetensors").items():
        assert torch.equal(tensor, state[name])
    return state, report


WHOLE = {
    "embedding": (["embed_tokens"], {EMBEDDING: NEW}, (NEW, OLD), [(OUTPUT,)]),
    "output": (["lm_head"], {OUTPUT: NEW}, (OLD, NEW), [(OUTPUT,), (EMBEDDING,)]),
    "both": (["embed_tokens", "lm_head"], {EMBEDDING: NEW, OUTPUT: NEW + 1}, (NEW, NEW + 1), None),
}


@pytest.mark.parametrize("which", WHOLE)
@pytest.mark.parametrize("kind", TIED)
def test_a_tied_layer_that_is_not_saved_keeps_its_values(kind: str, which: str, tmp_path: Path) -> None:
    modules, whole, wanted, untied = WHOLE[which]
    base = TIED[kind](tmp_path)
    adapter(tmp_path, whole, modules_to_save=modules)
    state, report = merged(tmp_path, base)
    assert torch.equal(state[EMBEDDING], wanted[0]) and torch.equal(state[OUTPUT], wanted[1])
    assert untied is None or report.untied in untied


@pytest.mark.parametrize("kind", TIED)
def test_peft_s_own_tie_stays(kind: str, tmp_path: Path) -> None:
    """`ensure_weight_tying` writes both names with the same values."""
    base = TIED[kind](tmp_path)
    settings = {"modules_to_save": ["embed_tokens", "model.embed_tokens"], "ensure_weight_tying": True}
    adapter(tmp_path, {EMBEDDING: NEW, OUTPUT: NEW.clone()}, **settings)
    state, report = merged(tmp_path, base)
    assert torch.equal(state[EMBEDDING], NEW)
    if OUTPUT in state:
        assert state[OUTPUT].data_ptr() == state[EMBEDDING].data_ptr()
    assert report.untied == ()


def test_a_tie_that_peft_was_asked_for_and_did_not_make_is_none(tmp_path: Path) -> None:
    """GPT-2: the adapter holds the embedding alone, and merging parts it from the output layer."""
    base = in_memory(tmp_path)
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    state, report = merged(tmp_path, base)
    assert torch.equal(state[OUTPUT], OLD)
    assert report.untied == (OUTPUT,)


@pytest.mark.parametrize("kind", ["shared memory", "metadata"])
def test_what_is_tied_to_an_updated_weight_follows_and_is_named(kind: str, tmp_path: Path) -> None:
    base = TIED[kind](tmp_path)
    factors = {"lora_embedding_A": torch.ones(1, 7), "lora_embedding_B": torch.ones(6, 1)}
    adapter(tmp_path, {f"model.embed_tokens.{name}": tensor for name, tensor in factors.items()})
    state, report = merged(tmp_path, base)
    assert state[OUTPUT].data_ptr() == state[EMBEDDING].data_ptr()
    assert torch.equal(state[OUTPUT], OLD + 1)
    assert (report.untied, report.followed) == ((), (OUTPUT,))


def test_an_updated_output_layer_and_an_embedding_that_is_saved_whole_part(tmp_path: Path) -> None:
    base = in_memory(tmp_path)
    factors = pair("lm_head", torch.ones(1, 6), torch.ones(7, 1))
    adapter(tmp_path, {EMBEDDING: NEW, **factors}, modules_to_save=["embed_tokens"])
    state, _ = merged(tmp_path, base)
    assert torch.equal(state[EMBEDDING], NEW)
    assert torch.equal(state[OUTPUT], OLD + 1)


def test_a_tie_inside_a_module_that_is_saved_whole_stays(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    tied = {"head.a.weight": weight, "head.b.weight": weight}
    torch.save({**tied, f"{Q}.weight": torch.ones(4, 6)}, tmp_path / "b.pt")
    adapter(tmp_path, {"head.a.weight": 2 * weight}, modules_to_save=["head"])
    state, report = merged(tmp_path, "b.pt")
    assert state["head.a.weight"].data_ptr() == state["head.b.weight"].data_ptr()
    assert torch.equal(state["head.b.weight"], 2 * weight)
    assert report.untied == ()


NOT_TIED: dict[str, dict[str, Any]] = {
    "the settings say so": {"config": {"tie_word_embeddings": False}},
    "no output layer of words": {"config": {"tie_word_embeddings": True}, "task_type": "SEQ_CLS"},
    "a model without a head": {"config": {"architectures": ["LlamaModel"]}, "task_type": None},
}


@pytest.mark.parametrize("case", NOT_TIED)
def test_a_base_that_is_not_tied_gets_no_output_layer(case: str, tmp_path: Path) -> None:
    settings = dict(NOT_TIED[case])
    base = unnamed(tmp_path)
    config(tmp_path, **settings.pop("config"))
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"], **settings)
    state, report = merged(tmp_path, base)
    assert OUTPUT not in state
    assert report.untied == ()


def test_layers_of_one_s_own_are_never_said_to_be_untied(tmp_path: Path) -> None:
    save_file({**base_state(), OUTPUT: OLD + 1}, tmp_path / "model.safetensors")
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"])
    state, report = merged(tmp_path, "model.safetensors")
    assert torch.equal(state[OUTPUT], OLD + 1)
    assert report.untied == ()


@pytest.mark.parametrize("case", ["nothing says", "another architecture"])
def test_a_layer_that_may_be_tied_is_refused(cli: Any, case: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name = EMBEDDING if case == "nothing says" else "encoder.shared.weight"
    state = base_state()
    state[name] = state.pop(EMBEDDING)
    save_file(state, "base.safetensors")
    task = None if case == "nothing says" else "SEQ_2_SEQ_LM"
    adapter(tmp_path, {name: NEW}, modules_to_save=["embed_tokens", "shared"], task_type=task)
    with pytest.raises(Refused, match="does not name the layer that it may tie to it") as caught:
        merged(tmp_path, "base.safetensors")
    assert caught.value.hint is not None
    command = caught.value.hint.split(": ", 1)[1].split(", and merge", 1)[0]
    output = f"tied.safetensors --tie lm_head.weight={name}"
    assert command == f"ckpttool convert {tmp_path}/base.safetensors {output}"
    assert cli(*shlex.split(command)[1:]).code == 0
    state, report = merged(tmp_path, "tied.safetensors")
    assert torch.equal(state[OUTPUT], OLD)
    assert report.untied == (OUTPUT,)


def test_the_command_says_what_must_be_loaded_untied(cli: Any, tmp_path: Path) -> None:
    base = unnamed_and_configured(tmp_path)
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"])
    words = ["merge-lora", str(tmp_path / base), str(tmp_path / "adapter"), str(tmp_path / "out.pt")]
    done = cli(*words)
    assert 'no longer tied: set "tie_word_embeddings": false in config.json: lm_head.weight' in done.err
    assert json.loads(cli(*words, "--force", "--json").out)["untied"] == [OUTPUT]


def test_single_tokens_that_were_trained_are_refused_by_name(tmp_path: Path) -> None:
    base = unnamed(tmp_path)
    delta = {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 6)}
    adapter(tmp_path, delta, trainable_token_indices=[1, 2])
    with pytest.raises(ckpttool.CkptToolError, match="trainable_token_indices"):
        merged(tmp_path, base)


@pytest.mark.long
def test_many_saved_modules_and_many_tensors_take_no_time(tmp_path: Path) -> None:
    names = [f"model.layers.{number}.mlp.gate.weight" for number in range(4000)]
    save_file({**base_state(), **{name: torch.ones(1) for name in names}}, tmp_path / "model.safetensors")
    saved = [*(f"x{number}" for number in range(100_000)), "gate"]
    adapter(tmp_path, {name: torch.zeros(1) for name in names}, modules_to_save=saved)
    begun = time.process_time()
    opened = ckpttool.open_adapter(tmp_path / "adapter")
    with ckpttool.open(tmp_path / "model.safetensors") as checkpoint, opened.checkpoint:
        _, report = ckpttool.merge_lora(checkpoint, opened)
    assert len(report.replaced) == 4000
    assert time.process_time() - begun < 10


def test_settings_that_are_copied_along_say_that_the_model_is_not_tied(cli: Any, tmp_path: Path) -> None:
    base = shards(tmp_path)
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"])
    words = ("merge-lora", tmp_path / base, tmp_path / "adapter", f"{tmp_path / 'out'}/", "--companions")
    assert cli(*words).code == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    assert json.loads((tmp_path / base / "config.json").read_text())["tie_word_embeddings"] is True
