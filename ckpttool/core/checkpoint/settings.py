"""What the files beside a checkpoint say, and whether its numbers are packed."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CkptToolError, Damaged, MissingRoom, Refused
from ...rooms import find
from ..files import digest
from ..remote.places import exists, is_folder, open_source_at
from ..system import join
from ..tensors.ref import PLAIN_FLOATS
from ..words import counted, first_few
from .checkpoint import Checkpoint
from .module_tree import COMFY_TEXT, is_embedding, is_output
from .state import State

MAX_BYTES = 16 << 20
SECTIONS = ("quantization_config", "compression_config")  # of config.json: how numbers are packed


def settings_beside(path: str, *names: str) -> tuple[str, dict[str, Any]]:
    """Return the first of these files that lies beside a checkpoint or in its folder, and what it says.

    Without any, and for standard input, "" and {}. Raises what `json_object` does.
    """
    folder = path if is_folder(path) else os.path.dirname(path)
    for name in names if path != "-" else ():
        if exists(place := join(folder, name)):
            return place, json_object(place)
    return "", {}


def json_object(path: str) -> dict[str, Any]:
    """Return what a file of settings says. Raises Unreadable, and Damaged if it is no JSON object."""
    source = open_source_at(path)  # a regular file: a pipe would wait, and a device never end
    text = source.read(0, min(source.size, MAX_BYTES + 1))
    if len(text) > MAX_BYTES:
        raise Damaged(path, f"is longer than {MAX_BYTES >> 20} MiB, and holds settings alone")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged(path, "is not JSON") from None
    if not isinstance(settings, dict):
        raise Damaged(path, "is not a JSON object")
    return settings


def config_of(base: str) -> Mapping[str, Any]:
    """Return the settings of the model in a file or folder, {} if there are none to read."""
    try:
        return settings_beside(base, "config.json")[1]
    except CkptToolError:
        return {}


# ---- What settings say of the tensors beside them


def said_of(model: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return what a model's settings of these names say, at the top and in sections, by dotted names."""
    inner = {f"{key}.": value for key, value in model.items() if key not in SECTIONS}
    sections = {"": model, **{key: value for key, value in inner.items() if isinstance(value, Mapping)}}
    return {f"{at}{name}": said[name] for at, said in sections.items() for name in names if name in said}


def true_settings(model: Mapping[str, Any], before: State, after: State) -> dict[str, object]:
    """Return the settings that changed tensors make untrue, by dotted names, with what is true of them.

    These are the type of the numbers, how many tokens the model knows, and that its output layer is tied.

    Args:
        model: what the settings say.
        before: the state that they were written for.
        after: the state that they are copied for.
    """
    found: dict[str, object] = {}
    was, types = _types(before), _types(after)
    if types and (types[0] not in was[:1] or len(types) < len(was)):
        named = said_of(model, "torch_dtype", "dtype")
        found |= {place: types[0] for place, value in named.items() if value in PLAIN_FLOATS}
    old, new = _words(before), _words(after)
    if old is not None and new is not None:
        sizes = said_of(model, "vocab_size")
        found |= {place: new for place, value in sizes.items() if value == old}
    if _ties_words(after) and not _ties_words(before):
        name = "tie_word_embeddings"
        found |= dict.fromkeys(said_of(model, name) or (name,), True)
    known = said_of(model, *(place.rpartition(".")[2] for place in found))
    return {place: value for place, value in found.items() if known.get(place) != value}


