"""A user's own modules come before the trainer's files and rooms, whatever their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.ranks.programs import ROOT, start

NAMES = sorted(
    path.stem
    for path in (ROOT / "train").iterdir()
    if (path.suffix == ".py" or any(path.glob("*.py"))) and path.stem != "__init__"
)
OWN = """
import importlib, torch
from torch.utils.data import Dataset

NAMES = {names!r}

def checked():
    for name in NAMES:
        assert importlib.import_module(name).WHOSE == "the user's", name

class Samples(Dataset):
    classes = ["a", "b"]
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info():
            import later  # for the first time, in a process that loads data
            assert later.WHOSE == "the user's"
            checked()
        return torch.full((3,), float(index)), index % 2

def data():
    checked()
    return Samples(), Samples()

def model(num_classes):
    checked()
    return torch.nn.Linear(3, num_classes)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN.format(names=NAMES))
    (tmp_path / "later.py").write_text('WHOSE = "the user\'s"\n')
    return tmp_path / "own.py"


def write_modules(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text('WHOSE = "the user\'s"\n')


def test_the_names_are_those_of_the_trainer():
    assert {"data", "config", "model", "tasks", "log", "run", "main", "evaluate", "plot"} <= set(NAMES)


@pytest.mark.parametrize(
    ("where", "named", "ranks"),
    [
        ("next to own.py", "file", []),
        ("next to own.py", "module", []),
        # as the library `evaluate` may be
        pytest.param("installed", "file", ["--spawn", "2"], marks=pytest.mark.long),
    ],
)
def test_a_user_s_modules_are_found_before_the_trainer_s(own, where, named, ranks):
    folder = own.parent / "installed" if where == "installed" else own.parent
    write_modules(folder)
    spec = str(own) if named == "file" else "own"
    own_code = ["--data", f"{spec}:data", "--model", f"{spec}:model", "--workers", "1"]
    flags = ["--batch-size", "4", "--epochs", "1", "--out", "run"]
    for program in ([str(ROOT / "train/main.py"), *flags], [str(ROOT / "train/evaluate.py"), "run/last.pt"]):
        command = [sys.executable, *program, *own_code, *ranks]
        done = start(command, own.parent, anew=True, PYTHONPATH=str(folder))
        assert done.returncode == 0, done.stderr
