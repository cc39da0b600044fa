"""What DeepSpeed itself offers: the ranks' fp32 weights as one safetensors file.

python merge_with_deepspeed.py FOLDER OUTPUT
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

source, output = sys.argv[1:]
convert_zero_checkpoint_to_fp32_state_dict(source, output, max_shard_size="1000GB", safe_serialization=True)
