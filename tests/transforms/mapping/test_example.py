"""The rule file on the page of maps does what the page says of it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ckpttool.transforms.mapping.builtin import names
from ckpttool.transforms.mapping.rule_file import VERBS, rules_in
from ckpttool.transforms.mapping.rules import MapRules, Rule, Tie
from tests.support.dialects import LLAMA
from tests.support.mapped import assert_reversible, random_state
from tests.support.running import ROOT

PAGE = (ROOT / "docs" / "maps.md").read_text(encoding="utf-8")


def the_example() -> MapRules:
    return rules_in(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])


def test_the_example_makes_a_llama_and_goes_back(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (11, 8), "mlp_norms": (2, 8), "norm.weight": (8,)}
    for i in range(2):
        shapes |= {f"blocks.{i}.qkv.weight": (32, 8), f"blocks.{i}.out.weight": (8, 16)}
        shapes |= {
            f"blocks.{i}.mlp.gate": (8, 12),
            f"blocks.{i}.mlp.up": (8, 12),
            f"blocks.{i}.mlp.down": (12, 8),
        }
        shapes[f"blocks.{i}.norm.weight"] = (8,)
    ours = random_state(shapes)
    there = assert_reversible(ours, tmp_path, the_example(), config=LLAMA)
    qkv = ours["blocks.1.qkv.weight"]
    assert torch.equal(there["model.layers.1.self_attn.v_proj.weight"], qkv[24:])
    k = [16 + 4 * head + row for head in (0, 1) for row in (0, 2, 1, 3)]
    assert torch.equal(there["model.layers.1.self_attn.k_proj.weight"], qkv[k])
    assert torch.equal(there["model.layers.1.mlp.up_proj.weight"], ours["blocks.1.mlp.up"].t())
    assert torch.equal(there["model.layers.1.post_attention_layernorm.weight"], ours["mlp_norms"][1])
    assert there["lm_head.weight"].data_ptr() == there["model.embed_tokens.weight"].data_ptr()
    assert len(there) == 21


def test_the_page_names_every_map_and_every_step() -> None:
    assert {name for name in names() if f"`--map {name}`" not in PAGE} == set()
    assert {verb for verb in VERBS if f"| `{{ {verb} = " not in PAGE} == set()
    example = the_example()
    assert {type(rule) for rule in example.rules} > {Rule, Tie} and example.reversible
