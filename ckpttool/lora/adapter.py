"""An adapter: its files, PEFT's settings, and what each of its tensors is under PEFT's names.

The adapter's author chooses settings for single layers by regular expressions. Python's `re` backtracks:
`((.+)+)+!`, or forty times `(a|a)`, keep it busy for years. Here the set of all places of a name that are
reached so far is carried from one piece of the expression to the next.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from sys import float_info
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.checksums import Checksums
from ..core.checkpoint.settings import json_object
from ..core.files.commit import writing_into
from ..core.files.copying import DryOutput, Output
from ..core.files.threads import Progress
from ..core.formats import safetensors
from ..core.formats.destination import read_back, require_same
from ..core.formats.output import OutputPlace
from ..core.formats.reading import open as open_any
from ..core.formats.shards import ADAPTERS
from ..core.remote.places import exists, is_file
from ..core.remote.urls import canonical
from ..core.system import join
from ..core.tensors.ref import TensorRef
from ..errors import CkptToolError, Damaged, Refused, Unreadable, Unsupported, UsageFault
from .formulas import PRODUCTS, kind_of, of_weight, products_of

CONFIG = "adapter_config.json"
OF_DIFFUSERS = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
OF_OTHERS = (*OF_DIFFUSERS, "adapters.safetensors", "lit_model.pth.lora")  # MLX's, litgpt's
PREFIX = "base_model.model."

# A part of a layer, as `formulas` knows it; a trained token's row is of an embedding inside another module.
FACTOR = re.compile(
    r"(.+?)(?:\.token_adapter)?\.(lora_(?:(?:embedding_)?[AB]|mid|diff|diff_b|magnitude_vector)"
    r"|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|oft_R|trainable_tokens_delta)(\.weight|\.bias)?"
)

# A tensor of either copy of a module in `modules_to_save`.
COPY = re.compile(r"(.+\.)(?:modules_to_save|original_module)\.(.+)")

# A factor as it is in the model's own `state_dict`, where several adapters may be.
NAMED = re.compile(r".+\.lora_(?:embedding_)?[AB]\.(?!bias$)([^.]+)(?:\.weight)?")

# What else a layer of a LoRA may have, and the bias of a layer that has factors.
OF_LAYER = re.compile(r".+\.lora_(?:embedding_)?(?:[AB]|magnitude_vector)(?:\.[^.]+){0,2}")
BIAS = re.compile(r"(.+)\.base_layer\.([^.]+)")

# Values of `init_lora_weights` that leave the model's own weights as they are.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

# The types of adapters that are merged, and their settings by which a layer computes something else.
WAYS: dict[str, tuple[str, ...]] = {
    "LORA": (
        *("use_qalora", "use_bdlora", "megatron_config", "layer_replication", "target_parameters"),
        *("alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config", "monteclora_config"),
    ),
    "OFT": ("block_share", "coft", "fan_in_fan_out"),
    **dict.fromkeys(("LOHA", "LOKR", "TRAINABLE_TOKENS"), ()),
}

IN_PYTHON = "merge it in Python: PeftModel.from_pretrained(model, ADAPTER).merge_and_unload()"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        checkpoint: its tensors; open until `checkpoint.close()`.
        config: what its `adapter_config.json` says; {} where there is none.
        is_of_peft: it has PEFT's names, rather than kohya's or diffusers'.
        numbers: rank and alpha of each layer; None where the settings say them.
        said_in: the file of the settings, for messages.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    is_of_peft: bool = True
    numbers: Mapping[str, tuple[float, float]] | None = None
    said_in: str = CONFIG

    def require_known(self) -> None:
        """Raise Unsupported unless it is of a type whose formula is known, without other settings."""
        path, kind = self.checkpoint.path, self.config.get("peft_type")
        if not isinstance(kind, str) or kind not in WAYS:
            what = f"is an adapter of type {str(kind)[:40]}, and those that are merged are {', '.join(WAYS)}"
            raise Unsupported(path, what, hint=IN_PYTHON)
        odd = [name for name in WAYS[kind] if self.config.get(name)]
        start = self.config.get("init_lora_weights", True)
        if start not in PLAIN_STARTS:
            odd.append(f"init_lora_weights={str(start)[:40]}")
        if kind == "OFT" and "use_cayley_neumann" not in self.config:
            odd.append("no word of use_cayley_neumann, as older versions of PEFT wrote it")
        if odd:
            what = f"is {kind} with {', '.join(odd)}, which computes something else"
            raise Unsupported(path, what, hint=IN_PYTHON)

    @property
    def alpha_name(self) -> str:
        """What the settings call alpha."""
        return "lora_alpha" if self.config.get("peft_type") == "LORA" else "alpha"

    def saved_modules(self) -> frozenset[str]:
        """Return the names of the modules that it holds whole; raises Damaged where they are no names."""
        saved = self.config.get("modules_to_save") or []
        if not isinstance(saved, list) or not all(isinstance(each, str) for each in saved):
            said = f"modules_to_save = {saved!r:.40}"
            what = f"{self.said_in} says {said}, which is no list of names"
            raise Damaged(self.checkpoint.path, what)
        return frozenset(saved)

    def settings(self, patterns: str, usual: str, modules: Iterable[str]) -> dict[str, float]:
        """Return a number for each layer: that of the first key of `patterns` that fits it, or `usual`."""
        if self.numbers is not None:
            return {module: self.numbers[module][usual != "r"] for module in modules}
        by_key = self.config.get(patterns) or {}
        malformed = Damaged(self.checkpoint.path, f"{self.said_in} has a malformed {patterns}")
        if not isinstance(by_key, dict):
            raise malformed
        try:
            first = FirstMatch(by_key).of
            keys = {module: first(module) for module in modules}
        except (UnknownPattern, TooMuchWork) as error:
            what = f"{len(by_key)} {patterns}, too many to match with each layer"
            if isinstance(error, UnknownPattern):
                what = f"{patterns} '{error!s:.80}', more than names, '.*', '|' and plain groups"
            hint = "name the layers there instead, as they are called in the model"
            raise Unsupported(self.checkpoint.path, f"{self.said_in} has {what}", hint=hint) from None
        except (re.error, RecursionError, OverflowError):
            raise malformed from None
        return {
            module: self.number(self.config.get(usual) if key is None else by_key[key], usual)
            for module, key in keys.items()
        }

    def number(self, chosen: Any, usual: str) -> float:
        """Return a setting that must be a positive number; raises Damaged for any other."""
        if type(chosen) not in (int, float) or not 0 < chosen <= float_info.max:
            said = f"{usual} = {chosen!r:.40}, which is no finite positive number"
            raise Damaged(self.checkpoint.path, f"{self.said_in} says {said}")
        number: float = chosen
        return number

    def parts(self) -> tuple[dict[str, dict[str, TensorRef]], dict[str, TensorRef]]:
        """Return the parts of each layer, and its whole tensors under their names in the model."""
        whole: dict[str, TensorRef] = {}
        factors: dict[str, dict[str, TensorRef]] = {}
        keys: dict[tuple[str, str], str] = {}
        tensors = self.checkpoint.state().tensors
        for key, tensor in tensors.items():
            name = key.removeprefix(PREFIX)
            if (copy := COPY.fullmatch(key)) and f"{copy[1]}{copy[2]}" in tensors:
                continue  # with bias="all" PEFT lists the biases of both beside those of the module
            if copy:
                what = f"holds '{key[:80]}', of a copy that PEFT makes of a module, and not the module itself"
                raise Unsupported(self.checkpoint.path, what, hint=IN_PYTHON)
            match = FACTOR.fullmatch(name)
            if match and (match[3] != ".bias" or match[2] == "lora_B"):
                module, part = match[1], match[2] + (match[3] or "").removesuffix(".weight")
                factors.setdefault(module, {})[part] = tensor
            elif OF_LAYER.fullmatch(name):
                raise self._no_factor(key)
            else:
                module, part = BIAS.sub(r"\1.\2", name), ""  # of a layer that has factors too
                whole[module] = tensor
            other = keys.setdefault((module, part), key)
            if other != key:
                what = f"holds '{other[:80]}' and '{key[:80]}', which are the same tensor of the model"
                hint = "leave out one of the two: ckpttool convert FILE NEWFILE --exclude KEY"
                raise Refused(self.checkpoint.path, what, hint=hint)
        return factors, whole

    def _no_factor(self, key: str) -> Unsupported:
        named = NAMED.fullmatch(key)
        if named is None:
            said = "which is no part of a layer that is known"
            return Unsupported(self.checkpoint.path, f"holds '{key[:80]}', {said}", hint=IN_PYTHON)
        file, adapter = shlex.quote(self.checkpoint.path), named[1]
        wanted = shlex.quote(rf"(\.lora_(?:embedding_)?[AB])\.{re.escape(adapter)}=\1")
        what = f"holds '{key[:80]}' with the adapter's name '{adapter[:40]}' in it, which PEFT's files lack"
        hint = f"take it out: ckpttool rename-keys {file} {file} --force --map {wanted}"
        return Unsupported(self.checkpoint.path, what, hint=hint)


def misfit(module: str, those: Mapping[str, TensorRef], rank: float, said_in: str = CONFIG) -> str:
    """Return in words what is wrong with the factors of a layer, by what the settings say; "" for nothing."""
    products = products_of(those)
    if products is None:
        return f"has only one of the two factors of '{module[:80]}'"
    if all(each.ranks <= {rank} - {0} for each in products):
        return ""
    shapes = " and ".join(str(list(those[name].shape)) for name in sorted(those))
    return f"has factors of '{module[:80]}' of shapes {shapes}, and {said_in} says rank {rank}"


def misfits(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield what the settings beside an adapter of PEFT's say otherwise than its tensors, by layer.

    Of what is no LoRA, and of a kind that is not read here, nothing is said.
    """
    folder, name = os.path.split(checkpoint.source.place)
    if name not in ADAPTERS or not exists(settings := join(folder, CONFIG)):
        return
    try:
        adapter = Adapter(checkpoint, json_object(settings))
        adapter.require_known()
        factors = {module: of_weight(those) for module, those in adapter.parts()[0].items()}
        adapter.saved_modules()
        factors = {module: those for module, those in factors.items() if kind_of(those) in PRODUCTS}
        ranks = adapter.settings("rank_pattern", "r", factors)
        adapter.settings("alpha_pattern", adapter.alpha_name, factors)
    except Unsupported:
        return
    except CkptToolError as fault:
        yield settings, f"{fault}"
    else:
        found = ((module, misfit(module, those, ranks[module])) for module, those in factors.items())
        yield from ((module, what) for module, what in found if what)


