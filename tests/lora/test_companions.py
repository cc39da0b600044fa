"""What settings beside a base say of its tensors: read before an adapter is merged, and true afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from tests.support.quantised import pair, save_adapter

WORDS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
Q = "model.layers.0.q_proj"
TABLE = torch.arange(42.0).reshape(7, 6)
Tensors = dict[str, torch.Tensor]

TIED: dict[str, dict[str, Any]] = {
    "at the top": {"tie_word_embeddings": True},
    "of the text model": {"text_config": {"tie_word_embeddings": True}},
}


def base(folder: Path, output: torch.Tensor | None = TABLE, **settings: Any) -> None:
    """Write a base whose output layer is a copy of its table of words, another matrix, or not named."""
    state = {WORDS: TABLE.clone(), f"{Q}.weight": torch.ones(4, 6)}
    if output is not None:
        state[OUTPUT] = output.clone()
    (folder / "base").mkdir()
    save_file(state, folder / "base" / "model.safetensors", {"format": "pt"})
    if settings:
        (folder / "base" / "config.json").write_text(json.dumps(settings))


def factors(name: str, rows: int = 7) -> Tensors:
    """Return factors of an embedding, or of an output layer, whose product is all ones."""
    if name == WORDS:
        return {
            "model.embed_tokens.lora_embedding_A": torch.ones(1, rows),
            "model.embed_tokens.lora_embedding_B": torch.ones(6, 1),
        }
    return pair("lm_head", torch.ones(1, 6), torch.ones(rows, 1))


def adapter(folder: Path, tensors: Tensors, **settings: Any) -> None:
    save_adapter(folder, tensors, **{"r": 1, "lora_alpha": 1, "task_type": "CAUSAL_LM", **settings})


def merged(cli: Any, folder: Path) -> tuple[Tensors, dict[str, Any], Any]:
    """Merge with the settings copied along; return the tensors, the settings, and what was printed."""
    words = ["merge-lora", f"{folder}/base/", f"{folder}/adapter", f"{folder}/out/", "--companions"]
    done = cli(*words, "--force", "--json")
    assert done.code == 0, done.err
    config = folder / "out" / "config.json"
    settings = json.loads(config.read_text()) if config.exists() else {}
    (file,) = (folder / "out").glob("*.safetensors")
    return load_file(file), settings, json.loads(done.out)


def loaded(tensors: Tensors, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both matrices of words as a library that ties them by the settings has them."""
    said = {**settings.get("text_config", {}), **settings}
    words = tensors[WORDS]
    return words, words if said.get("tie_word_embeddings") else tensors[OUTPUT]


