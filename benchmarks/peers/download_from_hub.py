"""What users do today: download a file of the hub, or all of a repository, then run a command on it.

python download_from_hub.py REPOSITORY [FILE] -- COMMAND…

In the command, {} is what was downloaded.
"""

import subprocess
import sys

from huggingface_hub import hf_hub_download, snapshot_download

end = sys.argv.index("--")
named, command = sys.argv[1:end], sys.argv[end + 1 :]
local = hf_hub_download(*named) if len(named) == 2 else snapshot_download(*named)
sys.exit(subprocess.run([local if word == "{}" else word for word in command]).returncode)
