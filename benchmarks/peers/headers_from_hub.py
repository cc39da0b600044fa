"""What huggingface_hub itself offers for what is in a repository: the headers of its safetensors files.

python headers_from_hub.py REPOSITORY
"""

import sys

from huggingface_hub import get_safetensors_metadata

for file in get_safetensors_metadata(sys.argv[1]).files_metadata.values():
    for name, tensor in file.tensors.items():
        print(name, tensor.dtype, tensor.shape)
