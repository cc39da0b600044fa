"""What names say: which part a layer plays in its block, in the words that model families use for it.

A word is listed only where it means the same everywhere. Where families differ (`query_key_value` is fused
head by head in GPT-NeoX, and in three pieces in ChatGLM), the word says which parts there are and not how
they lie, and only values decide.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import takewhile

from .modules import Parts, Sizes, pattern

Role = tuple[str, ...]  # the parts that a layer holds: ("q",), or ("q", "k", "v") of a fused one

# What stands behind the name of a norm or of a layer's scale without meaning anything
IDLE = ("scale", "gamma", "g", "lambda1", "linear", "base_layer")

_WORDS = {"q": "query", "k": "key", "v": "value"}
_LETTERS = {
    a: f"(?i:w_?{a}|{a}|{word}|{a}_?proj|to_{a}|{a}_lin(ear)?|c_{a}|{word}_?(proj|layer)|linear_{a}|{a}_net)"
    for a, word in _WORDS.items()
}
_NORMS = {
    f"{a} norm": f"({a}_norm|norm_{a}|{word}_norm|{word}_layernorm|{a}_layernorm|ln_{a})"
    for a, word in _WORDS.items()
}
_SINGLE = {
    **_LETTERS,
    **_NORMS,
    "gate": "(gate_proj|wi_0|fc1_g)",
    "up": "(up_proj|wi_1|fc1_x)",
    "down": "down_proj",
    "embedding": "(embed_tokens|tok_embeddings|wte|word_embeddings|token_embedding|embed_in|token_embd)",
    "head": "(lm_head|output|embed_out|unembed)",
}
# Fused layers whose pieces lie one after another, in this order
_FUSED: dict[Role, str] = {
    ("q", "k", "v"): "(qkv|to_qkv|Wqkv|in_proj|(self_attn|attention).qkv_proj)",
    ("k", "v"): "(kv|to_kv|Wkv)",
    ("gate", "up"): "(gate_up_proj|w13|w12|weights_in)",
}
# Fused layers of which the name does not say how the pieces lie
_UNCLEAR: dict[Role, str] = {
    ("q", "k", "v"): "(query_key_value|linear_qkv|wqkv|c_attn|W_pack|qkv_proj|att_proj|attn_qkv|qkv_linear)",
    ("gate", "up"): "gate_up",
}
# Layers that hold both where the other side has both, and one alone elsewhere
_PERHAPS: dict[Role, str] = {("gate", "up"): "(linear_fc1|dense_h_to_4h|Wi|fc1|input_linear)"}


def _compiled(words: dict[Role, str]) -> list[tuple[Role, re.Pattern[str]]]:
    return [(role, re.compile(rf"(?:^|.*\.){expression}")) for role, expression in words.items()]


SINGLE = _compiled({(role,): expression for role, expression in _SINGLE.items()})
FUSED, UNCLEAR, PERHAPS = map(_compiled, (_FUSED, _UNCLEAR, _PERHAPS))
ACROSS = re.compile(r"(^|\.)(cross\w*|encoder_attn|EncDecAttention|multihead_attn|enc_dec_attn)(\.|$)")

# The two norms of a block, that of its attention first
NORM_PAIRS = (
    ("input_layernorm", "post_attention_layernorm"),
    ("attention_norm", "ffn_norm"),
    ("attn_norm", "ffn_norm"),
    ("attn_norm", "mlp_norm"),
    ("sa_norm", "mlp_norm"),
    ("ln_1", "ln_2"),
    ("ln1", "ln2"),
    ("norm1", "norm2"),
    ("norm_1", "norm_2"),
    ("layernorm1", "layernorm2"),
    ("layer_norm1", "layer_norm2"),
    ("layernorm_before", "layernorm_after"),
    ("self_attn_layer_norm", "final_layer_norm"),
    ("sa_layer_norm", "output_layer_norm"),
    ("ln_pre", "ln_post"),
    ("pre_layrnorm", "post_layernorm"),
    ("attention.output.LayerNorm", "output.LayerNorm"),
)

# Names of embeddings of positions: a tower that has one hardly rotates its queries and keys
POSITIONS = re.compile(
    r"(^|[._])(wpe|pos(ition(al)?)?_emb\w*|embed_positions|relative_\w*|rel_pos\w*)($|[._])"
)


def stem(parts: Parts) -> Parts:
    """Return the part of a name before its first number: the tower that a layer belongs to."""
    return tuple(takewhile(lambda part: not re.search(r"\d", part), parts))


def rotary_stems(names: Iterable[Parts]) -> set[Parts]:
    """Return the towers of layers with attention that no embedding of positions is nearest to.

    A file may hold an image model with learned positions beside a language model that rotates its queries.
    """
    kinds = {pattern(parts): parts for parts in names}
    towers = {stem(parts) for parts in kinds.values() if "q" in [p[-1:] for p in _by_word(_bare(parts))]}
    if not towers:
        return set()
    learned = [parts for bare, parts in kinds.items() if POSITIONS.search(".".join(bare))]

    def nearness(parts: Parts, tower: Parts) -> int:
        return len([*takewhile(lambda pair: pair[0] == pair[1], zip(parts, tower, strict=False))])

    served: set[Parts] = set()
    for parts in learned:
        near = {tower: nearness(parts, tower) for tower in towers}
        served |= {tower for tower, count in near.items() if count == max(near.values())}
    return towers - served


def is_rotary(role: Role) -> bool:
    """Return whether rows of this part lie in another order for another rotary embedding."""
    return role[-1].removeprefix("cross ") in ("q", "k", "q norm", "k norm")


def roles(modules: Sequence[tuple[Parts, Sizes]]) -> list[Role]:
    """Return the role of each module among those of one block; () where its name says none for certain.

    Args:
        modules: its path, and the shape of its weight.
    """
    found = [_by_word(_bare(parts)) for parts, _ in modules]
    for place, role in [*_swiglu(modules), *_norms(modules)]:
        found[place] = role
    often = Counter(found)
    return [role if often[role] == 1 else () for role in found]


def is_unclear(parts: Parts) -> bool:
    """Return whether a fused layer's name leaves open how its pieces lie."""
    return not _first(FUSED, _bare(parts))


