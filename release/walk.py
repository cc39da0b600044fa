"""The commands run as a user runs them, by what starts the program: an environment, a zipapp, an image."""

from __future__ import annotations

import json
import shlex
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ckpttool.core.cli import group

# What a plain install can do with one file, in an order in which each line finds its files
LINES = """
inspect model.safetensors
digest model.safetensors
verify model.safetensors
add-prefix model.safetensors ddp.pt
strip-prefix ddp.pt plain.safetensors
rename-keys model.safetensors renamed.pt --map '^fc\\.=head.'
convert model.safetensors half.pt --dtype bf16
convert model.safetensors shards/ --shard-size 1kB
merge shards/ merged.safetensors
split model.safetensors ranks/ --ranks 2 --as dtensor
conform renamed.pt conformed.safetensors --like model.safetensors
maps
maps nanogpt-gpt2
slim ddp.pt slim.pt
disarm ddp.pt disarmed.pt
average model.safetensors plain.safetensors mean.safetensors
delta model.safetensors merged.safetensors step.delta.safetensors
apply model.safetensors step.delta.safetensors step.safetensors
diff model.safetensors step.safetensors
doctor step.safetensors --like model.safetensors
scan .
skill
"""
WITHOUT_TORCH = "reload model.safetensors --model torchvision:resnet18"


def walk(program: Sequence[str], folder: Path) -> None:
    """Run the help and the schema of every command, and all lines, in a folder that is empty.

    Args:
        program: the words that start ckpttool, in an installation without torch.

    Raises:
        AssertionError: a command ended otherwise than it should; says how.
    """
    _save(folder / "model.safetensors")
    for name in group.commands:
        _run(program, folder, [name, "--help"])
        schema = json.loads(_run(program, folder, ["schema", name]))
        assert schema["title"] == f"ckpttool {name} --json", f"schema {name}: {schema['title']}"
    for line in LINES.strip().splitlines():
        _run(program, folder, shlex.split(line))
    refused = json.loads(_run(program, folder, [*WITHOUT_TORCH.split(), "--json"], code=2))
    assert refused["error"]["kind"] == "not-installed", f"{WITHOUT_TORCH}: {refused}"


def _run(program: Sequence[str], folder: Path, words: Sequence[str], *, code: int = 0) -> str:
    ran = subprocess.run([*program, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == code, f"{shlex.join(words)}: exit {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def _save(path: Path) -> None:
    """Write a linear layer as safetensors, without the library."""
    shapes = {"fc.weight": [4, 2], "fc.bias": [4]}
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * (8 if len(shape) == 2 else 4)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = struct.pack(f"<{offset // 4}f", *range(1, offset // 4 + 1))
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)
