"""Match the layers of two blocks, by names, by the roles that names tell, by shapes and by numbers.

A word is listed only where it means the same everywhere. Where families differ (`query_key_value` is fused
head by head in GPT-NeoX, and in three pieces in ChatGLM), the word says which parts there are and not how
they lie, and only values decide.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile

from .modules import Module, Parts, Sizes, by_numbers, paired_by_numbers, pattern, without_numbers
from .ways import Joint, Unit, joint, with_layouts, with_turns

Role = tuple[str, ...]  # the parts that a layer holds: ("q",), or ("q", "k", "v") of a fused one

# What stands behind the name of a norm or of a layer's scale without meaning anything
IDLE = ("scale", "gamma", "g", "lambda1", "linear", "base_layer")

_WORDS = {"q": "query", "k": "key", "v": "value"}
_LETTERS = {
    a: f"(?i:w_?{a}|{a}|{word}|{a}_?proj|(to|c|linear|attn)_{a}|{a}_lin(ear)?|{word}_?(proj|layer)|{a}_net)"
    for a, word in _WORDS.items()
}
_NORMS = {
    f"{a} norm": f"({a}_norm|norm_{a}|{word}_norm|{word}_layernorm|{a}_layernorm|ln_{a}|attn_{a}_norm)"
    for a, word in _WORDS.items()
}
_SINGLE = {
    **_LETTERS,
    **_NORMS,
    "gate": "(gate_proj|wi_0|fc1_g|ffn_gate)",
    "up": "(up_proj|wi_1|fc1_x)",
    "down": "(down_proj|ffn_down)",
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


def role_alone(parts: Parts) -> Role:
    """Return the role of a module that its own name says, whatever stands beside it."""
    return _by_word(_bare(parts))


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
        for up, down in (("w3", "w2"), ("w2", "w3")):
            if len(group) == 3 and shapes["w1"] == shapes[up] != shapes[down]:
                yield from ((group["w1"], ("gate",)), (group[up], ("up",)), (group[down], ("down",)))


NORM = re.compile(r"(?i)(norm|(^|[._])ln)[\w.]*$")
LONGEST = 256  # characters of a name's end that are looked at: each is tried as a beginning


def _norms(modules: Sequence[tuple[Parts, Sizes]]) -> Iterable[tuple[int, Role]]:
    """Yield the roles of a block's two norms, if no third is beside them."""
    paths = [_bare(parts) for parts, _ in modules]
    norms = [place for place, path in enumerate(paths) if NORM.search(path[-LONGEST:])]
    if len(norms) < 2:
        return
    sizes = {place: modules[place][1] for place in norms}
    for first, second in NORM_PAIRS:
        before = [place for place in norms if _ends(paths[place], first)]
        last = [place for place in norms if _ends(paths[place], second) and place not in before]
        if len(before) == len(last) == 1 and sum(size == sizes[last[0]] for size in sizes.values()) == 2:
            yield from ((before[0], ("norm 1",)), (last[0], ("norm 2",)))
            return


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")


# ---- Matching the layers of two blocks
#
# In this order, from certain to weak: equal names, equal roles, pieces of a fused layer by their roles, a
# shape that only one layer has on each side, and numbers that rise on both sides. Layers that nothing
# tells apart stay a `Tangle`.


@dataclass(frozen=True, slots=True)
class Match:
    """Layers of one side that become layers of the other.

    Attributes:
        left, right: their places among the units of the block; one of the two has a single place.
        joint: how the several make up the single one.
        rests: what it rests on: "name", "role", "shape", "numbers", "order" or "values".
    """

    left: tuple[Unit, ...]
    right: tuple[Unit, ...]
    joint: Joint
    rests: str

    @property
    def is_split(self) -> bool:
        """Whether the whole is on the left."""
        return len(self.right) > 1 or len(self.right[0].members) > len(self.left[0].members)


@dataclass(frozen=True, slots=True)
class Tangle:
    """Layers of equal shapes that nothing tells apart."""

    left: tuple[Unit, ...]
    right: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Doubts:
    """What names are not believed to say."""

    rotary: Set[Parts]  # the towers whose queries and keys may be in the order of another rotary embedding
    layout: bool = False  # how the pieces of fused layers lie


def solve(left: Sequence[Module], right: Sequence[Module], cut: tuple[int, int], doubts: Doubts) -> Solution:
    """Match the layers of two blocks.

    Args:
        left, right: the layers.
        cut: how many parts of their names belong to the blocks, on each side.
        doubts: what names are not believed to say.
    """
    units = [[Unit(m.parts[n:], (m,)) for m in side] for side, n in zip((left, right), cut, strict=True)]
    work = Solution(units[0], units[1], doubts)
    work.run()
    work.left, work.right = families(work.left), families(work.right)
    work.run()
    work.stacked()
    work.left, work.right = alone(work.left), alone(work.right)
    work.tangle()
    work.left, work.right = families(work.left), families(work.right)
    return work


