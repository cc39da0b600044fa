"""The model's state is found among everything else in a file."""

from __future__ import annotations

import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.errors import Damaged, NoState, Unreadable, Unsupported
from tests.support.crafting import call, dict_of, name, number, storage, tensor, text, torch_zip
from tests.support.saved import opened

ONE = torch.ones(1)
MANY = torch.ones(100)


OPTIMIZER = {"state": {0: {"exp_avg": MANY}}, "param_groups": [{"params": [0]}]}

WHERE: dict[str, tuple[Any, str]] = {
    "the file itself": ({"w": ONE, "b": ONE}, ""),
    "mostly tensors": ({"w": ONE, "b": ONE, "epoch": 3}, ""),
    "state_dict": ({"epoch": 1, "state_dict": {"w": ONE}, "optimizer": OPTIMIZER}, "state_dict"),
    "model before its average": ({"model_ema": {"w": MANY}, "model": {"w": ONE}}, "model"),
    "an average alone": ({"state_dict_ema": {"w": ONE}, "args": None}, "state_dict_ema"),
    "net": ({"net": {"w": ONE}, "acc": 0.9}, "net"),
    "capitals": ({"MODEL_STATE": {"w": ONE}, "EPOCH": 1}, "MODEL_STATE"),
    "nested": ({"checkpoint": {"model": {"w": ONE}}}, "checkpoint.model"),
    "an unknown name": ({"my_net": {"w": ONE}, "epoch": 1}, "my_net"),
    "the one that may be weights": ({"score": {"x": ONE}, "net_b": {"w": MANY, "b": ONE}, "n": 1}, "net_b"),
    "a model before an average of another name": ({"my_net": {"w": ONE}, "model_ema": {"w": ONE}}, "my_net"),
    "an average of an unknown name": ({"net_a": {"w": ONE}, "net_a_ema": {"w": ONE}, "n": 1}, "net_a"),
    "not another optimizer": ({"my_net": {"w": ONE}, "opt": {"m": {"w": MANY}, "v": {"w": MANY}}}, "my_net"),
    "not the optimizer": ({"optimizer": OPTIMIZER, "my_net": {"w": ONE}}, "my_net"),
    "not a tensor beside it": ({"model": {"w": ONE}, "rng": ONE}, "model"),
    "a key of no letters": ({"": {"w": ONE}}, ""),
    "a key with dots": ({"a.b": {"w": ONE}}, "a.b"),
}


@pytest.mark.parametrize("what", WHERE)
def test_the_state_is_found_where_files_keep_it_and_again_by_its_name(what: str, tmp_path: Path) -> None:
    tree, where = WHERE[what]
    checkpoint = opened(tree, tmp_path)
    state = checkpoint.state()
    assert state.where == where
    assert "w" in state.tensors
    assert checkpoint.state(where).container is state.container


DEEP = {"a": {"b": {"c": {"d": {"w": ONE}}}}}


WITHOUT = [{"epoch": 1}, [ONE], ONE, None, {"optimizer": OPTIMIZER}, {0: ONE}, DEEP]