def perhaps(parts: Parts) -> Role:
    """Return the parts that a layer may hold, as the other side has them."""
    return _first(PERHAPS, _bare(parts))


def _bare(parts: Parts) -> str:
    while len(parts) > 1 and parts[-1] in IDLE:
        parts = parts[:-1]
    return ".".join(parts)


def _first(words: list[tuple[Role, re.Pattern[str]]], path: str) -> Role:
    return next((role for role, expression in words if expression.fullmatch(path)), ())


def _by_word(path: str) -> Role:
    role = _by_end(".".join(path.rsplit(".", 2)[-2:]))
    return tuple(f"cross {part}" for part in role) if role and ACROSS.search(path) else role


@lru_cache(1 << 16)
def _by_end(path: str) -> Role:
    return _first(SINGLE, path) or _first(FUSED, path) or _first(UNCLEAR, path)


def _swiglu(modules: Sequence[tuple[Parts, Sizes]]) -> Iterable[tuple[int, Role]]:
    """Yield the roles of w1, w2 and w3, which families number differently: the shape says which is `down`."""
    groups: dict[Parts, dict[str, int]] = defaultdict(dict)
    for place, (parts, _) in enumerate(modules):
        if re.fullmatch("w[123](_[A-Z]+)?", parts[-1]):  # torchtitan's `w1_EFD` names the axes
            groups[parts[:-1]][parts[-1][:2]] = place
    for group in groups.values():
        shapes = {name: modules[place][1] for name, place in group.items()}
        if len(group) == 3 and shapes["w1"] == shapes["w3"] != shapes["w2"]:
            yield from ((group["w1"], ("gate",)), (group["w3"], ("up",)), (group["w2"], ("down",)))
        elif len(group) == 3 and shapes["w1"] == shapes["w2"] != shapes["w3"]:
            yield from ((group["w1"], ("gate",)), (group["w2"], ("up",)), (group["w3"], ("down",)))


LONGEST = 256  # characters of a name's end that are looked at: each is tried as a beginning


def _norms(modules: Sequence[tuple[Parts, Sizes]]) -> Iterable[tuple[int, Role]]:
    """Yield the roles of a block's two norms, if no third is beside them."""
    paths = [_bare(parts) for parts, _ in modules]
    word = re.compile(r"(?i)(norm|(^|[._])ln)[\w.]*$")
    norms = [place for place, path in enumerate(paths) if word.search(path[-LONGEST:])]
    sizes = {place: modules[place][1] for place in norms}
    for first, second in NORM_PAIRS:
        before = [place for place in norms if _ends(paths[place], first)]
        last = [place for place in norms if _ends(paths[place], second) and place not in before]
        if len(before) == len(last) == 1 and sum(size == sizes[last[0]] for size in sizes.values()) == 2:
            yield from ((before[0], ("norm 1",)), (last[0], ("norm 2",)))
            return


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")
