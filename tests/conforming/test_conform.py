"""`conform`: the one way from a checkpoint to the names and shapes of another, or a refusal."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.conforming.conform import Conformed, conform
from ckpttool.conforming.modules import StateEntry
from ckpttool.conforming.search import search
from ckpttool.errors import Ambiguous, CheckFailed, Mismatch, NothingToDo, Refused, UsageFault
from ckpttool.mapping.applying import apply
from ckpttool.mapping.rule_file import rules_in
from tests.conforming.architectures import Pair, pairs
from tests.conforming.pairs import KEPT, results
from tests.support.dialects import State, checksum, filled, fused, llama, meta, renamed
from tests.support.running import Cli

# ---- `conform`: the one way from a checkpoint to the names and shapes of another, or a refusal that says why


RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())


def brought(state: Any, like: Any, folder: Path, **given: Any) -> tuple[State, Conformed]:
    """Return a state under the names of another, both saved by torch in their order."""
    torch.save(state, folder / "in.pt")
    torch.save(like, folder / "like.pt")
    with ckpttool.open(folder / "in.pt") as checkpoint:
        new, found = conform(checkpoint, folder / "like.pt", **given)
        ckpttool.save(new, folder / "out.pt", force=True)
    return torch.load(folder / "out.pt"), found


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], v) for k, v in wanted.items())


def others(state: State) -> State:
    """Return other values of the same shapes: a reference of which only the header may count."""
    return {name: torch.full_like(tensor, 7) for name, tensor in state.items()}


# ---- what is found -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_fused_layers_are_joined_and_split_with_grouped_queries(reverse: bool, tmp_path: Path) -> None:
    pair = [llama(), fused(llama())]
    state, like = pair[::-1] if reverse else pair
    made, found = brought(state, others(like), tmp_path)
    assert same(made, like)
    assert {step.verb for row in found.table for step in row.rule.steps} == {"split" if reverse else "concat"}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("pair", RECORDED, ids=lambda pair: pair["left"])
def test_recorded_architectures_are_right_by_header_or_by_values(
    pair: dict[str, Any], reverse: bool, tmp_path: Path
) -> None:
    """The checksums are those that the library's own conversion gave, or a model of equal outputs."""
    left = filled(pair["from"])
    like = others(filled({name: shape for name, (shape, _) in pair["to"].items()}))
    if pair["certain"]:
        right, _ = brought(left, like, tmp_path)
        assert {name: checksum(right[name]) for name in like} == {
            k: crc for k, (_, crc) in pair["to"].items()
        }
        if reverse:
            again, _ = brought(right, others(left), tmp_path)
            assert same(again, {name: left[name] for name in again})
    else:
        with pytest.raises(Ambiguous) as refused:
            brought(like, others(left), tmp_path) if reverse else brought(left, like, tmp_path)
        assert refused.value.candidates


def test_blocks_are_matched_by_their_numbers_wherever_they_begin(tmp_path: Path) -> None:
    state = llama(layers=12)
    like = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if "layers" in parts:
            parts[2] = str(int(parts[2]) + 1)
        like[".".join(parts)] = tensor
    made, _ = brought(state, others(like), tmp_path)
    assert same(made, like)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.net.", "a.b.c.d."])
def test_a_prefix_is_no_obstacle(prefix: str, tmp_path: Path) -> None:
    state = llama()
    made, found = brought({prefix + name: t for name, t in state.items()}, others(state), tmp_path)
    assert same(made, state)
    assert {row.rests for row in found.table} == {"name"}


def test_transposed_layers_are_found_by_their_shapes(tmp_path: Path) -> None:
    state = filled({"a.weight": (4, 6), "a.bias": (4,), "b.weight": (3, 5), "b.bias": (3,)})
    like = {k: v.t().contiguous() if v.ndim == 2 else v for k, v in state.items()}
    made, found = brought(state, others(like), tmp_path)
    assert same(made, like)
    assert [row.rests for row in found.table] == ["name"] * 4


def test_square_matrices_of_equal_names_alone_are_named(tmp_path: Path) -> None:
    state = filled({"a.weight": (4, 4), "a.bias": (4,), "wte.weight": (9, 4)})
    _, found = brought(renamed(state, {"a": "module.a", "wte": "module.wte"}), others(state), tmp_path)
    assert found.unshown == ("module.a.weight",)
    more = filled({"b.weight": (4, 3)})
    _, found = brought({f"module.{k}": v for k, v in (state | more).items()}, others(state | more), tmp_path)
    assert found.unshown == ()


def test_an_axis_of_size_one_is_no_obstacle(tmp_path: Path) -> None:
    state = filled({"block.scale": (6,), "block.fc.weight": (6, 4, 1, 1)})
    like = {
        "block.gamma": state["block.scale"].view(6, 1, 1),
        "block.fc.weight": state["block.fc.weight"].view(6, 4),
    }
    made, _ = brought(state, others(like), tmp_path)
    assert same(made, like)


