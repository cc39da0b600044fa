"""The model's state is found among everything else in a file, and which one where there are several."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.core.checkpoint.selection import cast, select, slim
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.diffing.compare import diff
from ckpttool.errors import Damaged, NoState, Unreadable, Unsupported
from ckpttool.verifying.verify import verify
from tests.support.comparing import opened
from tests.support.crafting import call, dict_of, name, number, storage, tensor, text, torch_zip
from tests.support.running import Cli

# ---- The model's state is found among everything else in a file ---------------------------------------


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
    "whisper": (b"lmgg\x99\xca\x00\x00" + bytes(40), "model of whisper.cpp, in GGML"),
    "Lua": (b"\x04\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00", "file of Lua Torch"),
    "a pickle of protocol 0": (pickle.dumps({"a": [1]}, 0), "is a pickle, but not one that torch.save wrote"),
    "a list of protocol 0": (pickle.dumps([1.5], 0), "is a pickle, but not one that torch.save wrote"),
    "an object of protocol 0": (pickle.dumps(Path("x"), 0), "is a pickle, but not one"),
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
    given: Any = [ONE] if name == "save" else {"w": ONE}  # a dict of tensors is saved
    with pytest.raises(TypeError, match=r"takes a checkpoint that ckpttool\.open returned, not (dict|list)"):
        FUNCTIONS[name](given)


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
        ckpttool.slim(OrderedDict(w=MANY))  # type: ignore[arg-type]


# ---- Which state of a file is taken: nested dicts are one state, equal ones must be named -------------


def weights(seed: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), float(seed)), "bias": torch.full((2,), float(seed))}


ADAM = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}


# Nested dicts.

W1, W9 = {"w": torch.ones(1)}, {"w": torch.ones(9)}
LAYERS = {"layer1": weights(1), "layer2": weights(2)}
NESTED: dict[str, tuple[Any, str, str]] = {
    "layers": (LAYERS, "", "layer1.weight layer1.bias layer2.weight layer2.bias"),
    "layers of unequal size": ({"a": W1, "b": W9}, "", "a.w b.w"),
    "two modules": ({"generator": W1, "discriminator": W9}, "", "generator.w discriminator.w"),
    "inside one key": ({"encoder": {"a_0": W1, "a_1": W1}, "epoch": 3}, "encoder", "a_0.w a_1.w"),
    "under a known name": ({"model": {"a": W1, "b": W1}, "optimizer": ADAM}, "model", "a.w b.w"),
    "a part named as states are": ({"model": {"net": W1, "head": W1}}, "model", "net.w head.w"),
    "tensors beside dicts": ({"a": torch.ones(1), "b": {"c": W1, "d": W1}}, "", "a b.c.w b.d.w"),
    "keys with dots": ({"a.b": W1, "c": {"d.e": torch.ones(1)}}, "", "a.b.w c.d.e"),
    "no plain tensor": ({"a": {"w": torch.eye(2).to_sparse()}, "b": W1}, "", "b.w"),
}


@pytest.mark.parametrize("what", NESTED)
def test_nested_dicts_of_tensors_are_one_state_with_dotted_names(what: str, tmp_path: Path) -> None:
    tree, where, names = NESTED[what]
    state = opened(tree, tmp_path).state()
    assert (state.where, list(state.tensors)) == (where, names.split())


def test_the_whole_nested_state_is_written(tmp_path: Path) -> None:
    ckpttool.save(opened(LAYERS, tmp_path), tmp_path / "out.safetensors")
    found = {name: float(value.max()) for name, value in load_file(tmp_path / "out.safetensors").items()}
    assert found == {"layer1.weight": 1, "layer1.bias": 1, "layer2.weight": 2, "layer2.bias": 2}


def test_nested_dicts_stay_nested_in_a_pt_file_while_names_stay(tmp_path: Path) -> None:
    tree = OrderedDict(scale=torch.ones(2), inner={"layer1": weights(1), "layer2": weights(2)})
    halves, _ = cast(opened(tree, tmp_path), DTYPES["float16"])
    ckpttool.save(halves, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert type(found) is OrderedDict
    assert list(found) == ["scale", "inner"]
    assert found["inner"]["layer2"]["weight"].dtype == torch.float16
    fewer, _ = select(opened(tree, tmp_path), exclude=["inner.layer1.*"])
    ckpttool.save(fewer, tmp_path / "fewer.pt")
    found = torch.load(tmp_path / "fewer.pt")
    assert (list(found), list(found["inner"])) == (["scale", "inner"], ["layer2"])


def test_renamed_keys_of_nested_dicts_are_written_flat_and_by_slim_too(tmp_path: Path) -> None:
    checkpoint = opened({"model": {"a": weights(1), "b": weights(2)}, "epoch": 3}, tmp_path)
    ckpttool.save(slim(checkpoint), tmp_path / "out.pt")
    assert list(torch.load(tmp_path / "out.pt")) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    plain, _ = ckpttool.add_prefix(checkpoint)
    ckpttool.save(plain, tmp_path / "out.pt", force=True)
    found = torch.load(tmp_path / "out.pt")
    assert found["epoch"] == 3
    assert list(found["model"]) == ["module.a.weight", "module.a.bias", "module.b.weight", "module.b.bias"]


def test_an_extra_state_stays_one_entry(tmp_path: Path) -> None:
    tree = {"a": {**weights(1), "_extra_state": {"scale": torch.ones(1)}}, "b": weights(2)}
    state = opened(tree, tmp_path).state()
    assert list(state.tensors) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(state.others) == ["a._extra_state"]


def test_dicts_nested_in_too_many_ways_or_in_themselves_are_refused(tmp_path: Path) -> None:
    shared: dict[str, Any] = weights(1)
    for _ in range(60):  # each dict holds the next twice: 2^60 paths lead to the last
        shared = {"a": shared, "b": shared}
    cyclic: dict[str, Any] = {"a": weights(1), "b": weights(2)}
    cyclic["self"] = cyclic
    for tree in (shared, cyclic):
        with pytest.raises(Unsupported, match="names need too much memory"):
            opened(tree, tmp_path).state()


# Several states.

GAN = {"generator": weights(1), "discriminator": weights(2), "epoch": 3}

_ENCODERS = {"enc": {"a": weights(1), "b": weights(2)}, "dec": {"a": weights(3), "b": weights(4)}, "n": 1}
_BRANCHES = {"gen": {"state_dict": weights(1), "lr": 1}, "disc": {"state_dict": weights(2), "lr": 1}}
_UNEQUAL = {"actor": {**weights(1), "more": torch.ones(99)}, "critic": weights(2), "steps": 5}

AMBIGUOUS: dict[str, tuple[Any, str]] = {
    "a GAN beside a counter": (GAN, "generator discriminator"),
    "two of a kind": ({"student": weights(1), "teacher": weights(2), "opt": ADAM}, "student teacher"),
    "unequal sizes": (_UNEQUAL, "actor critic"),
    "one known name twice": (_BRANCHES, "gen.state_dict disc.state_dict"),
    "nested ones": (_ENCODERS, "enc dec"),
    "two pickled models": ({"g": torch.nn.Linear(1, 1), "d": torch.nn.Linear(1, 1), "n": 1}, "g d"),
    "two averages": ({"ema_g": weights(1), "ema_d": weights(2), "n": 1}, "ema_g ema_d"),
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_equal_states_are_refused_with_their_names(what: str, tmp_path: Path) -> None:
    tree, listed = AMBIGUOUS[what]
    checkpoint, names = opened(tree, tmp_path), listed.split()
    with pytest.raises(NoState, match="holds 2 states, and nothing says which is the model's") as refused:
        checkpoint.state()
    assert all(f"'{name}'" in str(refused.value) for name in names)
    assert "--state " in refused.value.hint
    assert {checkpoint.state(name).where for name in names} == set(names)


def test_all_of_them_are_taken_as_one_state_by_an_empty_name(cli: Cli, tmp_path: Path) -> None:
    by_name = {"state": {"weight": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["weight"]}]}
    torch.save({**GAN, "optimizer": by_name}, tmp_path / "gan.pt")
    ran = cli("convert", tmp_path / "gan.pt", tmp_path / "all.safetensors", "--state", "", "--json")
    assert ran.code == 0
    assert ran.json["left_out"] == ["epoch", "optimizer"]
    names = {f"{name}.{part}" for name in ("generator", "discriminator") for part in ("weight", "bias")}
    assert set(load_file(tmp_path / "all.safetensors")) == names


def test_a_prefix_of_nested_dicts_names_a_part_of_the_state(tmp_path: Path) -> None:
    model = {"enc": {"a": weights(1), "b": weights(2)}, "dec": weights(3)}
    checkpoint = opened({"model": model, "n": 1}, tmp_path)
    assert list(checkpoint.state("model.enc").tensors) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(checkpoint.state("model.enc.b").tensors) == ["weight", "bias"]


def test_inspect_of_several_states_names_them(cli: Cli, tmp_path: Path) -> None:
    torch.save(GAN, tmp_path / "gan.pt")
    ran = cli("inspect", tmp_path / "gan.pt")
    assert ran.code == 0
    assert "--state generator" in ran.out
    assert "--state discriminator" in ran.out
    assert "holds no dict of tensors" not in ran.out
    found = json.loads(cli("inspect", tmp_path / "gan.pt", "--json").out)
    assert found["state"] is None
    assert found["other_states"] == ["generator", "discriminator"]


def test_several_states_are_kept_and_compared_whole(tmp_path: Path) -> None:
    saved = ckpttool.save(opened(GAN, tmp_path), tmp_path / "copy.pt")
    assert saved.left_out == ()
    copy = ckpttool.open(tmp_path / "copy.pt")
    assert diff(opened(GAN, tmp_path), copy).same
    assert verify(opened(GAN, tmp_path), against=copy).compared == "everything"
    other = opened({**GAN, "discriminator": weights(4)}, tmp_path)
    changed = [change.name for change in diff(other, copy).changed]
    assert changed == ["discriminator.weight", "discriminator.bias"]


def test_a_state_in_two_places_is_taken_by_its_likelier_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    for tree in ({"ema": state, "model": state}, {"a": state, "net": {"model": state}}):
        with opened(tree, tmp_path) as checkpoint:
            assert checkpoint.state().where.endswith("model")
            assert len(checkpoint.states()) == 1
    assert ckpttool.inspect(tmp_path / "in.pt").other_states == ("a",)