def open_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Open an adapter.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors` or `.bin`, as PEFT saves them, or
            `pytorch_lora_weights.safetensors` or `.bin`, as diffusers does, `adapters.safetensors` of MLX,
            or `lit_model.pth.lora` of litgpt. Or a file, as kohya's are.

    Returns:
        The adapter, whose `checkpoint` the caller closes.

    Raises:
        Unreadable: a file is missing.
        Damaged: the configuration is no JSON object; or as `ckpttool.open` raises it.

    Example:
        >>> adapter = ckpttool.open_adapter("adapter")
        >>> adapter.config["r"], sorted(adapter.checkpoint.state())[0]
        (1, 'base_model.model.0.lora_A.weight')
    """
    path = canonical(os.fspath(folder))
    settings = join(path, CONFIG)
    if is_file(path):
        above, name = os.path.split(path)
        if name not in ADAPTERS or not exists(join(above, CONFIG)):
            return Adapter(open_any(path), {}, is_of_peft=False)
        path, settings = above, join(above, CONFIG)
    elif not any(exists(join(path, name)) for name in ADAPTERS):
        others = (join(path, name) for name in OF_OTHERS)
        if (file := next(filter(exists, others), None)) is not None:
            return Adapter(open_any(file), {}, is_of_peft=False)
    try:
        config = json_object(settings)
    except Unreadable as error:
        error.hint = (
            "ADAPTER is the folder that PEFT's save_pretrained wrote, or a file of kohya's or diffusers'"
        )
        raise
    weights = next(filter(exists, (join(path, name) for name in ADAPTERS)), None)
    if weights is None:
        raise Unreadable(path, f"holds neither {ADAPTERS[0]} nor {ADAPTERS[1]}")
    return Adapter(open_any(weights), config)


# A group, a character of its own meaning, text, and one character of some kind, perhaps repeated.
PIECE = re.compile(
    r"(?P<open>\((?:\?:)?(?!\?))|(?P<other>[)|^$])|(?P<text>[\w-]+(?![*+?{]))"
    r"|(?P<one>[\w-]|\.|\\[.dw_-]|\[\^?[\w.-]+\])(?P<many>[*+?]?)(?![*+?{])"
)

LITERAL = re.compile(r"[\w.-]+")
MAX_STEPS = 6_000_000  # characters of patterns times those of names: seconds
LONGEST = 1000  # characters of an expression; PEFT's users write names of layers with a `.*` or two


class UnknownPattern(ValueError):
    r"""The expression is of more than text, `.`, `\d`, `[0-9]`, `*`, `+`, `?`, `|` and plain groups."""


class TooMuchWork(ValueError):
    """Patterns and names whose matching would take minutes."""


class FirstMatch:
    """Finds the first of many patterns that fits a name; plain names among them cost nothing each."""

    def __init__(self, patterns: Iterable[str]) -> None:
        # Literal patterns by their length and the places of their dots, which stand for any character each.
        self.literals: dict[int, dict[tuple[int, ...], dict[str, tuple[int, str]]]] = {}
        self.others: list[tuple[int, str]] = []
        self.steps_left = MAX_STEPS
        for number, pattern in enumerate(patterns):
            if LITERAL.fullmatch(pattern):
                dots = tuple(place for place, character in enumerate(pattern) if character == ".")
                same = self.literals.setdefault(len(pattern), {}).setdefault(dots, {})
                same.setdefault(pattern, (number, pattern))
            else:
                self.others.append((number, pattern))

    def of(self, name: str) -> str | None:
        """Return the pattern; None if none fits. Raises UnknownPattern, TooMuchWork, and re.error."""
        best = min(self._literal(name), default=None)
        for number, pattern in self.others:
            if best is not None and best[0] < number:
                break
            self._work(len(pattern) * (len(name) + 1))
            if fits(pattern, name):
                return pattern
        return best[1] if best else None

    def _literal(self, name: str) -> Iterator[tuple[int, str]]:
        starts = [0, *(place + 1 for place, character in enumerate(name) if character == ".")]
        for end in (name[start:] for start in starts):
            for dots, patterns in self.literals.get(len(end), {}).items():
                self._work(len(dots) + 1)
                masked = list(end)
                for place in dots:
                    masked[place] = "." if masked[place] != "\n" else "\n"
                if found := patterns.get("".join(masked)):
                    yield found

    def _work(self, steps: int) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise TooMuchWork


def fits(pattern: str, name: str) -> bool:
    r"""Return whether `re.match(rf"(.*\.)?({pattern})$", name)` does: all of it, or what follows a dot."""
    at = {0, *(place + 1 for place, character in enumerate(name) if character == ".")}
    first, done = at, set[int]()
    outer: list[tuple[set[int], set[int]]] = []
    for piece in _pieces(pattern):
        kind, text = piece.lastgroup, piece[0]
        if kind == "open":
            outer.append((first, done))
            first, done = at, set()
        elif text == "|":
            first, done, at = first, done | at, first
        elif text == ")":
            at |= done
            first, done = outer.pop()
        elif text in "^$":
            at = at & {0 if text == "^" else len(name)}
        elif kind == "text":
            at = {place + len(text) for place in at if name.startswith(text, place)}
        else:
            at = _repeated(piece["one"], piece["many"], name, at)
    return len(name) in at | done


def _repeated(one: str, many: str, name: str, at: set[int]) -> set[int]:
    """Return the places that a character of some kind leads to, once or as often as is said."""
    if not at:
        return at
    if one == "." and many in ("*", "+") and "\n" not in name:  # what most patterns have
        return set(range(min(at) + (many == "+"), len(name) + 1)) | (at if many == "*" else set())
    fit = re.compile(one).fullmatch
    reached = {place + 1 for place in at if fit(name[place : place + 1])}
    if many in ("*", "+"):
        for place in range(min(reached, default=len(name)), len(name)):
            if place in reached and fit(name[place]):
                reached.add(place + 1)
    return reached | at if many in ("*", "?") else reached


@lru_cache(1 << 12)
def _pieces(pattern: str) -> tuple[re.Match[str], ...]:
    """Cut an expression; raises UnknownPattern, and re.error."""
    pieces, end, depth = [], 0, 0
    while end < len(pattern) <= LONGEST:
        piece = PIECE.match(pattern, end)
        if piece is None:
            break
        depth += (piece.lastgroup == "open") - (piece[0] == ")")
        if depth < 0:
            break
        pieces.append(piece)
        end = piece.end()
    if end < len(pattern) or depth:
        re.compile(pattern)
        raise UnknownPattern(pattern)
    return tuple(pieces)


# ---- Writing an adapter as the folder that PEFT reads: the factors and their settings, both or none.


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """What `save_adapter` wrote.

    Attributes:
        path: the folder.
        nbytes: bytes of its files.
        keys: how many tensors are in it.
    """

    path: str = field(metadata={"json": "output"})
    nbytes: int = field(metadata={"json": "bytes"})
    keys: int


@takes_checkpoint
def save_adapter(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    verify: bool | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SavedAdapter:
    """Write an adapter's folder; it appears complete or not at all.

    Args:
        checkpoint: the adapter that `extract_lora` returned.
        config: its settings.
        path: the folder to write. It may be a URL, as for `save`.
        verify: None: compare what is read with the checksums that its file states, and read back names, types
            and shapes. True: read back the values too. False: do not compare checksums either.
        force: replace the adapter in an existing folder.
        dry_run: write nothing: the same result and the same errors.
        progress: called with the number of bytes after each piece.

    Returns:
        What was written.

    Raises:
        UsageFault: the place can't be written.
        OutputExists: the folder is there, and `force` is not given; or it holds other files.
        Damaged: what was read does not have its checksum, or what was written does not read back as intended.

    Example:
        >>> with ckpttool.open("model.safetensors") as base, ckpttool.open("tuned.safetensors") as tuned:
        ...     adapter, extracted = ckpttool.extract_lora(base, tuned, 1)
        ...     saved = ckpttool.save_adapter(adapter, extracted.config, "learnt")
        >>> ckpttool.open_adapter("learnt").config["r"]
        1
    """
    named, tensors = OutputPlace.at(path, force, (checkpoint,)), checkpoint.tree
    text = json.dumps(config, indent=2).encode() + b"\n"
    with named.local(dry_run, progress) as place:
        name = place.path
        require_place(place)
        if dry_run:
            dry = DryOutput()
            safetensors.write(checkpoint.path, tensors, checkpoint.metadata, dry)
            return SavedAdapter(named.path, dry.position + len(text), len(tensors))
        read = checkpoint.storages() if verify is not False else ()
        with place.folder(_replaced) as new:
            file = os.path.join(new.path, ADAPTERS[0])
            with Checksums(checkpoint, read) as checksums:
                with writing_into(file) as raw, Output(raw, progress=progress) as out:
                    safetensors.write(checkpoint.path, tensors, checkpoint.metadata, out)
                checksums.finish()
            with writing_into(os.path.join(new.path, CONFIG)) as raw:
                raw.write(text)
            with read_back(name, new.path), open_any(file) as written:
                again = written.state("").tensors
                require_same(name, again, tensors, values=bool(verify), progress=progress)
    return SavedAdapter(named.path, out.position + len(text), len(tensors))


def require_place(place: OutputPlace) -> None:
    """Raise OutputExists or UsageFault unless an adapter's folder may be written."""
    if place.path == "-":
        raise UsageFault("-: an adapter is a folder, and can't be streamed", hint="name a folder")
    place.require(_replaced)


def _replaced(folder: str) -> list[str]:
    return [name for name in (*ADAPTERS, CONFIG) if os.path.exists(os.path.join(folder, name))]
