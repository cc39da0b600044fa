"""Files in and out: `open` finds the format by content (`reading`), `save` by name (`saving`)."""

from .reading import open as open
from .reading import read as read
from .saved import Saved as Saved
from .saving import save as save
