"""A run's own settings, in config.toml; and how it differs from the run of `--like`. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.errors import FileError
from ckpttool.files.commit import replacing
from ckpttool.files.failures import naming
from train import console
from train.checkpoint.format import versions
from train.config import command_line, settings_file
from train.config.training import TrainConfig
from train.launch import same_settings
from train.trainer.trainer import Trainer


def write(trainer: Trainer, folder: str) -> list[str]:
    """Write config.toml, and return what differs from the run of `--like`, as remarks. On rank 0.

    A disk that refuses it ends no run.
    """
    config, about = trainer.config, _about(trainer)
    # Before it is written: the run may be the same.
    remarks = [] if config.like is None else list(_differences(config, config.like, about))
    path = os.path.join(folder, settings_file.NAME)
    try:
        with naming(path), replacing(path) as file:
            file.write(command_line.settings_text(config, about=about).encode())
    except FileError as error:
        console.warn(f"{error.message}; training goes on")
    return remarks


def _about(trainer: Trainer) -> dict[str, Any]:
    """Return what a run depends on besides its settings."""
    return {
        **versions(trainer.place.device),
        "ranks": trainer.place.world_size,
        "samples": trainer.data.fingerprint,
        "init": trainer.init or "",
        "code": same_settings.code(trainer.config),
    }


def _differences(config: TrainConfig, run: str, about: Mapping[str, Any]) -> Iterator[str]:
    before, was = command_line.of_run(run)
    now, then = config.plain(), before.plain()
    names = [name for name in now if name not in settings_file.OF_A_START and now[name] != then[name]]
    found = [f"{name.replace('_', '-')} {_shown(then[name])} -> {_shown(now[name])}" for name in names]
    for name, value in about.items():
        old = was.get(name)
        if name == "code":
            files = old if isinstance(old, dict) else {}
            found += [f"{file} is another now" for file in value if files.get(file) != value[file]]
        elif old != value:
            found.append(f"{name} {_shown(old)} -> {_shown(value)}")
    yield f"{run}, but {'; '.join(found)}" if found else f"{run}: nothing differs"


def _shown(value: Any) -> str:
    if value is None or value == () or value == "":
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
