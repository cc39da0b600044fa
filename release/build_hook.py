"""What hatchling runs when it builds a wheel: man pages and completion files go into it."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SharedFiles(BuildHookInterface[Any]):
    """Makes the files that a package installs beside its modules."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or self.target_name != "wheel":
            return
        sys.path.insert(0, self.root)
        from release import completion, manual

        self.folder = tempfile.TemporaryDirectory()
        for place, text in {**manual.by_place(), **completion.by_place()}.items():
            path = os.path.join(self.folder.name, place)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            build_data["shared_data"][path] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
