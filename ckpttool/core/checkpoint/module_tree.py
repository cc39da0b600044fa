"""The modules of a state: their tree, read from names, and the kinds of BatchNorm layers in a header."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter, methodcaller
from os.path import commonprefix
from typing import Any, NamedTuple

from ..tensors.ref import TensorRef
from .state import BUFFERS

KINDS_TEXT = "batchnorm.kinds"  # its name in the header
COMFY_TEXT = "_quantization_metadata"  # that of ComfyUI's settings of packed layers
TORCHAO_TEXT = "tensor_names"  # that of torchao's list of tensors that it took apart


EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared", "embeddings"}


POSITIONS = {"wpe", "shared", "embeddings"}


def is_embedding(name: str) -> bool:
    """Return whether a name is that of the weight of an embedding of tokens, as transformers names them."""
    return name.removesuffix(".weight").rpartition(".")[2] in EMBEDDINGS


def is_output(name: str) -> bool:
    """Return whether a name is that of the weight of a layer whose outputs are tokens."""
    return f".{name}".endswith(".lm_head.weight")


def kinds_in(metadata: Mapping[str, str]) -> dict[Any, object]:
    """Return layer -> kind, as a conversion has recorded them; whatever else is there counts for nothing."""
    return _object(metadata, KINDS_TEXT)


def declares_packing(metadata: Mapping[str, str]) -> str:
    """Return the name of the text by which a header says how its tensors are packed; "" for none."""
    if COMFY_TEXT in metadata and _object(metadata, COMFY_TEXT).get("layers", True):
        return COMFY_TEXT
    is_of_torchao = any('"_type"' in text for text in metadata.values())
    return TORCHAO_TEXT if TORCHAO_TEXT in metadata and is_of_torchao else ""


def _object(metadata: Mapping[str, str], name: str) -> dict[Any, Any]:
    try:
        said = json.loads(metadata.get(name, "{}"))
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def with_kinds(metadata: Mapping[str, str], kinds: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of a header with these kinds recorded, or with no record for none."""
    new = {name: value for name, value in metadata.items() if name != KINDS_TEXT}
    return {**new, KINDS_TEXT: json.dumps(dict(kinds), sort_keys=True)} if kinds else new


def moved_kinds(
    metadata: Mapping[str, str], keys: Iterable[str], kept: Iterable[str], module: Callable[[str], str] = str
) -> Mapping[str, str]:
    """Return the texts of a header with layers under their new paths, in the record of kinds and ComfyUI's.

    A layer that had keys and keeps none is left out; others without keys stay.
    """
    said, kinds = _object(metadata, COMFY_TEXT), kinds_in(metadata)
    layers = said.get("layers")
    if not kinds and not isinstance(layers, dict):
        return metadata
    before, after = ({key.rpartition(".")[0] for key in names} for names in (keys, kept))
    gone = before - after

    def moved(of_layers: Mapping[str, object]) -> dict[str, object]:
        return {module(path): value for path, value in of_layers.items() if path not in gone}

    if isinstance(layers, dict):
        metadata = {**metadata, COMFY_TEXT: json.dumps({**said, "layers": moved(layers)})}
    return with_kinds(metadata, moved(kinds)) if kinds else metadata


def orientations(tensors: Mapping[str, TensorRef]) -> dict[tuple[str, bool], str]:
    """Return layers by their parent and whether a bias says that they are Conv1D, not Linear."""
    layers: dict[tuple[str, bool], str] = {}
    for name, bias in tensors.items():
        layer = name.removesuffix(".bias")
        weight = tensors.get(f"{layer}.weight") if layer != name else None
        if weight is not None and len(weight.shape) == 2 and weight.shape[0] != weight.shape[1]:
            sizes = ((weight.shape[0],), (weight.shape[1],))
            if bias.shape in sizes:
                layers.setdefault((layer.rpartition(".")[0], bias.shape == sizes[1]), layer)
    return layers


# ---- The tree of modules; repeated blocks fold into one line.
#
# The tree is made from names alone: `layers.0.attn.weight` is a tensor `weight` in a module
# `layers.0.attn`.


MAX_LEVELS = 60  # real models have about 15

MAX_DIGITS = 9
# The largest number of a numbered module; of longer ones, the first digits count as text
MAX_NUMBER = 10**MAX_DIGITS - 1

