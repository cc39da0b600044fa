"""Find and call the factory that a SPEC names; report errors with their place."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import UsageFault
from ckpttool.models.factory import build, parse


def written(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path


def fault(spec: str, **defaults: object) -> UsageFault:
    with pytest.raises(UsageFault) as raised:
        build(spec, **defaults)
    assert raised.value.exit_code == 2
    return raised.value


@pytest.mark.parametrize(
    "spec, parts",
    [
        ("torchvision:resnet18", ("torchvision", "resnet18", {})),
        ("path/to/file.py:make", ("path/to/file.py", "make", {})),
        ("package.module:make", ("package.module", "make", {})),
        ("m:f()", ("m", "f", {})),
        ("m:f(n=10)", ("m", "f", {"n": 10})),
        ("m:f(n=10, s='a:b(c', x=[1, (2,)], y=None, z=-1.5)", None),
        ("m:f( n = 10 )", ("m", "f", {"n": 10})),
        ("a (1).py:f(n=1)", ("a (1).py", "f", {"n": 1})),
        ("/x:y/file.py:f", ("/x:y/file.py", "f", {})),
        (r"C:\nets\file.py:f", (r"C:\nets\file.py", "f", {})),
        ("файл.py:сеть", ("файл.py", "сеть", {})),
    ],
)
def test_a_spec_is_parsed_into_where_name_and_arguments(spec: str, parts: Any) -> None:
    assert parse(spec) == (parts or ("m", "f", {"n": 10, "s": "a:b(c", "x": [1, (2,)], "y": None, "z": -1.5}))


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
def test_a_factory_in_a_file_is_called_with_its_arguments(
    source: str, called: str, made: object, tmp_path: Path
) -> None:
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
    source = """
        from layers_beside import VALUE
        def make():
            from later_beside import VALUE as later
            return VALUE, later
    """
    written(tmp_path / "net.py", source)
    assert build(f"{tmp_path}/net.py:make") == (5, 6)
    assert str(tmp_path) not in sys.path


def test_defaults_go_to_factories_that_take_them_and_the_spec_wins(tmp_path: Path) -> None:
    path = written(
        tmp_path / "net.py", "def make(n=1): return n\ndef any(**kw): return kw\ndef none(): return 0"
    )
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


@pytest.mark.parametrize(
    "source, words",
    [
        ("import os\n\nraise KeyError('x')", "KeyError: 'x' (at {path}:3)"),
        ("x = 1\nimport no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing' (at {path}:2)"),
        ("def f():\n    import json\n    json.loads('{{')\nf()", "(at {path}:3)"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(5)", "SystemExit: 5 (at {path}:2)"),
        ("assert False", "AssertionError (at {path}:1)"),
        ("raise ValueError('two\\nlines')", "ValueError: two (at {path}:1)"),
    ],
)
def test_an_error_in_the_user_s_file_is_reported_with_its_line(
    source: str, words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "net.py", source.replace("{{", "{"))
    message = fault(f"{path}:make").message
    assert message.startswith(f"{path}:make: ")
    assert words.format(path=path) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "source, called, said",
    [
        (
            "def make():\n    n = 1\n    return n / 0",
            "make",
            "ZeroDivisionError: division by zero (at {0}:3)",
        ),
        (
            "class Odd(Exception):\n    def __str__(self): raise RuntimeError('none')\ndef make(): raise Odd",
            "make",
            "Odd (at {0}:3)",
        ),
        (
            "import argparse\ndef make():\n    argparse.ArgumentParser().error('no')",
            "make",
            "SystemExit: 2 (at {0}:3)",
        ),
        ("def make(depth=1): pass", "make(n=1)", "TypeError: make() got an unexpected keyword argument 'n'"),
    ],
    ids=["raises", "raises what has no words", "exits", "lacks an argument"],
)
def test_an_error_of_a_factory_is_reported_with_its_line(
    source: str, called: str, said: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "net.py", source)
    assert fault(f"{path}:{called}").message == f"{path}:{called}: {said.format(path)}"


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
