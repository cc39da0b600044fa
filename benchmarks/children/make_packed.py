"""Writes a model's layers packed: fp8 in blocks of 128 × 128, or GPTQ of 4 bits in groups of 128.

python make_packed.py FOLDER fp8|gptq BYTES

BYTES are those of the tensors in 16 bits.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

folder, scheme, nbytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rows, columns = 2048, 4096
tensors: dict[str, torch.Tensor] = {}
for i in range(max(1, nbytes // (2 * rows * columns))):
    name = f"model.layers.{i}.up_proj"
    if scheme == "fp8":
        tensors[f"{name}.weight"] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = torch.rand(rows // 128, columns // 128)
        section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    else:
        words = torch.randint(-(2**31), 2**31, (columns // 8, rows)).int()
        tensors[f"{name}.qweight"] = words
        tensors[f"{name}.qzeros"] = words[: columns // 128, : rows // 8].clone()
        tensors[f"{name}.scales"] = torch.rand(columns // 128, rows).half() / 100
        tensors[f"{name}.g_idx"] = torch.arange(columns).int() // 128
        section = {"quant_method": "gptq", "bits": 4, "group_size": 128}
folder.mkdir()
save_file(tensors, folder / "model.safetensors")
(folder / "config.json").write_text(json.dumps({"quantization_config": section}))