def families(units: Iterable[Unit]) -> list[Unit]:
    """Return layers that differ in one number of their names alone as one unit, in its order."""
    groups: dict[tuple[object, ...], list[Unit]] = defaultdict(list)
    for unit in units:
        groups[without_numbers(unit.parts), unit.first.signature].append(unit)
    made: list[Unit] = []
    for group in groups.values():
        order = by_numbers([unit.parts for unit in group]) if len(group) > 1 else None
        if order is None:
            made += group
            continue
        sample = [*zip(*(unit.parts for unit in group), strict=True)]
        parts = tuple("#" if len({*column}) > 1 else column[0] for column in sample)
        made.append(Unit(parts, tuple(group[place].first for place in order)))
    return made


def alone(units: Iterable[Unit]) -> list[Unit]:
    """Return the members of units, each as one again."""
    return [
        Unit(module.parts[len(module.parts) - len(unit.parts) :], (module,))
        for unit in units
        for module in unit.members
    ]


@dataclass(slots=True)
class Solution:
    """The layers of two blocks: what is matched, and what has no counterpart so far."""

    left: list[Unit]  # without a counterpart
    right: list[Unit]
    doubts: Doubts
    matches: list[Match] = field(default_factory=list)
    tangles: list[Tangle] = field(default_factory=list)
    numbered: list[tuple[list[Unit], list[Unit]]] = field(default_factory=list)  # paired by numbers
    roles: dict[int, Role] = field(default_factory=dict)

    def run(self) -> None:
        """Match what can be matched, the certain first."""
        self.roles = {}
        for side in (self.left, self.right):
            found = roles([(unit.first.parts, unit.weight) for unit in side])
            self.roles.update(zip(map(id, side), found, strict=True))
        self._by(self._names(), "name")
        self._by([[*map(self._role, side)] for side in (self.left, self.right)], "role")
        self._fused(reverse=False)
        self._fused(reverse=True)
        self._by_shapes()

    def _role(self, unit: Unit) -> Role:
        return self.roles.get(id(unit), ())

    def _either(self, left: Unit, right: Unit) -> Role:
        return self._role(left) or self._role(right)

    def _names(self) -> list[list[Parts]]:
        """Return the names of both sides, () where the other side counts otherwise: from 1 and not from 0."""
        sides = [[unit.parts for unit in side] for side in (self.left, self.right)]
        groups: list[dict[Parts, set[Parts]]] = [defaultdict(set), defaultdict(set)]
        for side, group in zip(sides, groups, strict=True):
            for parts in side:
                group[pattern(parts)].add(parts)
        same = {bare for bare, names in groups[0].items() if groups[1].get(bare) == names}
        return [[parts if pattern(parts) in same else () for parts in side] for side in sides]

    def _take(self, *taken: Match) -> None:
        self.matches += taken
        self._leave(*((*match.left, *match.right) for match in taken))

    def _leave(self, *units: Sequence[Unit]) -> None:
        gone = {id(unit) for each in units for unit in each}
        self.left = [unit for unit in self.left if id(unit) not in gone]
        self.right = [unit for unit in self.right if id(unit) not in gone]

    def _by(self, names: Sequence[Sequence[tuple[str, ...]]], rests: str) -> None:
        """Match units of which one on each side has a key."""
        keys = [_once(each, side) for each, side in zip(names, (self.left, self.right), strict=True)]
        pairs = [(keys[0][name], keys[1][name]) for name in keys[0] if name and name in keys[1]]
        taken = []
        for left, right in pairs:
            if (found := one(left, right)) is not None:
                found = self._doubted(found, self._either(left, right), (left,), right)
                taken.append(Match((left,), (right,), found, rests))
        self._take(*taken)

    def _doubted(self, found: Joint, role: Role, pieces: Sequence[Unit], whole: Unit) -> Joint:
        """Return a joint with the ways that names leave open."""
        alike = all(piece.first.parts[-2:-1] == whole.first.parts[-2:-1] for piece in pieces)
        same = len(pieces) == 1 and pieces[0].first.parts[-1:] == whole.first.parts[-1:]
        rotated = [is_rotary((part,)) for part in role]
        towers = [stem(unit.first.parts) for unit in (*pieces, whole)]
        rotary = any(rotated) and all(tower in self.doubts.rotary for tower in towers)
        rotary = rotary and (self.doubts.layout or not (alike and (same or len(role) > 1)))
        if len(pieces) == 1 and len(role) > 1:  # both fused, perhaps each in its own layout
            unclear = not same and any(is_unclear(unit.first.parts) for unit in (*pieces, whole))
            others = [replace(way, groups=0) for way in found.ways] if unclear or rotary else []
            return replace(found, ways=(*found.ways, *others))
        if len(pieces) > 1:
            unclear = self.doubts.layout or is_unclear(whole.first.parts)
            # gpt-oss deals gate and up out to even and odd rows, other families of this layout do not
            dealt = unclear or (role[-1].endswith("up") and found.ways[0].transposed)
            found = with_layouts(found, by_order=unclear, dealt=dealt)
        return with_turns(found, rotated) if rotary else found

    def _fused(self, *, reverse: bool) -> None:
        """Match layers that hold several roles with those that hold one each."""
        whole_side, piece_side = (self.left, self.right) if reverse else (self.right, self.left)
        single = {role[0]: unit for unit in piece_side if len(role := self._role(unit)) == 1}
        for whole in whole_side:
            role = self._role(whole) or perhaps(whole.first.parts)
            if len(role) < 2 or any(part not in single for part in role):
                continue
            pieces = [single[part] for part in role]
            if (found := joint(pieces, whole)) is None:
                continue
            found = self._doubted(found, role, pieces, whole)
            one_side, other = ((whole,), (*pieces,)) if reverse else ((*pieces,), (whole,))
            self._take(Match(one_side, other, found, "role"))

    def _by_shapes(self) -> None:
        """Match units by shapes that few have, and by numbers that rise on both sides."""
        weights: dict[object, set[Sizes]] = defaultdict(set)
        for unit in self.right:
            weights[unit.normal].add(unit.weight)
        for exact in (True, False):
            taken = []
            for left, right in self._classes(exact):
                pairs, rests = _paired(left, right)
                joints = [one(*pair) for pair in pairs]
                if not pairs or not all(joints) or self._conflict(pairs):
                    continue
                if rests == "numbers":
                    self.numbered.append(([a for a, _ in pairs], [b for _, b in pairs]))
                crossed = exact and len(weights[left[0].normal]) > 1
                for (a, b), found in zip(pairs, filter(None, joints), strict=True):
                    found = self._doubted(replace(found, is_crossed=crossed), self._either(a, b), (a,), b)
                    taken.append(Match((a,), (b,), found, rests))
            self._take(*taken)

    def tangle(self) -> None:
        """Set apart what has as many counterparts as it counts itself, none likelier than another."""
        for left, right in self._classes(exact=True):
            if len(left) == len(right):
                self.tangles.append(Tangle(tuple(left), tuple(right)))
                self._leave(left, right)

    def _conflict(self, pairs: Sequence[tuple[Unit, Unit]]) -> bool:
        """Return whether roles speak against pairs: two that differ, or one that numbers can't vouch for."""
        both = [(self._role(left), self._role(right)) for left, right in pairs]
        if len(pairs) > 1 and any(a != b and not (a or b)[0].startswith("norm") for a, b in both):
            return True
        return any(a and b and a != b for a, b in both)

    def _classes(self, exact: bool) -> Iterator[tuple[list[Unit], list[Unit]]]:
        """Yield the units of both sides that have one signature, or one but for the order of axes."""
        sides = []
        for side in (self.left, self.right):
            groups: dict[object, list[Unit]] = defaultdict(list)
            for unit in side:
                groups[(len(unit.members), unit.first.signature) if exact else unit.normal].append(unit)
            sides.append(groups)
        yield from ((units, sides[1][key]) for key, units in sides[0].items() if key in sides[1])

    def stacked(self) -> None:
        """Match the few units left that fit only one other as a stack, or in axes of size 1."""
        if len(self.left) * len(self.right) > MOST_PAIRS:
            return
        fits = [(a, b, found) for a in self.left for b in self.right if (found := one(a, b)) is not None]
        often = Counter(id(unit) for left, right, _ in fits for unit in (left, right))
        for left, right, found in fits:
            if often[id(left)] == often[id(right)] == 1:
                self._take(Match((left,), (right,), found, "shape"))


MOST_PAIRS = 10_000


def one(left: Unit, right: Unit) -> Joint | None:
    """Return how one unit becomes another: as it is, transposed, stacked or taken apart."""
    if len(right.members) > len(left.members):
        return joint([right], left)
    return joint([left], right)


def _once(keys: Sequence[tuple[str, ...]], units: Sequence[Unit]) -> dict[tuple[str, ...], Unit]:
    """Return units by their keys, without keys that several have."""
    found: dict[tuple[str, ...], Unit] = {}
    twice: set[tuple[str, ...]] = set()
    for key, unit in zip(keys, units, strict=True):
        twice |= {key} if key in found else set()
        found[key] = unit
    return {key: unit for key, unit in found.items() if key not in twice}


def _paired(left: Sequence[Unit], right: Sequence[Unit]) -> tuple[list[tuple[Unit, Unit]], str]:
    """Return which of several units of equal shape become which, and why; [] where nothing tells."""
    if len(left) != len(right):
        return [], ""
    if len(left) == 1:
        return [(left[0], right[0])], "shape"
    pairs = paired_by_numbers([unit.parts for unit in left], [unit.parts for unit in right])
    return [(left[a], right[b]) for a, b in pairs], "numbers"