@pytest.mark.parametrize("settings", TIED.values(), ids=TIED)
@pytest.mark.parametrize("name", [WORDS, OUTPUT])
def test_a_copy_that_only_the_settings_tie_changes_with_the_update(
    cli: Any, tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    base(tmp_path, **settings)
    adapter(tmp_path, factors(name))
    tensors, said, report = merged(cli, tmp_path)
    assert all(torch.equal(each, TABLE + 1) for each in loaded(tensors, said))
    assert OUTPUT not in tensors or torch.equal(tensors[OUTPUT], TABLE + 1)
    assert said == settings
    assert report["followed"] == [OUTPUT if name == WORDS else WORDS]


@pytest.mark.parametrize("tied", [True, False])
def test_copies_of_an_embedding_change_together_as_t5_s_do(cli: Any, tmp_path: Path, tied: bool) -> None:
    """Encoder and decoder share one with the model, whatever the settings say of the output layer."""
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", OUTPUT)
    base(tmp_path, tie_word_embeddings=tied)
    save_file({name: TABLE.clone() for name in names}, tmp_path / "base" / "model.safetensors")
    parts = {"shared.lora_embedding_A": torch.ones(1, 7), "shared.lora_embedding_B": torch.ones(6, 1)}
    adapter(tmp_path, parts, task_type="SEQ_2_SEQ_LM")
    _, _, report = merged(cli, tmp_path)
    with ckpttool.open(tmp_path / "out") as checkpoint:
        for name in names:
            new = TABLE + 1 if tied or name != OUTPUT else TABLE
            assert torch.equal(torch.from_numpy(checkpoint.state()[name].numpy()), new)
    assert {*report["followed"]} == {*names[1:]} - ({OUTPUT} if not tied else set())
    assert report["copied"] == []


def test_a_copy_that_the_settings_do_not_tie_keeps_its_values(cli: Any, tmp_path: Path) -> None:
    base(tmp_path, tie_word_embeddings=False)
    adapter(tmp_path, factors(WORDS))
    tensors, said, report = merged(cli, tmp_path)
    assert torch.equal(tensors[WORDS], TABLE + 1) and torch.equal(tensors[OUTPUT], TABLE)
    assert (said, report["followed"]) == ({"tie_word_embeddings": False}, [])


def test_matrices_that_differ_are_not_tied_whatever_the_settings_say(cli: Any, tmp_path: Path) -> None:
    base(tmp_path, TABLE * 2, tie_word_embeddings=True)
    adapter(tmp_path, factors(WORDS))
    tensors, _, report = merged(cli, tmp_path)
    assert torch.equal(tensors[WORDS], TABLE + 1) and torch.equal(tensors[OUTPUT], TABLE * 2)
    assert report["followed"] == []


@pytest.mark.parametrize("settings", [{}, {"model_type": "x"}])
def test_an_equal_copy_that_nothing_says_is_tied_is_refused(
    cli: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    base(tmp_path, **settings)
    adapter(tmp_path, factors(WORDS))
    done = cli("merge-lora", f"{tmp_path}/base/", f"{tmp_path}/adapter", f"{tmp_path}/out.safetensors")
    assert done.code == 3
    assert "'lm_head.weight' is equal to it in" in done.err
    assert '"tie_word_embeddings": true or false' in done.err
    assert not (tmp_path / "out.safetensors").exists()
    (tmp_path / "base" / "config.json").write_text('{"tie_word_embeddings": true}')  # as the hint says
    tensors, said, _ = merged(cli, tmp_path)
    assert all(torch.equal(each, TABLE + 1) for each in loaded(tensors, said))


def test_updates_of_both_copies_of_a_tie_are_refused(cli: Any, tmp_path: Path) -> None:
    base(tmp_path, tie_word_embeddings=True)
    adapter(tmp_path, factors(WORDS) | factors(OUTPUT))
    done = cli("merge-lora", f"{tmp_path}/base/", f"{tmp_path}/adapter", f"{tmp_path}/out.safetensors")
    assert done.code == 3
    assert "which the adapter changes too" in done.err


@pytest.mark.parametrize("settings", TIED.values(), ids=TIED)
@pytest.mark.parametrize("output", [TABLE, None], ids=["a copy", "not named"])
@pytest.mark.parametrize("differ", [True, False])
def test_settings_say_that_matrices_are_tied_only_if_they_are(
    cli: Any, tmp_path: Path, settings: dict[str, Any], output: torch.Tensor | None, differ: bool
) -> None:
    """Both are saved whole; the settings of the text model are what transformers reads of a larger one."""
    base(tmp_path, output, **settings)
    new = TABLE + 1
    adapter(tmp_path, {WORDS: new, OUTPUT: new + differ}, modules_to_save=["embed_tokens", "lm_head"])
    tensors, said, _ = merged(cli, tmp_path)
    words, last = loaded(tensors, said)
    assert torch.equal(words, new) and torch.equal(last, new + differ)
    flat = {**said.get("text_config", {}), **said}
    assert flat["tie_word_embeddings"] is not differ
    assert "text_config" not in said or said["text_config"]["tie_word_embeddings"] is not differ


# ---- A vocabulary that grew: the adapter holds both matrices whole, with more rows


MORE = -torch.arange(54.0).reshape(9, 6)


@pytest.mark.parametrize(
    "saved", [["embed_tokens", "lm_head"], None], ids=["modules_to_save", "as PEFT does"]
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("output", [TABLE, TABLE + 5, None], ids=["a copy", "its own", "not named"])
def test_a_vocabulary_that_grew_is_taken_over_and_the_settings_count_it(
    cli: Any, tmp_path: Path, saved: list[str] | None, tied: bool, output: torch.Tensor | None
) -> None:
    if output is None and not tied:
        return  # such a base has no output layer
    base(tmp_path, output, vocab_size=7, tie_word_embeddings=tied, text_config={"vocab_size": 7, "x": 7})
    last = MORE.clone() if tied else MORE + 1
    adapter(
        tmp_path,
        {WORDS: MORE, OUTPUT: last, **pair(Q, torch.ones(1, 6), torch.ones(4, 1))},
        modules_to_save=saved,
    )
    tensors, said, report = merged(cli, tmp_path)
    assert torch.equal(loaded(tensors, said)[0], MORE)
    assert torch.equal(loaded(tensors, said)[1], last)
    assert (said["vocab_size"], said["text_config"]) == (9, {"vocab_size": 9, "x": 7})
    assert WORDS in report["resized"]


def test_a_targeted_embedding_that_grew_is_updated(cli: Any, tmp_path: Path) -> None:
    """PEFT saves a targeted embedding whole beside its factors, where the vocabulary grew."""
    base(tmp_path, TABLE + 5, vocab_size=7, tie_word_embeddings=False)
    adapter(tmp_path, {WORDS: MORE, OUTPUT: MORE + 1, **factors(WORDS, 9)})
    tensors, said, _ = merged(cli, tmp_path)
    assert torch.equal(tensors[WORDS], MORE + 1) and torch.equal(tensors[OUTPUT], MORE + 1)
    assert said["vocab_size"] == 9


@pytest.mark.parametrize(
    "whole",
    [
        {WORDS: MORE},
        {OUTPUT: MORE},
        {WORDS: MORE, OUTPUT: MORE[:8]},
        {WORDS: MORE[:, :5], OUTPUT: MORE[:, :5]},
    ],
    ids=["words alone", "output alone", "two sizes", "another width"],
)
@pytest.mark.parametrize("output", [TABLE, TABLE + 5, None], ids=["a copy", "its own", "not named"])
def test_half_of_a_vocabulary_is_refused(
    cli: Any, tmp_path: Path, whole: Tensors, output: torch.Tensor | None
) -> None:
    base(tmp_path, output, tie_word_embeddings=output is not TABLE + 5)
    whole = {name: tensor.clone() for name, tensor in whole.items()}
    adapter(tmp_path, whole, modules_to_save=["embed_tokens", "lm_head"])
    done = cli("merge-lora", f"{tmp_path}/base/", f"{tmp_path}/adapter", f"{tmp_path}/out.safetensors")
    assert done.code == 3
    assert "its shape is" in done.err or "may tie" in done.err or "no matrix of words has" in done.err


# ---- Other commands that change what the settings say


def test_a_tie_that_convert_makes_is_said(cli: Any, tmp_path: Path) -> None:
    base(tmp_path, None, tie_word_embeddings=False)
    words = ["convert", f"{tmp_path}/base/", f"{tmp_path}/out/", "--companions", "--tie", f"{OUTPUT}={WORDS}"]
    assert cli(*words).code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"tie_word_embeddings": True}


def test_a_delta_that_changes_type_and_vocabulary_makes_its_base_s_settings_true(
    cli: Any, tmp_path: Path
) -> None:
    base(tmp_path, torch_dtype="float32", vocab_size=7)
    new = {name: tensor.half() for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items()}
    save_file({**new, WORDS: MORE.half(), OUTPUT: MORE.half()}, tmp_path / "new.safetensors")
    made = [
        "delta",
        f"{tmp_path}/base/model.safetensors",
        f"{tmp_path}/new.safetensors",
        f"{tmp_path}/d.safetensors",
    ]
    assert cli(*made).code == 0
    inputs = [f"{tmp_path}/base/model.safetensors", f"{tmp_path}/d.safetensors"]
    assert cli("apply", *inputs, f"{tmp_path}/out/", "--companions").code == 0
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == {"torch_dtype": "float16", "vocab_size": 9}


def test_in_a_folder_that_replaces_itself_what_is_no_longer_true_is_named(cli: Any, tmp_path: Path) -> None:
    base(tmp_path, torch_dtype="float32")
    assert cli("convert", f"{tmp_path}/base/", f"{tmp_path}/shards/", "--companions").code == 0
    done = cli("convert", f"{tmp_path}/shards/", f"{tmp_path}/shards/", "--force", "--dtype", "bf16")
    assert done.code == 0
    assert 'config.json beside the output must have "torch_dtype": "bfloat16"' in done.err


def test_numbers_of_which_none_changed_leave_the_settings_alone(cli: Any, tmp_path: Path) -> None:
    base(tmp_path, torch_dtype="bfloat16", vocab_size=99, tie_word_embeddings=True)
    before = (tmp_path / "base" / "config.json").read_text()
    for words in (["convert"], ["strip-prefix", "--prefix", "model."], ["slim"]):
        command, *more = words
        assert (
            cli(command, f"{tmp_path}/base/", f"{tmp_path}/out/", *more, "--companions", "--force").code == 0
        )
        assert (tmp_path / "out" / "config.json").read_text() == before


def test_the_library_reports_what_was_resized(tmp_path: Path) -> None:
    base(tmp_path, TABLE + 5)
    adapter(tmp_path, {WORDS: MORE, OUTPUT: MORE + 1})
    opened = ckpttool.open_adapter(tmp_path / "adapter")
    with ckpttool.open(tmp_path / "base" / "model.safetensors") as checkpoint, opened.checkpoint:
        _, report = ckpttool.merge_lora(checkpoint, opened)
    assert {*report.resized} == {WORDS, OUTPUT}


# ---- What verify says of an adapter: its tensors and its settings fit each other


GOOD = pair(Q, torch.ones(2, 6), torch.ones(4, 2))
SETTINGS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "another rank": (
        GOOD,
        {"r": 32},
        f"'{Q}' of shapes [2, 6] and [4, 2], and adapter_config.json says rank 32",
    ),
    "a rank of its own": (GOOD, {"r": 2, "rank_pattern": {"q_proj": 4}}, "says rank 4"),
    "one factor": ({f"{Q}.lora_A.weight": torch.ones(2, 6)}, {}, "has only one of the two factors"),
    "factors of two ranks": (pair(Q, torch.ones(2, 6), torch.ones(4, 3)), {}, "of shapes [2, 6] and [4, 3]"),
    "a rank that is none": (GOOD, {"r": 0}, "r = 0, which is no finite positive number"),
    "no alpha": (GOOD, {"lora_alpha": None}, "lora_alpha = None"),
    "modules that are no names": (GOOD, {"modules_to_save": [1]}, "which is no list of names"),
}


@pytest.mark.parametrize(("tensors", "config", "said"), SETTINGS.values(), ids=SETTINGS)
def test_verify_names_what_an_adapter_s_settings_say_otherwise(
    cli: Any, tmp_path: Path, tensors: Tensors, config: dict[str, Any], said: str
) -> None:
    save_adapter(tmp_path, tensors, **config)
    for name in ("adapter", "adapter/adapter_model.safetensors"):
        done = cli("verify", f"{tmp_path}/{name}")
        assert done.code == 1
        assert said in done.err
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    assert "is not JSON" in cli("verify", f"{tmp_path}/adapter").err


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (GOOD, {}),
        (GOOD, {"r": 8, "rank_pattern": {"q_proj": 2}}),
        (factors(WORDS), {"r": 1}),
        ({f"{Q}.ia3_l": torch.ones(3)}, {"peft_type": "IA3", "r": 9}),
        (GOOD, {"r": 9, "use_qalora": True}),
    ],
    ids=["fits", "by a pattern", "an embedding", "another type", "a kind that is not read"],
)
def test_verify_says_nothing_of_what_fits_or_is_not_known(
    cli: Any, tmp_path: Path, tensors: Tensors, config: dict[str, Any]
) -> None:
    save_adapter(tmp_path, tensors, **config)
    assert cli("verify", f"{tmp_path}/adapter").code == 0
