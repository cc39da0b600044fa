"""What users write who download nothing: torch.load of files that fsspec opens.

python read_with_fsspec.py show|fake|strip|merge OUTPUT URL…

`show` prints what is in a file, `fake` without its values, `strip` cuts the prefix off and saves, `merge`
joins the files of ranks; the first two write nothing.
"""

import contextlib
import sys

import fsspec
import torch
from safetensors.torch import save_file
from torch._subclasses import FakeTensorMode

job, target, *urls = sys.argv[1:]


def loaded(url, weights_only=True):
    with fsspec.open(url) as file:
        return torch.load(file, map_location="cpu", weights_only=weights_only)


if job == "merge":
    from merge_with_torch import merged

    save_file(merged(loaded(url, weights_only=False) for url in urls), target)
elif job == "strip":
    save_file({key.removeprefix("module."): tensor for key, tensor in loaded(urls[0]).items()}, target)
else:
    with FakeTensorMode() if job == "fake" else contextlib.nullcontext():
        for key, tensor in loaded(urls[0]).items():
            print(key, tensor.dtype, tuple(tensor.shape))
