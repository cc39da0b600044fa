"""The files by which shells complete commands, options and files, as click makes them."""

from __future__ import annotations

from collections.abc import Mapping

from click.shell_completion import ShellComplete, get_completion_class

from ckpttool.core.cli import group

NAME = "ckpttool"
# Where each shell looks, below the prefix of an installation
PLACES = {
    "bash": f"share/bash-completion/completions/{NAME}",
    "zsh": f"share/zsh/site-functions/_{NAME}",
    "fish": f"share/fish/vendor_completions.d/{NAME}.fish",
}


def by_place() -> Mapping[str, str]:
    """Return each file by its place below the prefix of an installation."""
    return {place: _script(shell) for shell, place in PLACES.items()}


def _script(shell: str) -> str:
    kind = get_completion_class(shell)
    assert kind is not None
    # Not the source of a subclass: bash's asks the bash of this machine for its version.
    return ShellComplete.source(kind(group, {}, NAME, "_CKPTTOOL_COMPLETE")).lstrip()
