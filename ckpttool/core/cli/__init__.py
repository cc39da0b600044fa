"""The command line: it parses, calls the library and prints. The only folder that knows click."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attributes

if TYPE_CHECKING:
    from .program import SECTIONS as SECTIONS
    from .program import group as group
    from .program import main as main
    from .program import run as run
else:
    __getattr__, __dir__, __all__ = attributes(__name__, {"program": "SECTIONS group main run"})

    def main():
        """Run the command of `sys.argv`; Ctrl-C while modules are imported ends it without a traceback."""
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from . import program

        program.main()
