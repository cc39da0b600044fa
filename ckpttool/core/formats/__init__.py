"""Opening and saving: `open` finds the format by content (`reading`), `save` by name (`saving`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attributes

if TYPE_CHECKING:
    from .destination import Saved as Saved
    from .reading import open as open
    from .reading import read as read
    from .saving import save as save
else:
    __getattr__, __dir__, __all__ = attributes(
        __name__, {"reading": "open read", "destination": "Saved", "saving": "save"}
    )
