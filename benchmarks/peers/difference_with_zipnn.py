"""What zipnn offers: a file packed as its XOR with another of the same size, and made of the two again.

python difference_with_zipnn.py pack|unpack DTYPE BASE INPUT OUTPUT
"""

import sys
from pathlib import Path

from zipnn import ZipNN

what, dtype, base, source, output = sys.argv[1:]
zipnn = ZipNN(input_format="byte", bytearray_dtype=dtype, delta_compressed_type="byte")
work = zipnn.compress if what == "pack" else zipnn.decompress
base, source = (bytearray(Path(name).read_bytes()) for name in (base, source))
Path(output).write_bytes(work(source, delta_second_data=base))
