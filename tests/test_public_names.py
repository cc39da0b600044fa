"""The public names: for use, for the type checker and for `help()`, each with an example that is run."""

from __future__ import annotations

import ast
import copy
import dataclasses
import doctest
import inspect
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool import errors
from ckpttool.core.cli import group
from ckpttool.distributed.collectives import RankFailed
from tests.support.comparing import prefixed, saved
from tests.support.run_log import BEGIN, record
from tests.support.running import ROOT
from tests.support.user_classes import Config

# ---- The public names: for use, for the type checker and for `help()`; and errors, whole after a pickle


LAZY = [
    ".".join(("ckpttool", *path.parent.relative_to(ROOT / "ckpttool").parts))
    for path in sorted((ROOT / "ckpttool").rglob("__init__.py"))
    if "attributes(" in path.read_text(encoding="utf-8")
]


def imported_by(script: str) -> list[str]:
    """Return the modules that a new interpreter has imported after a script."""
    script += "; import sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return ran.stdout.split()


def public(kind: type[Any]) -> list[str]:
    """Return the public names that stand for things of a kind."""
    return [name for name in ckpttool.__all__ if isinstance(getattr(ckpttool, name), kind)]


def section(documented: Any, title: str) -> str:
    """Return what a docstring says under `Args:`, `Returns:` and so on; empty without such a section."""
    text = inspect.getdoc(documented) or ""
    found = re.search(rf"^{title}:\n(.*?)(?=^\w+:\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def undocumented(names: list[str], text: str) -> list[str]:
    """Return the names without an entry in a section; one entry may name several: `missing, unexpected:`."""
    entries = re.findall(r"^    ([\w, ]+):", text, re.MULTILINE)
    known = {name for entry in entries for name in re.split(r",\s*", entry)}
    return [name for name in names if name not in known]


def test_importing_the_package_imports_no_library_and_no_other_module_of_it() -> None:
    found = imported_by("import ckpttool")
    assert [name for name in found if name.startswith("ckpttool.")] == ["ckpttool.core", "ckpttool.core.lazy"]
    assert {"torch", "numpy", "click", "tqdm"}.isdisjoint(found)


def test_using_a_public_name_imports_only_what_it_needs() -> None:
    found = imported_by("import ckpttool; ckpttool.strip_prefix, ckpttool.open, ckpttool.reload")
    assert {"torch", "numpy", "click", "tqdm"}.isdisjoint(found)


@pytest.mark.parametrize("package", LAZY)
def test_the_names_that_exist_are_those_that_the_type_checker_knows(package: str) -> None:
    module = import_module(package)
    typed = [
        alias.asname
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    ]
    assert sorted(typed) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", LAZY)
def test_a_name_that_is_not_public_is_an_attribute_error(package: str) -> None:
    module = import_module(package)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018 - looking it up is the test


@pytest.mark.parametrize("package", LAZY)
def test_no_public_name_is_that_of_a_module_which_would_replace_it(package: str) -> None:
    module = import_module(package)
    beside = {path.name.removesuffix(".py") for path in Path(str(module.__file__)).parent.iterdir()}
    shared = beside & set(module.__all__)
    assert [name for name in shared if not isinstance(getattr(module, name), ModuleType)] == []


def test_public_functions_document_arguments_results_and_errors() -> None:
    offenders = []
    for name in public(FunctionType):
        function: Callable[..., Any] = getattr(ckpttool, name)
        signature = inspect.signature(function)
        offenders += [
            f"{name}: {each}" for each in undocumented(list(signature.parameters), section(function, "Args"))
        ]
        says_what = (inspect.getdoc(function) or "").startswith("Return ")
        if not (says_what or section(function, "Returns") or section(function, "Yields")):
            offenders.append(f"{name}: Returns")
        if not section(function, "Raises") and name != "skeletons":
            offenders.append(f"{name}: Raises")
    assert offenders == []


def test_public_classes_document_their_attributes() -> None:
    offenders = []
    for name in public(type):
        made = getattr(ckpttool, name)
        fields = [field.name for field in dataclasses.fields(made)] if dataclasses.is_dataclass(made) else []
        offenders += [f"{name}: {each}" for each in undocumented(fields, section(made, "Attributes"))]
        if not made.__doc__:
            offenders.append(name)
    assert offenders == []


def test_every_command_that_needs_no_terminal_is_a_function() -> None:
    commands = {name.replace("-", "_") for name in group.commands}
    # in ckpttool.batchnorm and .metrics; of what `plan` returns; `convert_adapter`
    elsewhere = {"convert_batchnorm", "gather_metrics", "optimizer", "finish", "adapter"}
    of_commands = {"schema", "skill", "explain"}
    assert commands - elsewhere - of_commands <= set(ckpttool.__all__)


def test_files_are_converted_and_merged_by_functions(tmp_path: Path) -> None:
    torch.save({"model": {"module.w": torch.ones(4, 2), "b": torch.ones(4)}, "epoch": 3}, tmp_path / "a.pt")
    saved = ckpttool.convert(tmp_path / "a.pt", tmp_path / "a.safetensors", dtype="bf16", exclude=["b"])
    assert (saved.keys, saved.left_out) == (1, ("epoch",))
    assert load_file(tmp_path / "a.safetensors")["module.w"].dtype is torch.bfloat16
    with ckpttool.open(tmp_path / "a.pt") as checkpoint:
        ckpttool.split(checkpoint, tmp_path / "ranks", 2, device="cpu")
    ckpttool.merge(tmp_path / "ranks", tmp_path / "whole.pt")
    assert ckpttool.digest(tmp_path / "whole.pt") == ckpttool.digest(tmp_path / "a.pt")
    files = sorted((tmp_path / "ranks").glob("model_*"))
    assert ckpttool.merge(files, tmp_path / "b.safetensors", dtype="fp32").keys == 2
    summary = ckpttool.inspect(tmp_path / "a.pt")
    assert (summary.state, summary.keys, summary.parameters) == ("model", 2, 12)
    with pytest.raises(errors.OutputExists):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    with ckpttool.open(tmp_path / "a.pt") as checkpoint:
        ckpttool.convert(checkpoint, f"{tmp_path}/shards/", leave_out=["epoch"])
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()


def test_what_is_no_module_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    given: Any = "m.py:model"
    for function in (ckpttool.reload, ckpttool.doctor):
        with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not 'm\.py:model': build it first"):
            function(tmp_path / "a.pt", given)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not dict"):
        ckpttool.reload(tmp_path / "a.pt", {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not the class Linear: make one"):
        ckpttool.reload(tmp_path / "a.pt", torch.nn.Linear)  # type: ignore[arg-type]


# ---- errors --------------------------------------------------------------------------------------------


class Odd(errors.FileError):
    """An error whose `__init__` takes what its base's does not."""

    def __init__(self, path: str, *, lines: list[int]) -> None:
        super().__init__(path, f"{len(lines)} lines are bad", hint="mend them")
        self.lines = lines


OF_FILES = [errors.Damaged, errors.Unsupported, errors.Refused, errors.NoState]
EXAMPLES = [
    *(kind("a.pt", "is not as it should be") for kind in OF_FILES),
    *(kind("no") for kind in (errors.Collision, errors.NothingToDo, errors.CheckFailed, errors.UsageFault)),
    errors.CkptToolError("no", hint="do this"),
    errors.Unreadable("a.pt", "no such file", hint="look elsewhere"),
    errors.Mismatch("2 missing", missing=("a", "b"), mismatched=(("c", "1", "2"),), hint="see"),
    errors.OutputExists("b.pt", hint="--force"),
    errors.RanksDiffer("rank 1"),
    errors.RanksDiffer("'0.weight' differs", path="ranks", ranks=(0, 1)),
    RankFailed("rank 0 failed"),
    Odd("log", lines=[1, 2]),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("send", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_is_whole_after_a_pickle_and_a_copy(error, send):
    error.exit_code = 7
    sent = send(error)
    assert type(sent) is type(error)
    assert str(sent) == str(error)
    assert vars(sent) == vars(error)
    assert sent.exit_code == 7


def test_an_error_in_text_says_what_to_do_next() -> None:
    error = errors.Refused("a.pt", "would be lost", hint="name another output")
    assert str(error) == "a.pt: would be lost\n  hint: name another output"
    assert traceback.format_exception_only(error) == [f"ckpttool.errors.Refused: {error}\n"]
    assert error.message == "a.pt: would be lost"
    assert str(errors.Refused("a.pt", "would be lost")) == "a.pt: would be lost"


def test_nothing_is_to_be_installed_from_a_registry_that_does_not_have_it() -> None:
    """One function says how; pages say it in a clone."""
    folders = ("ckpttool", "train", "docs", "benchmarks", "examples")
    texts = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md")]
    wanted = re.compile(r"pip install (-U |--upgrade )?['\"]?ckpttool|ckpttool\[")
    found = [str(path) for path in [*texts, *ROOT.glob("*.md")] if wanted.search(path.read_text("utf-8"))]
    assert found == []
    assert {*errors.install("torch").split()} == {"pip", "install", "'torch>=2.10'", "'safetensors>=0.8'"}
    assert {*errors.install("torch").split()} < {*errors.install("train").split()}
    assert str(errors.NeedsTorch("this")) and errors.NeedsTorch("this").hint == errors.install("torch")
    assert errors.install() == "install ckpttool again, from where it came"


# ---- Every public name has an example in its docstring; each prints what it says, in a folder of small files


NAMES = [name for name in ckpttool.__all__ if not inspect.ismodule(getattr(ckpttool, name))]
RULES = """\
from = "ours"
to = "theirs"
rest = "keep"

[[rule]]
from = "0.{part:weight|bias}"
to = "linear.{part}"
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    adam = torch.optim.Adam(net.named_parameters())
    net(torch.randn(5, 4)).sum().backward()
    adam.step()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    whole = {"model": prefixed(net.state_dict(), "module."), "optimizer": adam.state_dict(), "epoch": 3}
    saved(whole, folder / "last.pt")
    saved({"model": state, "note": Config(0.1)}, folder / "armed.pt")
    saved(OrderedDict(w=torch.ones(3, dtype=torch.complex64)), folder / "complex.pt")
    saved(net.state_dict(), folder / "plain.pt")  # in the order of the model, as numbered optimizers need it
    save_file(state, folder / "model.safetensors")
    learnt = torch.outer(torch.randn(8), torch.randn(4))
    save_file(state | {"0.weight": state["0.weight"] + learnt}, folder / "tuned.safetensors")
    base, tuned = (ckpttool.open(folder / f"{name}.safetensors") for name in ("model", "tuned"))
    adapter, extracted = ckpttool.extract_lora(base, tuned, 1)
    ckpttool.save_adapter(adapter, extracted.config, folder / "adapter")
    ckpttool.split(base, folder / "ranks", 2)
    (folder / "rules.toml").write_text(RULES)
    (folder / "runs" / "a").mkdir(parents=True)
    record(folder / "runs" / "a", BEGIN)
    (folder / "runs" / "first").mkdir()
    for step in (1, 2):
        saved(whole, folder / "runs" / "first" / f"step-{step}.pt")
        os.utime(folder / "runs" / "first" / f"step-{step}.pt", (step, step))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_prints_what_it_says(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    documented = getattr(ckpttool, name)
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=False)
    (test,) = finder.find(inspect.unwrap(documented), name, globs={"ckpttool": ckpttool})
    assert test.examples
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


# ---- What a caller in Python is told, and need not know


def test_an_output_that_exists_is_said_in_the_words_of_the_caller(tmp_path: Path) -> None:
    path = saved({"w": torch.ones(2)}, tmp_path / "in.pt")
    with ckpttool.open(path) as checkpoint, pytest.raises(errors.OutputExists) as caught:
        ckpttool.save(checkpoint, path)
    assert caught.value.hint == "write it anyway: force=True"


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("0.weight", "did you mean 'module.0.weight'?"),
        ("model.module.0.weight", "did you mean 'module.0.weight'?"),
        ("module.0.wieght", "did you mean 'module.0.weight', 'module.0.bias'?"),
        ("zzz", "the first key is 'module.0.weight'"),
        ("n", "it is no plain tensor: state.others has it"),
        (0, "the first key is 'module.0.weight'"),
    ],
)
def test_a_name_that_a_state_lacks_is_a_key_error_that_names_others(
    asked: Any, hint: str, tmp_path: Path
) -> None:
    tree = {"module.0.weight": torch.ones(2), "module.0.bias": torch.ones(2), "n": 3}
    with ckpttool.open(saved(tree, tmp_path / "in.pt")) as checkpoint:
        state = checkpoint.state()
        with pytest.raises(KeyError) as caught:
            state[asked]
    assert isinstance(caught.value, ckpttool.CkptToolError)
    assert caught.value.hint == hint


def in_memory() -> dict[str, Any]:
    matrix = torch.arange(6.0).reshape(2, 3)
    return {
        "w": torch.nn.Parameter(matrix),
        "tied": matrix,
        "turned": matrix.t(),
        "row": matrix[1],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 3),
        "array": np.arange(4, dtype=">f4").reshape(2, 2).T,
        "flags": np.array([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
    }


@pytest.mark.parametrize("end", [".pt", ".safetensors"])
def test_a_dict_of_tensors_and_arrays_is_saved(end: str, tmp_path: Path) -> None:
    tensors = in_memory()
    path = tmp_path / f"out{end}"
    assert ckpttool.save(tensors, path).keys == len(tensors)
    found = load_file(path) if end == ".safetensors" else torch.load(path)
    again = ckpttool.open(path).state()
    assert [*again] == [*tensors] if end == ".pt" else {*again} == {*tensors}
    for name, value in tensors.items():
        wanted = (
            torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
            if name in ("array", "flags")
            else value
        )
        if name in found:  # a tie is a name of the other in safetensors
            assert torch.equal(found[name], wanted.detach().resolve_conj()), name
        assert again[name].shape == tuple(value.shape)


def test_a_view_with_other_values_in_the_same_memory_is_no_tie(tmp_path: Path) -> None:
    one = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"one": one, "conj": one.conj(), "neg": one.conj().imag, "imag": one.imag}
    ckpttool.save(tensors, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(found[name], value.resolve_conj()) for name, value in tensors.items())


@pytest.mark.parametrize(
    "odd", [3, "text", [1], torch.eye(2).to_sparse(), torch.empty(2, device="meta"), np.array(["a"])]
)
def test_what_is_no_tensor_in_a_dict_is_refused_by_name(odd: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="save\\(\\) takes a dict of tensors by name; 'odd' is"):
        ckpttool.save({"w": torch.ones(2), "odd": odd}, tmp_path / "out.pt")
    with pytest.raises(TypeError, match="by name; 1 is no str"):
        ckpttool.save({1: torch.ones(2)}, tmp_path / "out.pt")  # type: ignore[dict-item]
    assert [*tmp_path.iterdir()] == []