@pytest.mark.parametrize("tree", WITHOUT, ids=lambda tree: str(tree)[:30])
def test_a_file_without_a_state_says_so_and_what_to_do(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(NoState, match="holds no dict of tensors") as none:
        opened(tree, tmp_path).state()
    assert none.value.hint.startswith("see what is in it: ckpttool inspect ")


def test_an_empty_dict_is_the_state_of_a_model_without_parameters(tmp_path: Path) -> None:
    assert opened({}, tmp_path).state().tensors == {}
    assert opened(OrderedDict(), tmp_path).state().where == ""


def test_a_state_is_taken_by_its_dotted_name_which_may_split_anywhere(tmp_path: Path) -> None:
    checkpoint = opened({"a": {"b": {"w": ONE}, "x": 1}, "a.b": {"c": {"y": ONE}}, "c": {"x": ONE}}, tmp_path)
    assert list(checkpoint.state("a.b").tensors) == ["w"]
    assert list(checkpoint.state("c").tensors) == ["x"]
    assert checkpoint.state("a.b.c").path == ("a.b", "c")


def test_a_missing_state_is_refused_with_at_most_eight_names_of_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(NoState, match="holds no state named 'teacher'") as none:
        opened({"model": {"w": ONE}, "ema": {"w": ONE}}, tmp_path).state("teacher")
    assert none.value.hint == "there are: model, ema"
    with pytest.raises(NoState, match="'x'") as none:
        opened({"epoch": 1, **{f"net{i}": {"w": ONE} for i in range(100)}}, tmp_path).state("x")
    assert none.value.hint.endswith("and 92 more")


@pytest.mark.parametrize("where", ["epoch", "args", "model.w", "optimizer.param_groups", "optimizer.state"])
def test_a_value_that_is_not_a_dict_of_tensors_is_refused_as_a_state(where: str, tmp_path: Path) -> None:
    tree = {"epoch": 1, "args": {"lr": 1}, "model": {"w": ONE}, "optimizer": OPTIMIZER}
    checkpoint = opened(tree, tmp_path)
    with pytest.raises(NoState):
        checkpoint.state(where)


def test_tensors_and_other_entries_of_a_state_are_separated_in_order(tmp_path: Path) -> None:
    state = OrderedDict(b=ONE, _extra_state={"x": 1}, p=torch.nn.Parameter(ONE), count=5, a=ONE)
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    found = opened({"model": state}, tmp_path).state()
    assert list(found.tensors) == ["b", "p", "a"]
    assert list(found.others) == ["_extra_state", "count"]
    assert found.versions == {"": {"version": 1}}


def test_every_tensor_of_the_file_is_listed_with_its_path(tmp_path: Path) -> None:
    class_free = {"model": {"w": ONE}, "list": [ONE, (ONE, {"x": ONE})], "p": torch.nn.Parameter(ONE), 7: ONE}
    names = [name for name, _ in opened(class_free | {"optimizer": OPTIMIZER}, tmp_path).tensors()]
    assert names == ["model.w", "list.0", "list.1.0", "list.1.1.x", "p", "7", "optimizer.state.0.exp_avg"]


SHARED = {"w": ONE}
LISTED: list[tuple[Any, list[str]]] = [
    (torch.nn.Sequential(torch.nn.Linear(1, 1)), ["0.weight", "0.bias"]),  # inside an object
    ({"a": SHARED, "b": SHARED}, ["a.w"]),  # a container in two places, at the first
    ({"a": ONE, "b": ONE}, ["a", "b"]),  # a tensor in two places, twice
]


@pytest.mark.parametrize(("tree", "names"), LISTED, ids=["objects", "containers", "tensors"])
def test_tensors_in_objects_and_in_two_places_are_listed(tree: Any, names: list[str], tmp_path: Path) -> None:
    assert [name for name, _ in opened(tree, tmp_path).tensors()] == names


# Hostile trees.

TENSOR = tensor(storage(1), (1,))
BYTES = {"0": bytes(4)}


def test_keys_that_are_not_text_have_short_names(tmp_path: Path) -> None:
    pair = b"(" + text("a") + number(1) + b"t"
    keys = [number(10**5000), pair, b"N", b"\x88", name("torch", "int8"), b"G" + bytes(8)]
    body = b"}(" + b"".join(key + TENSOR for key in keys) + b"u"
    names = [key for key, _ in ckpttool.open(torch_zip(tmp_path / "f", body, BYTES)).tensors()]
    assert names == ["a large number", "(a, 1)", "None", "True", "torch.int8", "0.0"]


def test_a_key_that_is_an_object_of_doubled_lists_has_a_name(tmp_path: Path) -> None:
    doubled = b"]" + b"".join(b"q%b0](h%bh%be" % ((bytes([i]),) * 3) for i in range(60))
    body = b"}" + call(name("m", "C"), doubled) + TENSOR + b"s"
    assert [key for key, _ in ckpttool.open(torch_zip(tmp_path / "f", body, BYTES)).tensors()] == ["m.C"]


ORDERED, OBJECT = call(name("collections", "OrderedDict")), call(name("m", "C"))
CYCLIC = {
    "attributes": ORDERED + b"q\x00h\x00b",
    "attributes in a dict": ORDERED + b"q\x00}" + text("a") + b"h\x00sb",
    "a state": OBJECT + b"q\x00h\x00b",
    "a dict of a state": OBJECT + b"}q\x00" + text("a") + b"h\x00sb",
    "a list": b"]q\x00h\x00a",
}


@pytest.mark.parametrize("body", CYCLIC.values(), ids=CYCLIC)
def test_values_that_contain_themselves_are_entered_once(body: bytes, tmp_path: Path) -> None:
    checkpoint = ckpttool.open(torch_zip(tmp_path / "f", dict_of({"w": TENSOR, "x": body}), BYTES))
    assert [key for key, _ in checkpoint.tensors()] == ["w"]


def test_attributes_that_many_objects_share_are_listed_once(tmp_path: Path) -> None:
    attributes = b"}q\x00(" + b"".join(text(str(i)) + TENSOR for i in range(300)) + b"u0"
    objects = (call(name("m", "C")) + b"h\x00b") * 300
    checkpoint = ckpttool.open(torch_zip(tmp_path / "f", b"](" + attributes + objects + b"e", BYTES))
    assert len(list(checkpoint.tensors())) == 300


def test_deep_nesting_is_named_no_deeper_than_honest_files_reach(tmp_path: Path) -> None:
    levels = (b"}" + text("w") + TENSOR + b"s" + text("k")) * 1000
    checkpoint = ckpttool.open(torch_zip(tmp_path / "f", levels + b"N" + b"s" * 1000, BYTES))
    assert 100 < len(list(checkpoint.tensors())) < 1000


def test_names_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    """A key of 300 kB at each of 150 levels: some 7 GB of dotted names from a file of 310 kB."""
    long = b"X" + (300_000).to_bytes(4, "little") + b"k" * 300_000 + b"q\x01"
    levels = b"}" + text("w") + TENSOR + b"s" + long + (b"}" + text("w") + TENSOR + b"sh\x01") * 150
    checkpoint = ckpttool.open(torch_zip(tmp_path / "f", levels + b"N" + b"s" * 151, BYTES))
    with pytest.raises(Unsupported, match="names need too much memory"):
        list(checkpoint.tensors())


def test_a_name_of_many_dots_is_searched_in_bounded_time(tmp_path: Path) -> None:
    """Each key leads back to the dict itself: 2^40 ways to split the name."""
    keys = b"".join(text("a" + ".a" * i) + b"h\x00" for i in range(6))
    body = b"}q\x00(" + keys + text("w") + TENSOR + b"u"
    checkpoint = ckpttool.open(torch_zip(tmp_path / "f", body, BYTES))
    with pytest.raises(NoState):
        checkpoint.state("a." * 60 + "b")


# Files that are not checkpoints.

STRANGERS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "text": (b"hello\n", "not a checkpoint"),
    "one byte": (b"\x80", "not one that torch.save wrote"),
    "zeros": (bytes(1000), "not a checkpoint"),
    "noise": (bytes(i * 73 % 256 for i in range(1, 999)), "not a checkpoint"),
    "a page": (b"\n <!DOCTYPE html><html>", "HTML page"),
    "a page without its type": (b"<html><head>", "HTML page"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    "gzip": (b"\x1f\x8b\x08\x00", "gzip"),
    "a plain pickle": (pickle.dumps({"a": 1}, 2), "not one that torch.save wrote"),
    "a list in a pickle": (pickle.dumps([1], 2), "not one that torch.save wrote"),
    "GGML": (b"lmgg\x00\x00\x00\x00", "GGML model, older than GGUF"),
    "what a server refuses with": (b"Invalid username or password.", "but text: Invalid username or pass"),
    "an XML page": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML page"),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_file_that_is_no_checkpoint_is_named_for_what_it_is(what: str, tmp_path: Path) -> None:
    content, reason = STRANGERS[what]
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(Unsupported, match=rf"model\.pt: .*{reason}"):
        ckpttool.open(tmp_path / "model.pt")


def test_a_tar_archive_is_recognised(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "f.tar", "w") as archive:
        archive.add(__file__, "storages")
    with pytest.raises(Damaged, match="is a tar archive without"):
        ckpttool.open(tmp_path / "f.tar")


def test_reading_a_closed_file_says_that_it_is_closed(tmp_path: Path) -> None:
    with opened({"w": MANY}, tmp_path) as checkpoint:
        state = checkpoint.state()
    with pytest.raises(Unreadable, match="is closed"):
        state.load()
    with pytest.raises(Unreadable, match="is closed"):
        ckpttool.save(checkpoint, tmp_path / "out.pt")


def test_the_repr_of_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    checkpoint = opened({"model": {f"w{i}": MANY for i in range(1000)}}, tmp_path)
    state = checkpoint.state()
    assert repr(state) == "<State 'model': 1000 tensors>"
    assert repr(checkpoint).endswith(f"in.pt: torch-zip, {checkpoint.nbytes} bytes>")
    assert repr(state.tensors["w1"]).startswith("<TensorRef float32 [100] in ")


def test_a_rival_state_of_one_tensor_is_refused_like_any_other(tmp_path: Path) -> None:
    two, one = {"w": torch.ones(2, 2), "v": torch.ones(2)}, {"w": torch.ones(2, 2)}
    with pytest.raises(NoState, match="'encoder', 'decoder'"):
        opened({"encoder": two, "decoder": one, "epoch": 3}, tmp_path).state()


# ---- a path where an open checkpoint belongs ------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "strip_prefix": ckpttool.strip_prefix,
    "add_prefix": ckpttool.add_prefix,
    "rename_keys": lambda given: ckpttool.rename_keys(given, [("a", "b")]),
    "select": lambda given: ckpttool.select(given, only=["*"]),
    "drop": lambda given: ckpttool.drop(given, ["epoch"]),
    "slim": ckpttool.slim,
    "split_complex": ckpttool.split_complex,
    "join_complex": ckpttool.join_complex,
    "with_metadata": lambda given: ckpttool.with_metadata(given, {"a": "b"}),
    "save": lambda given: ckpttool.save(given, "never.pt"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_path_or_a_state_dict_is_refused_with_the_call_that_opens_it(name: str, tmp_path: Path) -> None:
    for path in ("it's.pt", tmp_path / "last.pt"):
        with pytest.raises(TypeError) as raised:
            FUNCTIONS[name](path)
        call = f"with ckpttool.open({str(path)!r}) as checkpoint: ckpttool.{name}(checkpoint, …)"
        assert str(raised.value) == f"{name}() takes an open checkpoint, not a path: {call}"
    with pytest.raises(TypeError, match=r"takes a checkpoint that ckpttool\.open returned, not dict"):
        FUNCTIONS[name]({"w": ONE})


def test_a_checkpoint_may_be_passed_by_name_and_nothing_else_in_its_place(tmp_path: Path) -> None:
    checkpoint = opened({"module.w": ONE}, tmp_path)
    plain, _ = ckpttool.strip_prefix(checkpoint=checkpoint)
    assert list(plain.state().tensors) == ["w"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'checkpoint'"):
        ckpttool.strip_prefix()  # type: ignore[call-arg]
    pair: Any = ckpttool.strip_prefix(checkpoint)
    with pytest.raises(TypeError, match="not the pair that a function returned: pass the first of the two"):
        ckpttool.save(pair, tmp_path / "out.pt")
    with pytest.raises(TypeError, match="not OrderedDict"):
        ckpttool.save(OrderedDict(w=MANY), tmp_path / "out.pt")  # type: ignore[arg-type]
