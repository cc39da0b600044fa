"""Bring each pair of `architectures` over, both ways, and say what came of it: right, refused or wrong.

    python -m tests.conforming.pairs [WORD…] [--write[=PAGE]] [--record]

`--write` puts the table into docs/conform.md, and `--record` what some of the pairs are into recorded.json,
for machines without the libraries. Words choose the pairs whose names have one of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.conforming.conform import conform
from ckpttool.errors import CkptToolError
from tests.conforming.architectures import Made, Pair, equal, pairs
from tests.support.dialects import State, checksum
from tests.support.generated_page import regenerate
from tests.support.running import ROOT

PAGE = ROOT / "docs" / "conform.md"
MARKS = "<!-- pairs -->\n", "<!-- /pairs -->"
RECORDED = Path(__file__).parent / "recorded.json"
# Pairs that tests know without the libraries
KEPT = (
    "mixtral",
    "jamba",
    "granitemoe",
    "Llama 3",
    "Llama, transformers <-> Phi",
    "GPT-2",
    "ViT, timm",
    "CLIP",
)
KEPT += ("DeepSeek V3, transformers 4 <-> torchtitan",)


def brought(state: State, like: State, *, values: bool = False) -> State:
    """Return a state under the names of another. Raises CkptToolError where it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder) / f"{name}.safetensors") for name in ("in", "like", "out")]
        for tree, name in zip((state, like), names, strict=False):
            save_file({key: tensor.contiguous() for key, tensor in tree.items()}, name)
        with ckpttool.open(names[0]) as checkpoint:
            new, _ = conform(checkpoint, names[1], check_values=values)
            ckpttool.save(new, names[2])
        return load_file(names[2])


@dataclass(frozen=True)
class Result:
    """What came of bringing one state over."""

    word: str  # right, refused or WRONG
    why: str = ""
    made: State | None = None


def result(state: State, like: State, holds: Callable[[State], bool], *, values: bool = False) -> Result:
    """Bring a state over, and hold it against the truth."""
    try:
        made = brought(state, like, values=values)
    except CkptToolError as error:
        return Result("refused", f"{error.kind}: {error.message.partition(': ')[2]}")
    try:
        return Result("right", made=made) if holds(made) else Result("WRONG")
    except RuntimeError as error:  # of load_state_dict
        return Result("WRONG", str(error)[:200])


def results(made: Made) -> list[Result]:
    """Return what comes of a pair there and back, by header alone, and the same by values."""
    found = [result(made.left, made.right, made.is_right), result(made.right, made.left, made.is_left)]
    right = made.right if made.same else found[0].made
    if right is not None:
        found.append(result(made.left, right, made.is_right, values=True))
        found.append(result(right, made.left, equal(made.left), values=True))
    return found


def recorded(pair: Pair, made: Made, found: list[Result]) -> dict[str, object]:
    """Return a pair as shapes and checksums."""
    right = found[0].made or made.right

    def shapes(state: State) -> dict[str, object]:
        return {name: [*t.shape] if t.is_floating_point() else "counter" for name, t in state.items()}

    there = {
        name: (shape, checksum(right[name].float() if right[name].is_floating_point() else right[name]))
        for name, shape in shapes(right).items()
    }
    certain = found[0].word == "right"
    about = {"left": pair.left, "right": pair.right, "truth": pair.truth, "certain": certain}
    return {**about, "from": shapes(made.left), "to": there}


def line(pair: Pair, found: list[Result]) -> str:
    """Return the row of the table."""
    header, values = found[:2], found[2:]
    cells = [_both(header), _both(values) if values else "not tried"]
    return f"| {pair.left} | {pair.right} | {cells[0]} | {cells[1]} | {pair.truth} |"


def _both(found: list[Result]) -> str:
    words = [each.word for each in found]
    why = dict.fromkeys(each.why.partition(":")[0] for each in found if each.why)
    said = words[0] if words[0] == words[1] else " / ".join(words)
    return said + (f" ({', '.join(why)})" if why else "")


def table(lines: list[str], counts: Counter[str]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from (
        "",
        "| from | to and back | by header alone | by values | truth |",
        "|---|---|---|---|---|",
        *lines,
    )
    said = ", ".join(f"{count} {word.lower()}" for word, count in sorted(counts.items()))
    yield f"\n{len(lines)} pairs, both ways, by header and by values: {said}; {counts['WRONG']} wrong.\n"


def main(words: list[str]) -> None:
    """Print the results, and write what is asked."""
    chosen = [word for word in words if not word.startswith("--")]
    counts: Counter[str] = Counter()
    lines, kept = [], []
    for pair in pairs():
        title = f"{pair.left} <-> {pair.right}"
        if (chosen and not any(word in title for word in chosen)) or (
            "--record" in words and not title.startswith(KEPT)
        ):
            continue
        try:
            made = pair.make()
        except Exception as error:  # a library that lacks the model, or that this machine lacks
            print(f"{title}: cannot be made: {error!r:.300}", flush=True)
            continue
        found = results(made)
        counts.update(each.word for each in found)
        print(title, *(f"    {each.word} {each.why[:300]}" for each in found), sep="\n", flush=True)
        lines.append(line(pair, found))
        if "--record" in words:
            kept.append(recorded(pair, made, found))
    print(dict(counts))
    if "--record" in words:
        RECORDED.write_text(json.dumps(kept, separators=(",", ":")).replace("},{", "},\n{") + "\n")
    for page in [word.partition("=")[2] for word in words if word.startswith("--write")]:
        regenerate(Path(page or PAGE), *MARKS, "\n".join(table(lines, counts)))


if __name__ == "__main__":
    main(sys.argv[1:])
