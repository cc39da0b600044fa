"""Keys are renamed by regular expressions, or selected, and everything that carries the names follows."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import ckpttool
from ckpttool.core.checkpoint import prefixes, selection
from ckpttool.core.checkpoint.keys import rename_keys
from ckpttool.core.checkpoint.prefixes import Renaming, rename_names
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.errors import Collision, NoState, NothingToDo, Refused, UsageFault
from ckpttool.mapping import layout
from tests.support.comparing import assert_same, loaded, opened, saved, values
from tests.support.trees import numbers

# ---- Keys are renamed by regular expressions, and everything that carries the names follows -----------


NAMES = ["backbone.conv1.weight", "backbone.bn1.bias", "head.0.weight"]


def renamed(names: list[str], *rules: tuple[str, str]) -> list[str]:
    return list(rename_names(names, rules).names.values())


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ([(r"^backbone\.", "")], ["conv1.weight", "bn1.bias", "head.0.weight"]),
        ([(r"(\w+)\.(\d)", r"\1_\2")], [*NAMES[:2], "head_0.weight"]),
        ([(r"(?P<a>v|n)1", r"\g<a>2")], ["backbone.conv2.weight", "backbone.bn2.bias", NAMES[2]]),
        ([("1", "i"), ("i", "x")], ["backbone.convx.wexght", "backbone.bnx.bxas", "head.0.wexght"]),
        ([("^head", "backbone"), ("^backbone", "b")], ["b.conv1.weight", "b.bn1.bias", "b.0.weight"]),
        ([("$", ".x")], [f"{name}.x" for name in NAMES]),
        ([(".", "k")], ["k" * len(name) for name in NAMES]),
        ([("nothing like this", "x")], NAMES),
    ],
)
def test_rules_are_applied_in_order_as_re_sub_does(rules: list[tuple[str, str]], wanted: list[str]) -> None:
    assert renamed(NAMES, *rules) == wanted


@pytest.mark.parametrize("names", [["a.w", "b.w"], ["b.w", "a.w"], ["b.w", "c.w", "a.w"]])
def test_two_keys_that_would_get_one_name_are_refused_and_both_named(names: list[str]) -> None:
    with pytest.raises(Collision) as collision:
        renamed(names, ("^a", "b"))
    first, second = (name for name in names if name != "c.w")
    assert f"'{first}' and '{second}' would both be named 'b.w'" in str(collision.value)
    assert "--map" in str(collision.value.hint)


def test_a_key_left_without_a_name_is_refused() -> None:
    with pytest.raises(Collision, match="'a' would be left without a name") as collision:
        renamed(["a", "b.c"], ("^a$", ""))
    assert "--map" in str(collision.value.hint)


@pytest.mark.parametrize(
    ("rules", "new", "hint"),
    [
        ([("conv", "")], ".weight", r"match the dot too: --map 'conv\.='"),
        ([("weight$", "")], "conv.", r"match the dot too: --map '\.weight$='"),
        ([("^", "net."), ("conv", "")], "net..weight", r"match the dot too: --map '^=net.' --map 'conv\.='"),
        ([("conv", "."), ("x", "y")], "..weight", "give a --map that leaves no empty part between dots"),
    ],
)
def test_a_dot_that_is_left_behind_is_refused_with_the_map_that_takes_it(
    rules: list[tuple[str, str]], new: str, hint: str
) -> None:
    with pytest.raises(UsageFault, match=re.escape(f"'conv.weight' would be named '{new}'")) as refusal:
        renamed(["conv.weight"], *rules)
    assert refusal.value.hint == hint


def test_names_change_places_and_those_with_an_empty_part_are_renamed() -> None:
    assert renamed(["a.w", "b.w"], ("^a", "t"), ("^b", "a"), ("^t", "b")) == ["b.w", "a.w"]
    assert renamed(["a..b", ".c"], ("b", "x"), ("c", "y")) == ["a..x", ".y"]


@pytest.mark.parametrize(
    "rule",
    [
        *(("(", ""), ("a)", ""), ("[", ""), ("*", ""), ("(?P<1>a)", ""), ("a{99999999999}", "")),
        *(("(" * 5000, ""), ("a", r"\1"), ("a", r"\g<x>"), ("(a)", r"\2"), ("a", r"\q"), ("a", "\\")),
    ],
    ids=lambda rule: "-".join(rule)[:20],
)
def test_a_malformed_expression_or_replacement_is_a_usage_fault(rule: tuple[str, str]) -> None:
    with pytest.raises(UsageFault, match=r"^--map: "):
        renamed(["a"], rule)


parts = st.lists(st.sampled_from(["a", "b", "conv", "0", "1"]), min_size=1, max_size=4).map(".".join)


@given(
    st.lists(parts, unique=True, min_size=1), st.sampled_from("ab01"), st.sampled_from(["x", "a", "", "a.b"])
)
def test_names_keep_their_number_and_order_or_are_refused(names: list[str], old: str, new: str) -> None:
    wanted = [name.replace(old, new) for name in names]
    try:
        renaming = rename_names(names, [(old, new)])
    except Collision:
        assert len(set(wanted)) < len(wanted) or "" in wanted
        return
    except UsageFault:
        assert any("" in name.split(".") for name in wanted)
        return
    assert (list(renaming.names), list(renaming.names.values())) == (names, wanted)
    assert renaming.renamed == sum(a != b for a, b in zip(names, wanted, strict=True))


# Everything that follows the keys.


def rewritten(tree: Any, folder: Path, *rules: tuple[str, str], **given: Any) -> Any:
    """Return what torch loads after its keys were renamed."""
    return loaded(rename_keys(opened(tree, folder), rules, **given)[0], folder)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()


class Net(nn.Module):
    """A model of two blocks and a head under the given names."""

    def __init__(self, blocks: str, first: str, second: str, head: str) -> None:
        super().__init__()
        inner = nn.Module()
        inner.add_module(first, Block())
        inner.add_module(second, Block())
        self.add_module(blocks, inner)
        self.add_module(head, nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ([("^layers", "stages")], ("stages", "one", "two", "fc")),
        ([(r"^fc\.", "classifier.")], ("layers", "one", "two", "classifier")),
        ([(r"\.one\.", ".first."), (r"\.two\.", ".second.")], ("layers", "first", "second", "fc")),
        ([("^layers.(one|two)", r"stages.\1b"), ("^fc", "head")], ("stages", "oneb", "twob", "head")),
        ([("one", "tmp"), ("two", "one"), ("tmp", "two")], ("layers", "two", "one", "fc")),
    ],
)
def test_module_versions_follow_the_keys_as_in_a_model_of_the_new_names(
    rules: list[tuple[str, str]], names: tuple[str, str, str, str], tmp_path: Path
) -> None:
    found = rewritten(Net("layers", "one", "two", "fc").state_dict(), tmp_path, *rules)
    wanted = Net(*names).state_dict()
    assert list(found) == list(wanted)
    assert dict(found._metadata) == dict(wanted._metadata)
    Net(*names).load_state_dict(found)


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        ({"module.conv.weight": "conv.weight"}, {"module.conv": "conv", "module": "", "": ""}),
        ({"conv.weight": "module.conv.weight"}, {"conv": "module.conv", "": "module", "relu": "module.relu"}),
        ({"a.b.weight": "a_b.weight"}, {"a.b": "a_b", "a.b.act": "a_b.act", "other": "other"}),
        ({"fc.weight": "fc.kernel"}, {"fc": "fc", "": "", "act": "act"}),
        ({"a.w": "x.w", "b.w": "y.w"}, {"a": "x", "b": "y", "a.drop": "x.drop"}),
        ({"a.0.w": "a.1.w", "a.1.w": "a.0.w"}, {"a.0": "a.1", "a.1": "a.0", "a": "a"}),
        ({"weight": "fc.weight"}, {"": "fc"}),
        ({"fc.weight": "weight"}, {"fc": "", "": ""}),
        ({"a.b.c.w": "z.c.w", "a.w": "z.w"}, {"a.b.c": "z.c", "a.b": "z", "a": "z"}),
        ({}, {"a": "a", "": "", "a.b": "a.b"}),
    ],
)
def test_module_paths_follow_the_keys_below_them(names: dict[str, str], modules: dict[str, str]) -> None:
    rule = Renaming(names).modules()
    assert {path: rule(path) for path in modules} == modules


@given(st.lists(parts, min_size=1, unique=True), st.sampled_from(["", "m.", "m.n."]))
def test_a_prefix_added_to_all_keys_is_added_to_all_modules(keys: list[str], prefix: str) -> None:
    keys = [f"{key}.weight" for key in keys]
    rule = Renaming({key: prefix + key for key in keys}).modules()
    back = Renaming({prefix + key: key for key in keys}).modules()
    for key in keys:
        module = key.removesuffix(".weight")
        assert rule(module) == prefix + module
        assert back(prefix + module) == module


def test_parameter_names_in_the_optimizer_follow(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = rewritten(tree, tmp_path, (r"^(\d)", r"layer\1"))
    wanted = ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"]
    assert found["optimizer"]["param_groups"][0]["param_names"] == wanted


def test_ties_are_recorded_under_the_new_names(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    checkpoint = opened({"wte.weight": weight, "lm_head.weight": weight}, tmp_path)
    new, _ = rename_keys(checkpoint, [("^wte", "embed"), ("^lm_head", "head")])
    ckpttool.save(new, tmp_path / "out.safetensors")
    again, _ = rename_keys(ckpttool.open(tmp_path / "out.safetensors"), [("^head", "out")])
    ckpttool.save(again, tmp_path / "again.safetensors")
    for path, name in (("out", "head"), ("again", "out")):
        with safe_open(tmp_path / f"{path}.safetensors", "pt") as file:
            assert file.metadata() == {f"{name}.weight": "embed.weight", "format": "pt"}
            assert list(file.keys()) == ["embed.weight"]


def test_everything_else_in_the_file_stays(tmp_path: Path) -> None:
    shared = [1, 2]
    whole: dict[str, Any] = {
        "state_dict": OrderedDict({"a.w": torch.ones(2), "a._extra_state": {"a.w": 1}}),
        "teacher": {"a.w": torch.ones(1), "b.w": torch.ones(1), "c.w": torch.ones(1)},
        "args": {"a.w": shared, "again": shared},
    }
    found = rewritten(whole, tmp_path, ("^a", "b"))
    wanted = torch.load(tmp_path / "in.pt")
    wanted["state_dict"] = OrderedDict({"b.w": wanted["state_dict"]["a.w"], "b._extra_state": {"a.w": 1}})
    assert_same(wanted, found)


def test_an_average_is_renamed_with_the_model_unless_a_state_is_named(tmp_path: Path) -> None:
    tree = {"model": {"a.w": torch.ones(1)}, "ema": {"a.w": torch.zeros(1)}}
    for state, wanted in ((None, ["b.w", "b.w"]), ("model", ["b.w", "a.w"])):
        found = rewritten(tree, tmp_path, ("^a", "b"), state=state)
        assert [name for each in found.values() for name in each] == wanted


def test_rules_that_change_no_key_are_nothing_to_do(tmp_path: Path) -> None:
    for rule in [("^b", "c"), ("a", "a")]:
        with pytest.raises(NothingToDo, match="no key would change") as nothing:
            rewritten({"a.w": torch.ones(1)}, tmp_path, rule)
        assert "'a.w'" in str(nothing.value.hint)


@given(st.lists(parts, unique=True, min_size=1, max_size=6), st.text("abx.01", min_size=1, max_size=3))
def test_a_renaming_and_its_inverse_restore_the_file(names: list[str], prefix: str) -> None:
    assume(not any(name.startswith(prefix) for name in names))
    assume("" not in f"{prefix}a".split("."))
    assert renamed(renamed(names, ("^", prefix)), (f"^.{{{len(prefix)}}}", "")) == names


HOSTILE = {
    "repetition in a repetition": [r"^((.+)+)+!$"],
    "the same twice": [r"^(a|a)*$"],
    "a later rule": ["^x", r"^(\w+\s?)*$"],
}


@pytest.mark.covered(lambda case: case == "the same twice")
@pytest.mark.parametrize("case", HOSTILE)
def test_an_expression_that_never_ends_on_a_key_is_named_with_it(case: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(prefixes, "KEY_SECONDS", 0.5)
    rules = [(expression, "b") for expression in HOSTILE[case]]
    begun = time.process_time()
    with pytest.raises(UsageFault, match=r"takes more than 0.5 s on the key 'a{60}") as caught:
        rename_names(["conv.weight", "a" * 60 + "-"], rules)
    assert rules[-1][0] in str(caught.value)
    assert time.process_time() - begun < 5
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_the_time_of_many_keys_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "KEY_SECONDS", 0.05)
    monkeypatch.setattr(prefixes, "TICK", 0.01)
    names = [f"{'layer.' * 20}{number}.weight" for number in range(50_000)]
    assert rename_names(names, [("^layer", "module"), (r"(\w+\.)*weight$", r"\1bias")]).renamed == len(names)


def test_a_timer_and_a_handler_of_others_are_given_back() -> None:
    before = signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_VIRTUAL, 500, 7)
    try:
        rename_names(["a"], [("a", "b")])
        assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_IGN
        delay, interval = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert 0 < delay <= 500.1
        assert interval == pytest.approx(7, abs=0.1)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_names_are_renamed_in_any_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(rename_names, ["a"], [("a", "b")]).result().names == {"a": "b"}


# ---- Checkpoints with fewer keys, without some entries, or the state alone ----------------------------


# select


STATE = {f"{part}.{kind}": numbers(2) for part in ("stem", "layer1.0", "layer1.1", "fc") for kind in "wb"}


@pytest.mark.parametrize(
    ("only", "exclude", "kept"),
    [
        (["layer1.*"], [], ["layer1.0.w", "layer1.0.b", "layer1.1.w", "layer1.1.b"]),
        (["stem.*", "fc.*"], [], ["stem.w", "stem.b", "fc.w", "fc.b"]),
        ([], ["layer1.*", "*.b"], ["stem.w", "fc.w"]),
        (["layer1.*"], ["*.1.*"], ["layer1.0.w", "layer1.0.b"]),
        (["fc.[!b]"], [], ["fc.w"]),
        (["stem.?"], [], ["stem.w", "stem.b"]),
    ],
)
def test_keys_are_chosen_by_shell_patterns(only: Any, exclude: Any, kept: Any, tmp_path: Path) -> None:
    new, selected = selection.select(opened(STATE, tmp_path), only=only, exclude=exclude)
    assert list(loaded(new, tmp_path)) == kept
    assert selected.kept == tuple(kept)
    assert selected.left_out == tuple(key for key in STATE if key not in kept)


def versioned(**state: Any) -> Any:
    """Return a state with module versions."""
    made = OrderedDict(state)
    made._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return made


def test_the_rest_of_the_checkpoint_stays_when_keys_are_chosen(tmp_path: Path) -> None:
    tree = {"model": versioned(**STATE), "epoch": 3}
    found = loaded(selection.select(opened(tree, tmp_path), only=["fc.*"])[0], tmp_path)
    assert (list(found["model"]), found["model"]._metadata) == (["fc.w", "fc.b"], {"": {"version": 2}})
    assert found["epoch"] == 3
    new, _ = selection.select(opened({"A": numbers(1), "a": numbers(1)}, tmp_path), only=["a"])
    assert list(loaded(new, tmp_path)) == ["a"]  # patterns are case-sensitive


@pytest.mark.parametrize(
    ("tree", "patterns", "said"),
    [
        (STATE, {"only": ["fc.*", "head.*"]}, r"no key matches 'head\.\*'"),
        (STATE, {"exclude": ["fc.*", "head.*"]}, r"no key matches 'head\.\*'"),
        (STATE, {"exclude": ["*"]}, "no key would be left"),
        ({}, {"only": ["*"]}, "no key matches"),
    ],
)
def test_patterns_that_leave_nothing_to_do(tree: Any, patterns: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match=said) as nothing:
        selection.select(opened(tree, tmp_path), **patterns)
    assert "head" not in said or "stem.w" in str(nothing.value.hint)


# drop


RUN = {
    "model": {"w": numbers(2)},
    "optimizer": {"state": {0: {"exp_avg": numbers(2), "step": 3}}, "param_groups": [{"lr": 0.1, "x": 1}]},
    "config": {"data.root": "/x", "data": {"root": 1, "kept": 2}},
    7: "seven",
    "epoch": 3,
}


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("epoch", lambda run: run.pop("epoch")),
        ("optimizer", lambda run: run.pop("optimizer")),
        ("model.w", lambda run: run["model"].pop("w")),
        ("config.data.root", lambda run: run["config"].pop("data.root")),
        ("config.data.kept", lambda run: run["config"]["data"].pop("kept")),
        ("optimizer.state.0", lambda run: run["optimizer"]["state"].pop(0)),
        ("optimizer.state.0.step", lambda run: run["optimizer"]["state"][0].pop("step")),
        ("optimizer.param_groups.0.x", lambda run: run["optimizer"]["param_groups"][0].pop("x")),
        ("7", lambda run: run.pop(7)),
    ],
)
def test_an_entry_is_dropped_by_its_dotted_name(name: str, gone: Any, tmp_path: Path) -> None:
    wanted = torch.load(saved(RUN, tmp_path / "given.pt"))
    gone(wanted)
    assert_same(wanted, loaded(selection.drop(opened(RUN, tmp_path), [name]), tmp_path))


def test_several_entries_are_dropped_at_once_and_order_and_versions_stay(tmp_path: Path) -> None:
    state = versioned(**dict.fromkeys("abc", numbers(1)))
    found = loaded(selection.drop(opened(state, tmp_path), ["c", "a"]), tmp_path)
    assert (list(found), found._metadata) == (["b"], {"": {"version": 2}})


def test_what_is_in_two_places_is_dropped_where_it_was_named_alone(tmp_path: Path) -> None:
    state = {"w": numbers(2), "x": numbers(3)}
    tree = {"model": state, "ema": state, "list": [state, {"a": state}], "same": None}
    tree["same"] = tree["list"]
    new = loaded(selection.drop(opened(tree, tmp_path), ["ema.x", "list.1.a.w", "ema.x", "model"]), tmp_path)
    assert (list(new["ema"]), list(new["list"][0]), list(new["list"][1]["a"])) == (["w"], ["w", "x"], ["x"])
    assert [list(new["same"][0]), list(new["same"][1]["a"]), "model" in new] == [
        ["w", "x"],
        ["w", "x"],
        False,
    ]
    assert new["ema"]["w"].data_ptr() == new["same"][0]["w"].data_ptr()


@pytest.mark.parametrize(
    "name", ["nothing", "model.v", "optimizer.param_groups.0", "optimizer.param_groups.1.x", "", "model."]
)
def test_dropping_a_missing_name_is_nothing_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match=f"holds nothing named '{name}'"):
        selection.drop(opened(RUN, tmp_path), [name])


# slim


def storage_bytes(found: dict[str, torch.Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in found.values())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def slimmed(tree: Any, folder: Path, **given: Any) -> Any:
    return loaded(selection.slim(opened(tree, folder), **given), folder)


def all_values(state: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {key: (tensor.dtype, tensor.shape, values(tensor)) for key, tensor in state.items()}


def test_slim_keeps_only_the_state(tmp_path: Path) -> None:
    state = versioned(a=numbers(3), n=torch.tensor(1))
    assert_same(state, slimmed({"epoch": 1, "model": state}, tmp_path))


def test_slim_cuts_bytes_that_no_tensor_uses(tmp_path: Path) -> None:
    big = numbers(100_000)
    state = {"part": big[50_000:50_003], "row": numbers(100).view(10, 10)[3], "own": numbers(5)}
    found = slimmed(state, tmp_path)
    assert all_values(found) == all_values(state)
    assert storage_bytes(found) < 200
    assert (tmp_path / "out.pt").stat().st_size < 4_000 < (tmp_path / "in.pt").stat().st_size


def test_slim_keeps_ties_and_overlaps_and_strides(tmp_path: Path) -> None:
    big = numbers(1000)
    state = {"a": big[100:200], "b": big[150:160], "c": big[100:200].view(10, 10).t()}
    state |= {"d": big[101:190:7], "empty": big[5:5]}
    found = slimmed(state, tmp_path)
    assert all_values(found) == all_values(state)
    assert all(found[key].stride() == before.stride() for key, before in state.items())
    shared = [found[key].untyped_storage() for key in "abcd"]
    assert len({each.data_ptr() for each in shared}) == 1
    assert shared[0].nbytes() <= 4 * 108
    assert found["b"].data_ptr() - found["a"].data_ptr() == 200


def test_slim_keeps_a_storage_whole_that_a_nested_tensor_uses(tmp_path: Path) -> None:
    big = numbers(100)
    state = {"w": big[10:20], "_extra_state": {"all": big}}
    wanted = torch.load(saved(state, tmp_path / "given.pt"))
    assert_same(wanted, slimmed({"model": state}, tmp_path, state="model"))


def test_slim_keeps_parameters_and_types(tmp_path: Path) -> None:
    big = torch.randn(64)
    state = {"p": torch.nn.Parameter(big[:2]), "c": (1j * numbers(9))[4], "b": torch.tensor([True])}
    found = slimmed(state, tmp_path)
    assert isinstance(found["p"], torch.nn.Parameter)
    assert all_values(found) == all_values(state)
    assert storage_bytes(found) < 50
    found = slimmed({"e": numbers(100)[7:7], "w": numbers(1)}, tmp_path)  # "e" is empty
    assert (found["e"].shape, storage_bytes(found)) == ((0,), 4)


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 10)), min_size=1, max_size=5),
    st.sampled_from([torch.uint8, torch.int16, torch.float64, torch.complex128]),
)
def test_any_slimmed_state_keeps_its_values(stretches: list[tuple[int, int]], dtype: torch.dtype) -> None:
    big = torch.arange(100).to(dtype)
    state = {str(i): big[begin : begin + count] for i, (begin, count) in enumerate(stretches)}
    with tempfile.TemporaryDirectory() as folder:
        found = slimmed(state, Path(folder))
        assert all_values(found) == all_values(state)
        spanned = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state.values() if t.numel()]
        most = max(e for _, e in spanned) - min(b for b, _ in spanned) if spanned else 0
        assert storage_bytes({key: each for key, each in found.items() if each.numel()}) <= most + 30


def test_a_missing_state_is_refused(tmp_path: Path) -> None:
    checkpoint = opened({"model": STATE}, tmp_path)
    for change in (selection.select, selection.slim, layout.split_complex, layout.join_complex):
        with pytest.raises(NoState, match="no state named 'ema'"):
            change(checkpoint, state="ema")


def test_a_file_nested_too_deep_to_copy_is_refused_by_every_change(tmp_path: Path) -> None:
    nested: Any = []
    for _ in range(250):
        nested = [nested]
    state = {"w": numbers(2), "z": 1j * numbers(2), "a.real": numbers(1), "a.imag": numbers(1)}
    checkpoint = opened({"model": state, "deep": nested, "epoch": 1}, tmp_path)
    for change in (
        lambda: selection.select(checkpoint, only=["w"]),
        lambda: selection.cast(checkpoint, DTYPES["float16"]),
        lambda: layout.split_complex(checkpoint),
        lambda: layout.join_complex(checkpoint),
    ):
        with pytest.raises(Refused, match="nested too deeply"):
            change()
    assert list(loaded(selection.slim(checkpoint), tmp_path)) == list(state)
    less = selection.drop(selection.slim(checkpoint), ["z"])
    assert list(loaded(less, tmp_path)) == ["w", "a.real", "a.imag"]