def test_buffers_that_a_model_computes_are_left_out_or_taken_and_counters_begin_at_0(tmp_path: Path) -> None:
    norm = {"n.weight": (4,), "n.bias": (4,), "n.running_mean": (4,), "n.running_var": (4,)}
    state = filled({**norm, "c.weight": (3, 4)})
    more = {**state, "rotary.inv_freq": torch.ones(5), "c.attn.bias": torch.ones(1, 1, 8, 8)}
    table = {"n.relative_position_index": torch.arange(6)}
    like = {**others(state), "n.num_batches_tracked": torch.tensor(9), **table}
    made, found = brought(more, like, tmp_path)
    assert found.dropped == ("rotary.inv_freq", "c.attn.bias")
    assert found.counted == ("n.num_batches_tracked",)
    assert found.taken == ("n.relative_position_index",)
    assert same(made, {**state, "n.num_batches_tracked": torch.tensor(0), **table})


@pytest.mark.parametrize("reverse", [False, True])
def test_ties_follow_the_reference(reverse: bool, tmp_path: Path) -> None:
    once = filled({"wte.weight": (9, 4), "h.weight": (4, 5)})
    twice = {**once, "lm_head.weight": once["wte.weight"]}
    state, like = (twice, once) if reverse else (once, twice)
    made, found = brought({f"model.{k}": v for k, v in state.items()}, like, tmp_path)
    assert same(made, like)
    if not reverse:
        assert made["lm_head.weight"].data_ptr() == made["wte.weight"].data_ptr()
    assert found.untied if reverse else found.tied


def test_names_with_dots_braces_and_other_writing_are_kept(tmp_path: Path) -> None:
    state = filled({"{i}.a b.weight": (4, 3), "..": (5,), "層.{{x}}.0.weight": (2, 7), "": (6,)})
    made, _ = brought({f"module.{k}": v for k, v in state.items()}, others(state), tmp_path)
    assert same(made, state)


def test_one_tensor_has_one_way(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 2)}
    made, _ = brought(state, {"b": torch.zeros(3, 2)}, tmp_path)
    assert same(made, {"b": state["a"]})


def test_words_for_the_order_in_which_families_count_are_told_by_shape(tmp_path: Path) -> None:
    """w2 is the layer back in Llama, and w3 in others: the shape says which."""
    state = filled({"m.w1.weight": (6, 4), "m.w2.weight": (6, 4), "m.w3.weight": (4, 6)})
    like = renamed(state, {"w1": "gate_proj", "w2": "up_proj", "w3": "down_proj"})
    assert same(brought(state, others(like), tmp_path)[0], like)


# ---- what is refused -----------------------------------------------------------------------------------


