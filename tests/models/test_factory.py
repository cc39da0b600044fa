"""The factory that a SPEC names builds a model, without memory too; its errors are said with their place."""

from __future__ import annotations

import gc
import os
import sys
import textwrap
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.errors import UsageFault
from ckpttool.models.factory import build, parse, skeleton, skeletons
from tests.support import architectures
from tests.support.comparing import saved


def written(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path


def fault(spec: str, **defaults: object) -> UsageFault:
    with pytest.raises(UsageFault) as raised:
        build(spec, **defaults)
    assert raised.value.exit_code == 2
    return raised.value


PLAIN = ["torchvision:resnet18", "path/to/file.py:make", "package.module:make", "/x:y/file.py:f"]
SPECS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{spec: (*spec.rsplit(":", 1), {}) for spec in (*PLAIN, "файл.py:сеть", r"C:\nets\file.py:f")},  # type: ignore[dict-item]
    "m:f()": ("m", "f", {}),
    "m:f(n=10)": ("m", "f", {"n": 10}),
    "m:f( n = 10 )": ("m", "f", {"n": 10}),
    "a (1).py:f(n=1)": ("a (1).py", "f", {"n": 1}),
    "m:f(s='a:b(c', x=[1, (2,)], z=-1.5)": ("m", "f", {"s": "a:b(c", "x": [1, (2,)], "z": -1.5}),
    "m:f(n=1, y=None)": ("m", "f", {"n": 1, "y": None}),
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_parsed_into_where_name_and_arguments(spec: str) -> None:
    assert parse(spec) == SPECS[spec]


@pytest.mark.parametrize(
    "spec",
    [
        *("", "resnet18", ":", "m:", ":f", "m:f(", "m:f)", "m:1f", "m:f.g", "m: f"),
        *("m:f(1)", "m:f(n)", "m:f(n=open('x'))", "m:f(n=1)(m=2)", "m:f(**{'a': 1})"),
        *("m:f(n=1", "m:f n=1", "m:f(n=1, n=2)", "m:f(n=x)", "m:f(*[1])"),
    ],
)
def test_a_malformed_spec_is_refused_with_the_forms(spec: str) -> None:
    with pytest.raises(UsageFault) as refusal:
        parse(spec)
    assert f"'{spec}'" in str(refusal.value)
    assert refusal.value.hint


DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    n: int = 3\n"


@pytest.mark.parametrize(
    "source, called, made",
    [
        ("def make(n, label='x'): return (n, label)", "make(n=3)", (3, "x")),
        ("class Net(int):\n    def __new__(cls, n=1): return int.__new__(cls, n)", "Net(n=4)", 4),
        (f"from __future__ import annotations\n{DATACLASS}def make(): return Config().n", "make", 3),
    ],
    ids=["a function", "a class", "a file with a dataclass"],
)
def test_a_factory_in_a_file_is_called(source: str, called: str, made: object, tmp_path: Path) -> None:
    assert build(f"{written(tmp_path / 'net.py', source)}:{called}") == made


def test_a_factory_in_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_pkg").mkdir()
    written(tmp_path / "my_pkg" / "nets.py", "def make(): return 'made'")
    monkeypatch.syspath_prepend(tmp_path)
    assert build("my_pkg.nets:make") == "made"


def test_a_package_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed command has its own folder on the path, not the one it is called in."""
    (tmp_path / "here_pkg").mkdir()
    written(tmp_path / "here_pkg" / "nets.py", "def make(): return 'made'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert build("here_pkg.nets:make") == "made"


def test_torchvision_is_its_models() -> None:
    pytest.importorskip("torchvision")
    assert build("torchvision:resnet18(num_classes=7)").fc.out_features == 7


def test_a_factory_can_import_modules_beside_its_file_also_when_called(tmp_path: Path) -> None:
    written(tmp_path / "layers_beside.py", "VALUE = 5")
    written(tmp_path / "later_beside.py", "VALUE = 6")
    later = "def make():\n    from later_beside import VALUE as later\n    return VALUE, later"
    written(tmp_path / "net.py", f"from layers_beside import VALUE\n{later}")
    assert build(f"{tmp_path}/net.py:make") == (5, 6)
    assert str(tmp_path) not in sys.path


def test_defaults_go_to_factories_that_take_them_and_the_spec_wins(tmp_path: Path) -> None:
    source = "def make(n=1): return n\ndef any(**kw): return kw\ndef none(): return 0"
    path = written(tmp_path / "net.py", source)
    assert build(f"{path}:make", n=5, m=6) == 5
    assert build(f"{path}:make(n=2)", n=5) == 2
    assert build(f"{path}:any", n=5) == {"n": 5}
    assert build(f"{path}:none", n=5) == 0


# What goes wrong.


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refusal = fault(f"{tmp_path}/missing.py:make")
    assert refusal.message == f"{tmp_path}/missing.py: no such file"


def test_a_missing_module_is_named_with_the_forms_of_a_spec() -> None:
    refusal = fault("no_such_package.nets:make")
    assert "ModuleNotFoundError: No module named 'no_such_package'" in str(refusal)
    assert "torchvision:resnet18" in str(refusal.hint)


def test_a_missing_factory_gets_similar_names_as_a_hint(tmp_path: Path) -> None:
    path = written(tmp_path / "net.py", "def make_net(): pass\ndef other(): pass\nNUMBER = 3")
    refusal = fault(f"{path}:make_nte")
    assert f"'{path}' has no factory 'make_nte'" in str(refusal)
    assert refusal.hint == "it has: make_net"
    assert "has no factory 'NUMBER'" in str(fault(f"{path}:NUMBER"))


def test_a_model_that_torchvision_lacks_gets_similar_names_as_a_hint() -> None:
    pytest.importorskip("torchvision")
    assert "resnet18" in str(fault("torchvision:resnet81").hint)


ODD = "class Odd(Exception):\n    def __str__(self): raise RuntimeError('none')\ndef make(): raise Odd"
ENDS = "import argparse\ndef make():\n    argparse.ArgumentParser().error('no')"
MISSING = "ModuleNotFoundError: No module named 'no_such_thing' (at {0}:2)"
SURPLUS = "TypeError: make() got an unexpected keyword argument 'n'"


@pytest.mark.parametrize(
    ("source", "called", "said"),
    [
        ("import os\n\nraise KeyError('x')", "make", "KeyError: 'x' (at {0}:3)"),
        ("x = 1\nimport no_such_thing", "make", MISSING),
        ("def f():\n    import json\n    json.loads('{')\nf()", "make", "JSONDecodeError: * (at {0}:3)"),
        ("def f(:\n", "make", "SyntaxError: invalid syntax*"),
        ("import sys\nsys.exit(5)", "make", "SystemExit: 5 (at {0}:2)"),
        ("assert False", "make", "AssertionError (at {0}:1)"),
        ("raise ValueError('two\\nlines')", "make", "ValueError: two (at {0}:1)"),
        ("def make():\n    return 1 / 0", "make", "ZeroDivisionError: division by zero (at {0}:2)"),
        (ODD, "make", "Odd (at {0}:3)"),
        (ENDS, "make", "SystemExit: 2 (at {0}:3)"),
        ("def make(depth=1): pass", "make(n=1)", SURPLUS),
    ],
)
def test_an_error_in_a_file_has_its_line(source: str, called: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "net.py", source)
    message = fault(f"{path}:{called}").message
    assert fnmatchcase(message, f"{path}:{called}: {said.format(path)}")
    assert "\n" not in message


def test_a_file_that_a_factory_misses_is_looked_for_from_the_current_folder(tmp_path: Path) -> None:
    path = written(tmp_path / "net.py", "def make():\n    open('sizes.json')")
    refusal = fault(f"{path}:make")
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'sizes.json' (at " in str(refusal)
    assert refusal.hint == f"'sizes.json' is looked for in the current folder, {os.getcwd()}"


def test_missing_arguments_are_shown_as_they_would_be_typed(tmp_path: Path) -> None:
    path = written(tmp_path / "net.py", "def make(depth, *, classes, rate=0.1): pass")
    refusal = fault(f"{path}:make")
    assert "missing" in str(refusal)
    assert refusal.hint == f"it takes arguments: {path}:make(depth=…, classes=…)"


def test_ctrl_c_in_a_factory_is_not_reported_as_its_error(tmp_path: Path) -> None:
    path = written(tmp_path / "net.py", "def make(): raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        build(f"{path}:make")


@pytest.mark.parametrize("name", ["simple-cnn", "resnet20", "simple-cnn(num_classes=10)"])
def test_a_name_of_the_trainer_s_is_told_as_a_spec_that_works(name: str) -> None:
    with pytest.raises(UsageFault) as caught:
        build(name)
    assert caught.value.hint is not None
    assert isinstance(build(caught.value.hint.partition("--model ")[2]), torch.nn.Module)


# Models without memory for their parameters, and how a mapped file fills them.


class Positions(nn.Module):
    """A buffer that no file holds, and a parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        shared = nn.Parameter(torch.rand(4))
        shared.is_mine = True  # type: ignore[attr-defined]
        self.first, self.second = shared, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions * self.first


def test_skeletons_have_parameters_without_values_and_real_buffers() -> None:
    with skeletons():
        model = Positions()
    assert model.first is model.second
    assert (model.first.is_meta, model.first.shape, model.first.requires_grad) == (True, (4,), True)
    assert model.first.is_mine
    assert torch.equal(model.positions, torch.arange(4.0))
    assert not nn.Linear(2, 2).weight.is_meta  # outside, all is as it was


def test_an_error_inside_skeletons_leaves_torch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), skeletons():
        nn.Linear(1 // 0, 2)
    assert not nn.Linear(2, 2).weight.is_meta


def test_assigned_tensors_are_mapped_and_a_shared_parameter_stays_one(tmp_path: Path) -> None:
    original = Positions()
    path = saved(original.state_dict(), tmp_path / "f.pt")
    with skeletons():
        model = Positions()
    ckpttool.reload(path, model, assign=True)
    assert model.first is model.second
    assert torch.equal(model.first, original.first)
    assert torch.equal(model(torch.ones(4)), original(torch.ones(4)))
    with torch.no_grad():
        model.first.zero_()
    assert torch.equal(torch.load(path)["first"], original.first)  # the file is as it was


def test_assigned_tensors_have_the_dtypes_that_copying_would_give(tmp_path: Path) -> None:
    state = architectures.net().state_dict().items()
    halves = {name: value.half() if value.is_floating_point() else value for name, value in state}
    path = saved(halves, tmp_path / "f.pt")
    copied, assigned = architectures.net(), architectures.net()
    ckpttool.reload(path, copied)
    ckpttool.reload(path, assigned, assign=True)
    for (name, mine), theirs in zip(assigned.state_dict().items(), copied.state_dict().values(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), name


def test_a_frozen_parameter_stays_frozen_when_assigned(tmp_path: Path) -> None:
    model = architectures.net()
    path = saved(model.state_dict(), tmp_path / "f.pt")
    model.head.requires_grad_(False)
    ckpttool.reload(path, model, assign=True)
    assert not model.head.weight.requires_grad
    assert model.conv.weight.requires_grad


INITS = """
    from torch.nn import Linear
    class Computed(Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.scale = self.weight.detach().abs().mean()
    class Scaled(Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.scale = float(self.weight.abs().max())
    class Kept(Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer('start', self.weight.detach().clone(), persistent=False)
"""


def test_a_constructor_that_reads_keeps_or_computes_with_values_gets_them(tmp_path: Path) -> None:
    path = written(tmp_path / "m.py", INITS)
    assert not skeleton(f"{path}:Computed").scale.is_meta  # type: ignore[union-attr]
    assert skeleton(f"{path}:Scaled").scale > 0  # type: ignore[operator]
    assert not skeleton(f"{path}:Kept").start.is_meta  # type: ignore[union-attr]


def test_a_skeleton_s_factory_that_fails_is_reported_as_any(tmp_path: Path) -> None:
    path = written(tmp_path / "m.py", "def needs(width): return width\ndef breaks():\n    return 1 / 0")
    with pytest.raises(UsageFault) as raised:
        skeleton(f"{path}:needs")
    assert f"{path}:needs(width=…)" in str(raised.value.hint)
    with pytest.raises(UsageFault, match=r"ZeroDivisionError: division by zero \(at .*m.py:3\)"):
        skeleton(f"{path}:breaks")


LINEAR, OBJECT = "torch.nn.Linear(1, 1)", "an object of type"
NO_MODELS = {
    "nothing": ("pass", "None", "return model"),
    "a number": ("return 3", f"{OBJECT} int", ""),
    "the class": ("return torch.nn.Linear", "the class Linear", "call it"),
    "a pair": (f"return {LINEAR}, 'tokenizer'", f"{OBJECT} tuple", "the model alone"),
    "a list": (f"return [{LINEAR}]", f"{OBJECT} list", "the model alone"),
    "a state": (f"return {LINEAR}.state_dict()", f"{OBJECT} OrderedDict", "not its state"),
    "a generator": (f"yield {LINEAR}", f"{OBJECT} generator", None),
    "a coroutine": ("async def inner(): pass\n    return inner()", f"{OBJECT} coroutine", None),
}


@pytest.mark.parametrize("what", NO_MODELS)
@pytest.mark.filterwarnings("error")
def test_a_factory_that_returns_no_module_is_told_what_to_return(what: str, tmp_path: Path) -> None:
    body, returned, hint = NO_MODELS[what]
    path = written(tmp_path / "m.py", f"import torch\ndef net():\n    {body}\n")
    with pytest.raises(UsageFault) as raised:
        skeleton(f"{path}:net")
    assert raised.value.message == f"{path}:net: returned {returned}, not a torch.nn.Module"
    assert (raised.value.hint is None) if hint is None else hint in str(raised.value.hint)
    if what == "a coroutine":
        gc.collect()  # one that was never awaited would warn


def test_a_buffer_with_two_names_stays_one_when_assigned(tmp_path: Path) -> None:
    def twice() -> nn.Module:
        shared = torch.arange(3.0)
        model = nn.Sequential(nn.Module(), nn.Module())
        for part in model:
            part.register_buffer("table", shared)
        return model

    path = saved(twice().state_dict(), tmp_path / "f.pt")
    model: Any = twice()
    ckpttool.reload(path, model, assign=True)
    assert model[0].table is model[1].table


def test_copying_into_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    """torch only warns, and the model has no values afterwards."""
    path = saved(nn.Linear(3, 2).state_dict(), tmp_path / "f.pt")
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(UsageFault, match="'weight' and 1 more are on the meta device") as raised:
        ckpttool.reload(path, model)
    assert "assign=True" in str(raised.value.hint)
    ckpttool.reload(path, model, assign=True)
    assert not model.weight.is_meta


def test_tensors_that_stay_without_values_are_named(tmp_path: Path) -> None:
    """A buffer that is not saved has its values from the constructor, and on the meta device none."""
    path = saved(Positions().state_dict(), tmp_path / "f.pt")
    with torch.device("meta"):
        model = Positions()
    assert ckpttool.reload(path, model, assign=True).without_values == ("positions",)
    assert ckpttool.reload(path, Positions()).without_values == ()