# The files for which transformers reads the settings beside them, and how those name the number of layers.
OF_MODEL = re.compile(r"(pytorch_)?model\.(safetensors|bin|pt)(\.index\.json)?")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def misfits(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the settings in the config.json beside a model's file that its tensors do not fit, and how.

    They are how many tokens and layers it has, whether its output layer is tied, and whether numbers are
    packed. Where a model may be built otherwise, nothing is said. Reads an output layer that should be tied.
    """
    state = checkpoint.found_state()
    if state is None or not OF_MODEL.fullmatch(os.path.basename(checkpoint.source.place)):
        return
    try:
        place, model = settings_beside(checkpoint.source.place, "config.json")
    except CkptToolError as fault:
        yield "config.json", f"{fault}"
        return
    inner = model.get("text_config")
    said = {**(inner if isinstance(inner, dict) else {}), **model}
    found = {
        "vocab_size": _misfit_of_words(said, state),
        next(filter(said.get, LAYERS), ""): _misfit_of_layers(said, state),
        "tie_word_embeddings": _misfit_of_tie(said, state),
        next(filter(said.get, SECTIONS), ""): _misfit_of_packing(said, state),
    }
    yield from ((place, f"says {name}{what}") for name, what in found.items() if what)


def _misfit_of_words(said: Mapping[str, Any], state: State) -> str:
    words, stated = _words(state), said.get("vocab_size")
    if words is None or type(stated) is not int or (words > stated and "model_type" not in said):
        return ""  # others than transformers' may be padded
    return "" if words == stated else f" = {stated}, and the embeddings are of {words} tokens"


def _misfit_of_layers(said: Mapping[str, Any], state: State) -> str:
    stated = next((value for name in LAYERS if (value := said.get(name))), None)
    if type(stated) is not int or not 0 < stated <= len(state.tensors):
        return ""
    numbers = defaultdict[str, set[int]](set)
    for name in state.tensors:
        if match := re.match(r"(.*?)\.?\b([0-9]{1,6})\.", name):
            numbers[match[1]].add(int(match[2]))
    lacking = [{*range(stated)} - those for those in numbers.values()]
    missing = min(lacking, key=len, default=set())
    if 2 * len(missing) >= stated:  # layers may be shared, or have no numbers
        return ""
    return f" = {stated}, and there is no layer {first_few(sorted(missing))}" if missing else ""


def _misfit_of_tie(said: Mapping[str, Any], state: State) -> str:
    words = {name: each for name, each in state.tensors.items() if is_embedding(name)}
    outputs = {name: each for name, each in state.tensors.items() if is_output(name)}
    rows, tied = _words(state), said.get("tie_word_embeddings")
    if tied is True and len(words) == len(outputs) == 1:
        (name, output), (_, embedding) = *outputs.items(), *words.items()
        if output.view != embedding.view and (output.dtype, output.shape) == (
            embedding.dtype,
            embedding.shape,
        ):
            pair = digest.tensor_digests({"a": output, "b": embedding})
            if len({value for _, value in pair}) > 1:
                return f" = true, and '{name[:200]}' has other values than the embeddings"
    named = said.get("architectures")
    is_causal = isinstance(named, list) and any(str(each).endswith("ForCausalLM") for each in named)
    others = (each for name, each in state.tensors.items() if name not in words)
    if (
        tied is not False
        or not is_causal
        or rows is None
        or any(each.shape[:1] == (rows,) for each in others)
    ):
        return ""
    return " = false, and there is no output layer"


def _misfit_of_packing(said: Mapping[str, Any], state: State) -> str:
    section = next((value for name in SECTIONS if (value := said.get(name))), None)
    kinds = {tensor.dtype.name for tensor in state.tensors.values()} - {"bool", "int64"}
    if not isinstance(section, dict) or not kinds or not kinds.issubset(PLAIN_FLOATS) or state.likes:
        return ""
    return f" ({str(section.get('quant_method'))[:40]}), and no tensor is packed"


def _types(state: State) -> list[str]:
    """Return the types of floats that need no scales, that of most elements first."""
    counts: Counter[str] = Counter()
    for tensor in state.tensors.values():
        counts[tensor.dtype.name] += tensor.numel
    return [name for name, _ in counts.most_common() if name in PLAIN_FLOATS]


def _words(state: State) -> int | None:
    """Return for how many tokens the embeddings are; None where that is not clear."""
    shapes = {tensor.shape for name, tensor in state.tensors.items() if is_embedding(name)}
    rows = {shape[0] for shape in shapes if len(shape) == 2}
    return rows.pop() if len(rows) == 1 else None


def _ties_words(state: State) -> bool:
    """Return whether an output layer is another name of an embedding."""
    views = {tensor.view for name, tensor in state.tensors.items() if is_embedding(name)}
    return any(tensor.view in views for name, tensor in state.tensors.items() if is_output(name))


# ---- Numbers packed in few bits with scales, as far as every transform has to know them


def require_unpacked(
    checkpoint: Checkpoint,
    state: State,
    why: str = "its codes can't be laid out without their scales",
    dtype: str = "bfloat16",
    names: Collection[str] | None = None,
) -> None:
    """Raise Refused where a tensor of a state is packed: its codes and scales are numbers only together.

    Args:
        names: those that are asked about, codes or scales; None for all of the state.
    """
    for each in names or ():  # which are about to be laid out anew
        if each in state.tensors and (count := state.tensors[each].dtype.numbers) > 1:
            size = "two numbers of four" if count == 2 else "four numbers of six"
            what = f"'{each[:200]}' holds {size} bits in each element, which no layout parts"
            raise Refused(checkpoint.path, what)
    numbers = find("numbers.recognise")  # many modules, which are imported only where it is asked
    name = (numbers.first_packed if numbers else _first_like_packed)(checkpoint, state, names)
    if name is not None:
        plain = f"convert {shlex.quote(checkpoint.path)} plain.safetensors --dequantize --dtype {dtype}"
        hint = f"make it plain: ckpttool {plain}" if numbers else MissingRoom("numbers").hint
        raise Refused(checkpoint.path, f"'{name[:200]}' is packed, and {why}", hint=hint)


# What codes are held in, and what stands beside them: as much as the core knows where the room is not there.
HOLDING = ("int32", "uint32", "uint8", "int8", "float8", "float4")
BESIDE = re.compile(
    r"(?i)(.+[._])?(q?scales?(_inv|_weight|_2)?|qzeros|scb|comfy_quant|weight\.absmax|weight\.quant_.+)"
)


def _first_like_packed(checkpoint: Checkpoint, state: State, names: Collection[str] | None) -> str | None:
    tensors, is_declared = state.tensors, COMFY_TEXT in checkpoint.metadata
    holding = {_module(name) for name, each in tensors.items() if each.dtype.name.startswith(HOLDING)}
    scaled = holding if is_declared else {_module(name) for name in tensors if BESIDE.fullmatch(name)}
    those = tensors if names is None else names
    return next((name for name in those if _module(name) in holding & scaled), None)


def _module(name: str) -> str:
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way in which tensors are packed, in words, and how many tensors and layers are packed so."""

    scheme: str
    tensors: int
    layers: int  # numbered modules; 0 where none is

    def __str__(self) -> str:
        layers = f", {counted(self.layers, 'layer')}" if self.layers else ""
        return f"{self.scheme}{layers} ({counted(self.tensors, 'tensor')})"