AMBIGUOUS: dict[str, tuple[State, State, str]] = {
    "two layers of one shape": (
        filled({"a.weight": (4, 4), "b.weight": (4, 4)}),
        filled({"x.weight": (4, 4), "y.weight": (4, 4)}),
        "'a', 'b' are of one shape [4, 4], as are 'x', 'y'",
    ),
    "a square matrix beside a transposed one": (
        filled({"a.weight": (4, 6), "b.weight": (4, 4)}),
        filled({"a.weight": (6, 4), "b.weight": (4, 4)}),
        "'b' to 'b': as it is | transposed",
    ),
    "square matrices alone, which an embedding says nothing of": (
        filled({"wte.weight": (9, 4), "h.0.one.weight": (4, 4), "h.1.one.weight": (4, 4)}),
        filled({"wte.weight": (9, 4), "h.0.other.weight": (4, 4), "h.1.other.weight": (4, 4)}),
        "'h.0.one' to 'h.0.other': as it is | transposed",
    ),
    "two layers of which one is the other's transposed": (
        filled({"a.weight": (4, 6), "b.weight": (6, 4), "c.weight": (3, 4)}),
        filled({"x.weight": (4, 6), "y.weight": (6, 4), "c.weight": (4, 3)}),
        "another layer transposed",
    ),
    "q, k and v in a layer whose name does not say how": (
        filled(
            {
                "s.q_proj.weight": (4, 4),
                "s.k_proj.weight": (4, 4),
                "s.v_proj.weight": (4, 4),
                "pos_embed": (9,),
            }
        ),
        filled({"s.query_key_value.weight": (12, 4), "pos_embed": (9,)}),
        "q_proj, k_proj, v_proj, one after another | q_proj, v_proj, k_proj, one after another",
    ),
    "queries of another rotary embedding": (
        llama(),
        meta(llama()),
        "heads reordered to halves | heads reordered to pairs",
    ),
    "norms whose words only one side has": (
        filled({"input_layernorm.weight": (4,), "post_attention_layernorm.weight": (4,)}),
        filled({"first.weight": (4,), "second.weight": (4,)}),
        "are of one shape [4]",
    ),
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_what_several_ways_fit_is_refused_with_its_candidates(what: str, cli: Cli, tmp_path: Path) -> None:
    state, like, said = AMBIGUOUS[what]
    save_file(state, tmp_path / "in.safetensors")
    save_file(like, tmp_path / "like.safetensors")
    arguments = (
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
        "--like",
        tmp_path / "like.safetensors",
    )
    ran = cli("conform", *arguments, "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (1, "ambiguous")
    assert said in "; ".join(ran.json["error"]["candidates"])
    assert not (tmp_path / "out.safetensors").exists()
    assert cli("conform", *arguments).err.count("\n") == 2


@pytest.mark.parametrize(
    ("dtype", "other", "said", "hint"),
    [
        (torch.complex64, torch.float32, "; 1 tensor of complex64 here and float32 there", "no types"),
        (torch.float16, torch.float32, "; 1 tensor of float16 here and float32 there", "--dtype float32"),
        (torch.float16, torch.bfloat16, "; 1 tensor of float16 here and float32 there", "no types"),
        (torch.float32, torch.float32, " already", "as it is"),
    ],
)
def test_names_and_shapes_of_the_reference_in_other_types(
    dtype: torch.dtype, other: torch.dtype, said: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(NothingToDo, match=said) as error:
        same = {"b": torch.ones(4, dtype=other)}
        brought({"a": torch.ones(4, dtype=dtype), **same}, {"a": torch.ones(4), **same}, tmp_path)
    assert hint in str(error.value.hint)


def test_three_fused_pieces_without_words_have_no_counterpart(tmp_path: Path) -> None:
    state = filled({"a.weight": (4, 4), "b.weight": (4, 4), "c.weight": (4, 4)})
    with pytest.raises(Mismatch, match="3 of its tensors have no counterpart"):
        brought(state, {"qkv.weight": torch.zeros(12, 4)}, tmp_path)


def test_the_order_of_files_counts_only_where_it_agrees_with_all_else(tmp_path: Path) -> None:
    shapes = {f"n{n}.weight": (n + 2, n + 3) for n in range(10)}
    state = filled({"z.weight": (5, 5), **shapes, "a.weight": (5, 5)})
    like = {"q1.weight": state["z.weight"], **{k.replace("n", "m"): state[k] for k in shapes}}
    like["k1.weight"] = state["a.weight"]
    made, found = brought(state, others(like), tmp_path)
    assert same(made, like)
    assert sum(row.rests == "order" for row in found.table) == 2
    shuffled = {**{k: like[k] for k in [*like][5:]}, **{k: like[k] for k in [*like][:5]}}
    with pytest.raises(Ambiguous):
        brought(state, others(shuffled), tmp_path)


@pytest.mark.parametrize("shards", [False, True])
def test_the_order_of_sorted_names_counts_not_whatever_types_and_shards(shards: bool, tmp_path: Path) -> None:
    """safetensors are written by type, then by name, and each shard for itself."""
    shapes = {f"n{n}.weight": (n + 2, n + 3) for n in range(8)}
    state = filled({"a.weight": (5, 5), **shapes, "z.weight": (5, 5)})
    like = {k.replace("n", "m").replace("a.", "b.").replace("z.", "y."): t for k, t in state.items()}
    halves = [dict([*each.items()][start::2]) for each in (state, like) for start in (0, 1)]
    for place, (one, other) in {"in": halves[:2], "like": halves[2:]}.items():
        if shards:
            (tmp_path / place).mkdir()
            save_file(other, tmp_path / place / "model-00001-of-00002.safetensors")
            save_file(one, tmp_path / place / "model-00002-of-00002.safetensors")
            files = {
                name: f"model-0000{n}-of-00002.safetensors" for n, h in ((1, other), (2, one)) for name in h
            }
            index = {"metadata": {}, "weight_map": files}
            (tmp_path / place / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            save_file(one | {k: t.half() for k, t in other.items()}, tmp_path / place)
    with ckpttool.open(tmp_path / "in") as checkpoint, pytest.raises(Ambiguous, match="of one shape"):
        conform(checkpoint, tmp_path / "like")


MISFITS: dict[str, tuple[State, State, str]] = {
    "a layer too many": (
        llama(3),
        renamed(llama(2), {"model": "m"}),
        "3 blocks such as 'model.layers.0' here and 2",
    ),
    "a bias that only one side has": (
        filled({"a.weight": (4, 3), "a.bias": (4,)}),
        filled({"b.weight": (4, 3)}),
        "have no counterpart",
    ),
    "nothing at all": ({}, filled({"b.weight": (4, 3)}), "1 that nothing becomes"),
    "another type": (
        {"a": torch.ones(4, dtype=torch.int8)},
        {"b": torch.ones(4, dtype=torch.bfloat16)},
        "'a' [4] int8",
    ),
    "complex numbers and real ones": (
        {"a": torch.ones(4, dtype=torch.complex64)},
        {"b": torch.ones(4)},
        "('a' [4] complex64); the reference has 1 that nothing becomes ('b' [4])",
    ),
    "fewer rows": (filled({"wte.weight": (9, 4)}), filled({"embed_tokens.weight": (12, 4)}), "9 rows"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_has_no_counterpart_is_named(what: str, cli: Cli, tmp_path: Path) -> None:
    state, like, said = MISFITS[what]
    torch.save({"model": state}, tmp_path / "in.pt")
    torch.save(like, tmp_path / "like.pt")
    ran = cli(
        "conform", tmp_path / "in.pt", tmp_path / "out.pt", "--like", tmp_path / "like.pt", "--state", "model"
    )
    assert (ran.code, said in ran.err) == (1, True), ran.err
    assert not (tmp_path / "out.pt").exists()


def test_an_expert_too_few_is_named(tmp_path: Path) -> None:
    def experts(count: int) -> State:
        names = [f"moe.experts.{n}.w{w}.weight" for n in range(count) for w in (1, 3, 2)]
        return filled({"norm.weight": (4,), **{name: (4, 6) if "w2" in name else (6, 4) for name in names}})

    like = {"norm.weight": torch.ones(4), "moe.experts.gate_up_proj": torch.zeros(4, 12, 4)}
    like["moe.experts.down_proj"] = torch.zeros(4, 4, 6)
    brought(experts(4), like, tmp_path)
    with pytest.raises(Mismatch, match=r"moe\.experts\.gate_up_proj"):
        brought(experts(3), like, tmp_path)


def test_names_that_are_right_already_are_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(NothingToDo):
        brought(llama(), others(llama()), tmp_path)


def test_names_and_shapes_of_one_library_in_another_order_of_layers_are_not_crossed(tmp_path: Path) -> None:
    """Numbers that begin elsewhere: most names exist on both sides, for other layers."""
    state = filled({f"norms.{n}.weight": (4,) for n in range(4)})
    like = {f"norms.{n + 1}.weight": state[f"norms.{n}.weight"] for n in range(4)}
    assert same(brought(state, others(like), tmp_path)[0], like)


def test_blocks_that_count_down_on_the_other_side_are_not_paired_upwards(tmp_path: Path) -> None:
    """A U-Net's: of four blocks two are equal, and the other two show the direction."""
    sizes = ((8, 8), (8, 8), (8, 6), (6, 4))
    state: State = {}
    like: State = {}
    for number, (wide, narrow) in enumerate(sizes):
        shapes = {"conv1.weight": (narrow, wide, 3), "conv2.weight": (narrow, narrow, 3)}
        made = filled({f"up_blocks.{number}.{name}": shape for name, shape in shapes.items()})
        state |= made
        like |= {name.replace(f"up_blocks.{number}", f"up.{3 - number}"): t for name, t in made.items()}
    with pytest.raises(Ambiguous, match="do not count in the same direction"):
        brought(state, others(like), tmp_path)


def test_positions_of_a_picture_do_not_vouch_for_the_language_model_beside_it(tmp_path: Path) -> None:
    picture = {
        "vision.pos_embed": torch.randn(1, 5, 16),
        "vision.blocks.0.attn.qkv.weight": torch.randn(48, 16),
    }
    picture["vision.blocks.0.attn.proj.weight"] = torch.randn(16, 16)
    state = {**picture, **{f"text.{name}": t for name, t in llama().items()}}
    like = {**picture, **{f"text.{name}": t for name, t in meta(llama()).items()}}
    with pytest.raises(Ambiguous) as refused:
        brought(state, others(like), tmp_path)
    assert all("heads reordered" in each and "text" in each for each in refused.value.candidates)
    assert same(brought(state, like, tmp_path, check_values=True)[0], like)


def test_a_fused_layer_and_one_whose_name_says_nothing_may_differ_in_layout(tmp_path: Path) -> None:
    state = filled({"experts.gate_up_proj": (4, 12, 6), "experts.down_proj": (4, 6, 5)})
    like = renamed(state, {"gate_up_proj": "input_linear", "down_proj": "output_linear"})
    with pytest.raises(Ambiguous, match="in another layout"):
        brought(state, others(like), tmp_path)


# ---- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_values_decide_the_order_of_heads(reverse: bool, tmp_path: Path) -> None:
    pair = [llama(dim=32, small=16), meta(llama(dim=32, small=16))]
    state, like = pair[::-1] if reverse else pair
    made, found = brought(state, like, tmp_path, check_values=True)
    assert same(made, like)
    assert found.proven == len(like)
    steps = {str(row.rule.sources): row.rule.steps for row in found.table if row.rests == "values"}
    assert {step.heads for each in steps.values() for step in each} == {4, 2}


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_values_decide_how_fused_pieces_lie(heads: int, tmp_path: Path) -> None:
    names = [f"s.{letter}_proj.weight" for letter in "qkv"]
    state = filled({**dict.fromkeys(names, (16, 8)), "s.pos_embed": (9,)})
    dealt = torch.cat([state[name].view(heads, -1, 8) for name in names], 1).reshape(48, 8)
    like = {"s.query_key_value.weight": dealt, "s.pos_embed": state["s.pos_embed"]}
    made, _ = brought(state, like, tmp_path, check_values=True)
    assert same(made, like)
    assert same(brought(made, state, tmp_path, check_values=True)[0], state)


def test_values_decide_between_layers_of_one_shape_and_square_matrices(tmp_path: Path) -> None:
    state = filled({"a.weight": (4, 4), "b.weight": (4, 4), "c.weight": (4, 6)})
    like = {"x.weight": state["b.weight"].t().contiguous(), "y.weight": state["a.weight"]}
    like["c.weight"] = state["c.weight"].t().contiguous()
    assert same(brought(state, like, tmp_path, check_values=True)[0], like)


@pytest.mark.parametrize("reverse", [False, True])
def test_equal_values_are_a_tie_of_embeddings_and_heads_alone(reverse: bool, tmp_path: Path) -> None:
    state = filled({"wte.weight": (9, 4), "h.weight": (4, 5), "f.weight": (5,)})
    pair = [state, {**state, "lm_head.weight": state["wte.weight"].clone()}]
    _, found = brought(*pair[:: -1 if reverse else 1], tmp_path, check_values=True)
    assert found.untied if reverse else found.tied
    pair[1] = {**state, "g.weight": state["f.weight"].clone()}
    with pytest.raises(Mismatch):
        brought(*pair[:: -1 if reverse else 1], tmp_path, check_values=True)


def test_what_is_taken_from_the_reference_proves_nothing(tmp_path: Path) -> None:
    state = filled({"wte.weight": (9, 4)})
    like = {**state, "n.relative_position_index": torch.arange(6)}
    _, found = brought(state, like, tmp_path, check_values=True)
    assert (found.taken, found.proven) == (("n.relative_position_index",), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_compared_in_the_precision_of_the_reference(dtype: torch.dtype, tmp_path: Path) -> None:
    state = llama()
    like = {name: tensor.to(dtype) for name, tensor in meta(state).items()}
    made, found = brought(state, like, tmp_path, check_values=True)
    assert made["norm.weight"].dtype == torch.float32
    assert found.types == (("float32", str(dtype)[6:], len(like)),)


@pytest.mark.parametrize("where", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_one_changed_value_is_found(where: str, tmp_path: Path) -> None:
    state = llama()
    like = fused(state)
    state[where] = state[where].clone()
    state[where].view(-1)[-1] += 1
    with pytest.raises((CheckFailed, Ambiguous)):
        brought(state, like, tmp_path, check_values=True)


# ---- the map, the vocabulary, the optimizer ------------------------------------------------------------


def test_the_map_that_is_written_brings_the_same_over_and_back(cli: Cli, tmp_path: Path) -> None:
    save_file(llama(), tmp_path / "in.safetensors")
    save_file(fused(llama()), tmp_path / "like.safetensors")
    rules, out = tmp_path / "rules.toml", tmp_path / "out.safetensors"
    ran = cli(
        "conform",
        tmp_path / "in.safetensors",
        out,
        "--like",
        tmp_path / "like.safetensors",
        "--write-map",
        rules,
    )
    assert ran.code == 0, ran.err
    written = rules_in(rules.read_text())
    with ckpttool.open(tmp_path / "in.safetensors") as checkpoint:
        mapped, _ = apply(checkpoint, written)
        ckpttool.save(mapped, tmp_path / "mapped.safetensors")
    assert same(load_file(tmp_path / "mapped.safetensors"), load_file(out))
    with ckpttool.open(out) as checkpoint:
        back, _ = apply(checkpoint, written.inverse())
        ckpttool.save(back, tmp_path / "back.safetensors")
    assert same(load_file(tmp_path / "back.safetensors"), llama())


def test_the_map_is_written_after_the_output_and_over_no_other_file(cli: Cli, tmp_path: Path) -> None:
    state = {**llama(), "extra": torch.ones(3)}
    save_file(state, tmp_path / "in.safetensors")
    save_file(fused(llama()), tmp_path / "like.safetensors")
    (tmp_path / "link.toml").symlink_to("in.safetensors")
    out, rules = tmp_path / "out.safetensors", tmp_path / "rules.toml"
    start = ("conform", tmp_path / "in.safetensors", out, "--like", tmp_path / "like.safetensors")
    for name in ("in.safetensors", "like.safetensors", "out.safetensors", "link.toml", "no/such.toml"):
        ran = cli(*start, "--exclude", "extra", "--force", "--write-map", tmp_path / name)
        assert (ran.code, "Traceback" in ran.err) == (2, False), name
    assert same(load_file(tmp_path / "in.safetensors"), state)
    assert cli(*start, "--write-map", rules).code == 1  # "extra" has no counterpart
    assert not rules.exists()
    ran = cli(*start, "--exclude", "extra", "--dtype", "bf16", "--write-map", rules)
    assert ran.code == 0, ran.err
    made = load_file(out)
    again = cli(*shlex.split(ran.err.partition("as a command: ckpttool ")[2].splitlines()[0]))
    assert again.code == 0, again.err
    assert same(load_file(out), made)
    out.unlink()
    ran = cli(*start, "--exclude", "extra", "--write-map", rules)
    assert (ran.code, "--force" in ran.err, out.exists()) == (2, True, False)


@pytest.mark.parametrize("flags", [[], ["--companions"]])
def test_the_config_of_another_architecture_is_not_copied(flags: list[str], cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file(llama(), tmp_path / "in" / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "in" / name).write_text("{}")
    save_file(fused(llama()), tmp_path / "like.safetensors")
    rules, like = tmp_path / "rules.toml", tmp_path / "like.safetensors"
    said = ["not true of the output, so not copied: config.json"]
    one = ("conform", tmp_path / "in", f"{tmp_path}/one/", "--like", like, "--write-map", rules)
    for command in (one, ("convert", tmp_path / "in", f"{tmp_path}/two/", "--map", rules)):
        ran = cli(*command, *flags)
        assert ran.code == 0, ran.err
        assert [line for line in ran.err.splitlines() if "config.json" in line] == said
        assert not (Path(command[2]) / "config.json").exists()
        assert (Path(command[2]) / "tokenizer.json").exists() is bool(flags)


def test_what_the_map_can_not_add_is_said(cli: Cli, tmp_path: Path) -> None:
    norm = filled({"n.weight": (4,), "n.bias": (4,), "n.running_mean": (4,), "n.running_var": (4,)})
    save_file({f"a.{k}": v for k, v in norm.items()}, tmp_path / "in.safetensors")
    save_file({**norm, "n.num_batches_tracked": torch.tensor(0)}, tmp_path / "like.safetensors")
    out, like, rules = (tmp_path / n for n in ("out.safetensors", "like.safetensors", "rules.toml"))
    ran = cli("conform", tmp_path / "in.safetensors", out, "--like", like, "--write-map", rules)
    assert "rules.toml is without what INPUT lacks: n.num_batches_tracked" in ran.err
    assert "as a command" not in ran.err


def test_a_vocabulary_grows_by_zeros_on_demand(tmp_path: Path) -> None:
    state, wanted = llama(rows=50), fused(llama(rows=64))
    with pytest.raises(Mismatch, match="50 rows"):
        brought(state, wanted, tmp_path)
    made, found = brought(state, wanted, tmp_path, pad_vocab=True)
    assert sorted(found.padded) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert torch.equal(made["lm_head.weight"][:50], state["lm_head.weight"])
    assert not made["lm_head.weight"][50:].any()
    with pytest.raises(Mismatch, match="64 rows"):
        brought(llama(rows=64), fused(llama(rows=50)), tmp_path, pad_vocab=True)


def test_the_optimizers_momentum_follows(tmp_path: Path) -> None:
    state = llama()
    moments = {name: {"exp_avg": tensor * 2} for name, tensor in state.items()}
    optimizer = {"state": moments, "param_groups": [{"params": [*state]}]}
    torch.save({"model": state, "optimizer": optimizer}, tmp_path / "in.pt")
    torch.save(fused(state), tmp_path / "like.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        new, _ = conform(checkpoint, tmp_path / "like.pt")
        ckpttool.save(new, tmp_path / "out.pt")
    made = torch.load(tmp_path / "out.pt")
    for name, tensor in fused(state).items():
        assert torch.equal(made["model"][name], tensor)
        assert torch.equal(made["optimizer"]["state"][name]["exp_avg"], tensor * 2)


def test_an_average_gets_all_that_the_model_gets(cli: Cli, tmp_path: Path) -> None:
    norm = {"n.weight": (4,), "n.bias": (4,), "n.running_mean": (4,), "n.running_var": (4,)}
    state = filled({**norm, "wte.weight": (9, 4)})
    like = {**others(state), "n.num_batches_tracked": torch.tensor(0), "i.position_ids": torch.arange(6)}
    like["wte.weight"] = torch.zeros(12, 4)
    ema = {f"a.{k}": t + 1 for k, t in state.items()}
    torch.save({"model": {f"a.{k}": t for k, t in state.items()}, "ema": ema}, tmp_path / "in.pt")
    torch.save(like, tmp_path / "like.pt")
    arguments = (tmp_path / "in.pt", tmp_path / "out.pt", "--like", tmp_path / "like.pt", "--pad-vocab")
    ran = cli("conform", *arguments)
    assert (ran.code, "changed too: ema" in ran.err) == (0, True), ran.err
    made = torch.load(tmp_path / "out.pt")
    assert {k: t.shape for k, t in made["ema"].items()} == {k: t.shape for k, t in like.items()}
    assert torch.equal(made["ema"]["wte.weight"][:9], ema["a.wte.weight"])
    assert torch.equal(made["model"]["wte.weight"][:9], state["wte.weight"])
    ema["a.wte.weight"] = torch.ones(15, 4)
    torch.save({"model": {f"a.{k}": t for k, t in state.items()}, "ema": ema}, tmp_path / "in.pt")
    ran = cli("conform", *arguments, "--force")
    assert (ran.code, "'ema' has more rows of 'wte.weight'" in ran.err) == (3, True), ran.err


def test_an_optimizer_that_is_not_written_is_no_obstacle(cli: Cli, tmp_path: Path) -> None:
    state, like = llama(rows=50), fused(llama(rows=64))
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": state, "optimizer": optimizer}, tmp_path / "in.pt")
    torch.save(like, tmp_path / "like.pt")
    arguments = ("--like", tmp_path / "like.pt", "--pad-vocab")
    assert cli("conform", tmp_path / "in.pt", tmp_path / "out.pt", *arguments).code == 3
    ran = cli("conform", tmp_path / "in.pt", tmp_path / "out.safetensors", *arguments)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("flag", [("--check-values",), ("--like-state", "ema"), ("--like", "a.pt"), None])
def test_what_a_model_can_not_say_is_refused(flag: tuple[str, ...] | None, cli: Cli, tmp_path: Path) -> None:
    save_file(llama(), tmp_path / "in.safetensors")
    model = () if flag is None else ("--model", "no.py:net", *flag)
    ran = cli("conform", tmp_path / "in.safetensors", tmp_path / "out.pt", *model)
    said = "name the other side" if flag is None else "not two" if "--like" in flag else flag[0]
    assert (ran.code, said in ran.err) == (2, True), ran.err
    with ckpttool.open(tmp_path / "in.safetensors") as checkpoint, pytest.raises(UsageFault):
        conform(checkpoint, {"a": StateEntry((1,), "float32", "a")}, check_values=True)


def test_what_would_be_done_is_said_and_nothing_written(cli: Cli, tmp_path: Path) -> None:
    save_file(llama(), tmp_path / "in.safetensors")
    save_file(fused(llama()), tmp_path / "like.safetensors")
    arguments = ("conform", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--dry-run")
    ran = cli(*arguments, "--like", tmp_path / "like.safetensors")
    assert ran.code == 0
    assert "model.layers.{0..1}.mlp.gate_proj.weight" in ran.out
    header, *lines = ran.out.splitlines()[1:]
    assert header.split() == ["from", "to", "shape", "steps", "by"]
    ends = {line[header.index("by") :] for line in lines}  # the columns are aligned
    assert (ends, any("concat" in line for line in lines)) == ({"name", "role", ""}, True)
    found = cli(*arguments, "--like", tmp_path / "like.safetensors", "--json").json
    assert {entry["rests_on"] for entry in found["mapping"]} == {"name", "role"}
    assert not (tmp_path / "out.safetensors").exists()


def test_a_model_says_the_same_as_a_checkpoint_of_it(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch.nn import Linear, Sequential\n\n\n"
        "def net():\n    return Sequential(Linear(3, 4), Linear(4, 2))\n"
    )
    state = filled({"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4), "b.bias": (2,)})
    save_file(state, tmp_path / "in.safetensors")
    ran = cli(
        "conform", tmp_path / "in.safetensors", tmp_path / "out.pt", "--model", f"{tmp_path}/nets.py:net"
    )
    assert ran.code == 0, ran.err
    made = torch.load(tmp_path / "out.pt")
    assert same(made, renamed(state, {"a": "0", "b": "1"}))


# ---- bounds --------------------------------------------------------------------------------------------


def many(experts: int, layers: int, words: tuple[str, ...]) -> dict[str, StateEntry]:
    """Return the places of a mixture of experts."""
    gate, up, down, moe, attention = words
    places = {}
    for layer in range(layers):
        for letter in "qkvo":
            places[f"model.layers.{layer}.{attention}.{letter}_proj.weight"] = (16, 16)
        for expert in range(experts):
            block = f"model.layers.{layer}.{moe}.experts.{expert}"
            places |= {f"{block}.{gate}.weight": (24, 16), f"{block}.{up}.weight": (24, 16)}
            places[f"{block}.{down}.weight"] = (16, 24)
    return {name: StateEntry(shape, "float32", name) for name, shape in places.items()}


@pytest.mark.long
def test_the_search_takes_time_in_proportion(tmp_path: Path) -> None:
    words = ("gate_proj", "up_proj", "down_proj", "mlp", "self_attn"), ("w1", "w3", "w2", "moe", "self_attn")
    seconds = []
    for layers in (4, 16):
        left, right = (many(64, layers, each) for each in words)
        took = []
        for _ in range(2):  # a collection of garbage may fall into one
            started = time.process_time()
            found = search("in", left, right)
            took.append(time.process_time() - started)
        seconds.append(min(took))
        assert not (found.left or found.right or found.tangles or found.falling)
        assert found.matches and all(len(each.joint.ways) == 1 for _, each in found.matches)
    assert seconds[1] < 12 * seconds[0]


@pytest.mark.parametrize(
    "name",
    [
        "." * 3000,
        "a." * 2000 + "b",
        "\0.\0.weight",
        "{e}.{i}.weight",
        "9" * 400 + ".weight",
        "²٣.٣.weight",
        "-",
        "*.?",
    ],
)
def test_hostile_names_come_over_or_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    state = filled({name: (4, 3), "plain.weight": (5,)})
    made, _ = brought({f"module.{k}": v for k, v in state.items()}, others(state), tmp_path)
    assert same(made, state)


def test_an_optimizer_that_numbers_parameters_in_another_order_than_the_reference_is_refused(
    tmp_path: Path,
) -> None:
    layers = {f"lin{i}": torch.nn.Linear(size, size + 1) for i, size in enumerate((3, 5, 7))}
    net = torch.nn.ModuleDict(layers)
    adam = torch.optim.Adam(net.parameters())
    for layer in layers.values():
        layer(torch.ones(1, layer.in_features)).sum().backward()
    adam.step()
    torch.save({"model": net.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "in.pt")
    turned = torch.nn.ModuleDict({f"fc{i}": layers[f"lin{i}"] for i in (2, 1, 0)})
    torch.save(turned.state_dict(), tmp_path / "ref.pt")
    with (
        pytest.raises(Refused, match="numbers the parameters"),
        ckpttool.open(tmp_path / "in.pt") as checkpoint,
    ):
        ckpttool.conform(checkpoint, tmp_path / "ref.pt")


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_buffers_may_stand_in_another_order_where_momentum_tells_which_they_are(
    momentum: float, tmp_path: Path
) -> None:
    net = torch.nn.ModuleDict({f"lin{i}": torch.nn.Linear(size, size + 1) for i, size in enumerate((3, 5))})
    net["lin0"].register_buffer("gain", torch.ones(2))
    sgd = torch.optim.SGD(net.parameters(), momentum=momentum)
    for layer in net.values():
        layer(torch.ones(1, layer.in_features)).sum().backward()
    sgd.step()
    torch.save({"model": net.state_dict(), "optimizer": sgd.state_dict()}, tmp_path / "in.pt")
    state = {f"body.{name}": tensor for name, tensor in net.state_dict().items()}
    torch.save({"body.lin0.gain": state.pop("body.lin0.gain"), **state}, tmp_path / "ref.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        if momentum:
            made, _ = ckpttool.conform(checkpoint, tmp_path / "ref.pt")
            assert {*made.state().tensors} == {"body.lin0.gain", *state}
        else:
            with pytest.raises(Refused, match="nothing says which of 5 tensors are some"):
                ckpttool.conform(checkpoint, tmp_path / "ref.pt")


def test_codes_are_renamed_and_never_turned_without_their_scales(tmp_path: Path) -> None:
    codes = torch.rand(64, 128).to(torch.float8_e4m3fn)
    state = {"m.weight": codes, "m.weight_scale": torch.rand(64, 1)}
    with pytest.raises(Refused, match=r"'m\.weight' is packed, and its codes can't be laid out without"):
        brought(state, {**state, "m.weight": torch.rand(128, 64).to(codes.dtype)}, tmp_path)
    made, _ = brought(state, renamed(state, {"m": "layers"}), tmp_path)
    assert made["layers.weight"].view(torch.uint8).equal(codes.view(torch.uint8))


# ---- Pairs of public architectures with their libraries: right or refused, and right by values; never wrong


QUICK = [pair for pair in pairs() if f"{pair.left} <-> {pair.right}".startswith(KEPT)]


@pytest.mark.parametrize("pair", QUICK, ids=lambda pair: f"{pair.left} to {pair.right}")
def test_a_pair_is_right_or_refused_both_ways(pair: Pair) -> None:
    try:
        made = pair.make()
    except ImportError as missing:
        pytest.skip(f"needs {missing.name}")
    found = results(made)
    assert {each.word for each in found[:2]} <= {"right", "refused"}
    assert [each.word for each in found[2:]] == ["right"] * len(found[2:])


def test_the_recorded_pairs_are_those_that_are_quick() -> None:
    assert len(QUICK) >= len(KEPT)


def test_what_has_no_counterpart_is_left_out_by_the_command_that_is_named(cli: Any, here: Path) -> None:
    state = {"fc.weight": torch.randn(4, 3), "fc.bias": torch.randn(4)}
    more = {"old[0].weight": torch.ones(5), "old[0].bias": torch.ones(6), "x.weight": torch.ones(2, 7)}
    torch.save(state, "ref.pt")
    torch.save({**state, **more}, "in.pt")
    said = cli("conform", "in.pt", "out.pt", "--like", "ref.pt")
    assert said.code == 1
    command = said.err.partition("conform that: ckpttool ")[2].splitlines()[0].replace("PART", "less.pt")
    assert cli(*shlex.split(command)).code == 0
    assert torch.load("less.pt").keys() == state.keys()


@pytest.mark.parametrize("inside", [True, False])
def test_an_adapter_in_a_state_is_not_to_be_left_out(cli: Any, here: Path, inside: bool) -> None:
    state = {"fc.weight": torch.randn(4, 3), "fc.bias": torch.randn(4)}
    torch.save(state, "ref.pt")
    held = {f"fc.{'base_layer.' if inside else ''}{name[3:]}": each for name, each in state.items()}
    torch.save(
        {**held, "fc.lora_A.default.weight": torch.ones(2, 3), "fc.lora_B.default.weight": torch.ones(4, 2)},
        "in.pt",
    )
    said = cli("conform", "in.pt", "out.pt", "--like", "ref.pt")
    assert said.code == 1
    assert "a LoRA adapter's weights: ckpttool merge-lora" in said.err