NUMBERED = re.compile(rf"(.*?)(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Branch:
    """A module, a row of identical modules, or a tensor next to modules."""

    name: str  # its path below the branch above; `layers.0-11` is a row of twelve
    copies: int  # the number of identical modules in the row
    # parameters, nbytes: of all of them, in every copy of the modules around them; ties count once
    parameters: int
    nbytes: int
    count: int  # tensors in all of them
    # its own tensors by name, those of the first copy; `""` names a branch that is a tensor
    tensors: tuple[tuple[str, TensorRef], ...] = ()
    branches: tuple[Branch, ...] = ()  # its children, in the order of the state

    def lines(self, depth: int) -> Iterator[tuple[int, Branch]]:
        """Yield the branch and its descendants `depth` levels deep, each with its level."""
        stack = [(0, self)]
        while stack:
            level, branch = stack.pop()
            yield level, branch
            if level < depth:
                stack.extend((level + 1, inner) for inner in reversed(branch.branches))

    def depth_within(self, lines: int) -> int:
        """Return the most levels, at least one, that fit on `lines` lines."""
        depth, level, count = 0, [self], 1
        while level := [inner for branch in level for inner in branch.branches]:
            count += len(level)
            if count > lines and depth:
                break
            depth += 1
        return depth


class _Form(NamedTuple):
    """What tensors of one form share, and what each counts for; one object per form."""

    dtype: str
    shape: tuple[int, ...]
    tied: bool
    parameters: int
    nbytes: int


class _Entries(NamedTuple):
    """Some tensors of a state, in columns: a tuple for each of 100,000 takes longer to make than to use."""

    names: list[str]
    tensors: list[TensorRef]
    forms: list[_Form]

    def part(self, begin: int, end: int) -> _Entries:
        return _Entries(self.names[begin:end], self.tensors[begin:end], self.forms[begin:end])


def outline(tensors: Mapping[str, TensorRef]) -> Branch:
    """Return the tree of a state's modules."""
    shared, dot, _ = commonprefix(list(tensors)).rpartition(".")  # noqa: RUF071 - of characters, as meant
    return _branch(shared, _entries(tensors), len(shared + dot), 1, 1, MAX_LEVELS)


def _entries(tensors: Mapping[str, TensorRef]) -> _Entries:
    """Return each tensor with its form, in C loops where possible: there may be a hundred thousand."""
    tied, is_buffer = _tied(tensors), methodcaller("endswith", BUFFERS)
    types, shapes = (map(attrgetter(name), tensors.values()) for name in ("dtype.name", "shape"))
    keys = list(zip(types, shapes, map(tied.__contains__, tensors), map(is_buffer, tensors), strict=True))
    of_key = dict(zip(keys, tensors.values(), strict=True))
    forms: dict[object, _Form] = {}
    for key, tensor in of_key.items():
        numel = 0 if key[2] else tensor.numel
        forms[key] = _Form(*key[:3], 0 if key[3] else numel, numel * tensor.dtype.itemsize)
    return _Entries([*tensors], [*tensors.values()], [*map(forms.__getitem__, keys)])


def _tied(tensors: Mapping[str, TensorRef]) -> set[str]:
    """Return the names of tensors that have an earlier name too."""
    storages = Counter(map(id, map(attrgetter("storage"), tensors.values())))
    if len(storages) == len(tensors):
        return set()
    first: dict[tuple[object, ...], str] = {}
    shared = ((name, tensor) for name, tensor in tensors.items() if storages[id(tensor.storage)] > 1)
    return {name for name, tensor in shared if first.setdefault(tensor.view, name) != name}


def _branch(name: str, entries: _Entries, start: int, copies: int, times: int, levels: int) -> Branch:
    """Return one module."""
    own, rows = _parted(entries, start) if levels else (entries, [])
    times *= copies
    inside = [
        _branch(row.label, row.first, start + len(row.name) + 1, row.copies, times, levels - 1)
        for row in rows
    ]
    if inside and own.names:  # tensors next to modules get their own lines, above them
        inside[:0] = [_leaf(entry, start, times) for entry in zip(*own, strict=True)]
        own = own.part(0, 0)
    if len(inside) == 1 and copies == 1:  # the module around it needs no line
        only = inside[0]
        return replace(only, name=f"{name}.{only.name}" if name else only.name)
    forms = entries.forms
    parameters, nbytes = (times * sum(map(attrgetter(each), forms)) for each in ("parameters", "nbytes"))
    tensors = tuple((key[start:], tensor) for key, tensor, _ in zip(*own, strict=True))
    return Branch(name, copies, parameters, nbytes, len(forms) * times, tensors, tuple(inside))


class _Row(NamedTuple):
    """Identical modules in a row."""

    name: str  # of the first
    last: str
    copies: int
    first: _Entries  # what is in the first

    @property
    def label(self) -> str:
        last = _place(self.last)
        return self.name if self.copies == 1 or not last else f"{self.name}-{last[1]}"


def _parted(entries: _Entries, start: int) -> tuple[_Entries, list[_Row]]:
    """Return a module's own tensors, and the rows of its child modules."""
    if row := _one_row(entries, start):
        return entries.part(0, 0), [row]
    own = _Entries([], [], [])
    modules: dict[str, _Entries] = {}
    for name, tensor, form in zip(*entries, strict=True):
        end = name.find(".", start)
        place = own if end < 0 else modules.get(name[start:end])
        if place is None:
            place = modules[name[start:end]] = _Entries([], [], [])
        place.names.append(name)
        place.tensors.append(tensor)
        place.forms.append(form)
    return own, [*_rows(modules, start)]


def _one_row(entries: _Entries, start: int) -> _Row | None:
    """Return the row that a module is made of, if it is one with ascending numbers; compared as a whole."""
    names, _, forms = entries
    end = names[0].find(".", start) if names else -1
    place = _place(names[0][start:end]) if end >= 0 else None
    if place is None:
        return None
    head, (text, number) = names[0][: end + 1], place
    of_one = next((at for at, name in enumerate(names) if not name.startswith(head)), len(names))
    count, rest = divmod(len(names), of_one)
    if rest or count == 1 or number + count > MAX_NUMBER or forms != forms[:of_one] * count:
        return None
    begin, inside = names[0][:start] + text, [name[end:] for name in names[:of_one]]
    if names != [f"{begin}{n}{tail}" for n in range(number, number + count) for tail in inside]:
        return None
    return _Row(names[0][start:end], f"{text}{number + count - 1}", count, entries.part(0, of_one))


def _leaf(entry: tuple[str, TensorRef, _Form], start: int, times: int) -> Branch:
    name, tensor, form = entry
    return Branch(name[start:], 1, form.parameters * times, form.nbytes * times, times, (("", tensor),))


def _rows(modules: Mapping[str, _Entries], start: int) -> Iterator[_Row]:
    """Yield rows of modules: each follows the last, continues its numbering, and is identical."""
    names: Iterable[str] = modules
    if all(map(str.isdecimal, modules)):  # safetensors has 10 before 2
        names = sorted(sorted(modules), key=len)
    row: list[str] = []
    before: _Kind = ()
    expected: str | None = None  # the name of the row's next module
    text, number = "", 0
    for name in names:
        kind = _kind(modules[name], start + len(name))
        if name == expected and kind == before:
            number += 1
        else:
            if row:
                yield _Row(row[0], row[-1], len(row), modules[row[0]])
            row = []
            text, number = _place(name) or (name, MAX_NUMBER)
        row.append(name)
        before, expected = kind, f"{text}{number + 1}" if number < MAX_NUMBER else None
    if row:
        yield _Row(row[0], row[-1], len(row), modules[row[0]])


def _kind(entries: _Entries, start: int) -> _Kind:
    """Return what makes two modules identical: types, shapes and names of tensors, in their order."""
    return *entries.forms, *(name[start:] for name in entries.names)


_Kind = tuple[_Form | str, ...]


def _place(name: str) -> tuple[str, int] | None:
    """Return a module's name as text and the number behind it; None when there is none."""
    text = name.rstrip("0123456789")
    digits = name[len(text) :]
    if digits[:1] in ("", "0") or len(digits) > MAX_DIGITS:  # some digits belong to the text
        found = NUMBERED.fullmatch(name)
        return (found[1], int(found[2])) if found else None
    return text, int(digits)


def tensors_in_words(branch: Branch, usual: str, most: int, *, brief: bool = False) -> str:
    """Return a branch's own tensors by name and shape: `weight 16×3×3×3; bias 16`."""

    def form(entry: tuple[str, TensorRef]) -> str:
        _, tensor = entry
        other = f" {tensor.dtype.name}" if tensor.dtype.name != usual else ""
        return shape_in_words(tensor.shape) + other

    words = []
    for of_form, group in groupby(branch.tensors[:most], form):
        names = [name for name, _ in group]
        shown = f"{names[0]} … {names[-1]}" if brief and len(names) > 2 else ", ".join(names)
        words.append(f"{shown} {of_form}".strip())
    more = len(branch.tensors) - most
    return "; ".join(words + [f"{more:,} more"] * (more > 0))


def shape_in_words(shape: Iterable[int]) -> str:
    """Return a shape as `16×3×3×3`, or `scalar`."""
    return "×".join(map(str, shape)) or "scalar"
