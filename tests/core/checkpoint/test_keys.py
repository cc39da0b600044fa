"""Prefixes are stripped and added as the wrappers do it; two keys that would become one are refused."""

from __future__ import annotations

import json
import tempfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.checkpoint.checkpoint import Checkpoint
from ckpttool.core.checkpoint.prefixes import add_names, found_prefixes, inner_prefixes, strip_names
from ckpttool.errors import Collision, NothingToDo, UsageFault
from ckpttool.mapping.applying import apply
from ckpttool.mapping.rule_file import rules_in
from tests.support.comparing import assert_same, loaded, opened, saved
from tests.support.running import Cli

ONE = torch.ones(1)


def stripped(*names: str, prefix: str = "module.", **given: bool) -> list[str]:
    return list(strip_names(names, prefix, **given).names.values())


# Names.


RESEMBLING = ["features.module.0.weight", "submodule.a", "modulea", "module_list.0", "Module.a", "module"]
INSIDE = ["0._orig_mod.weight", "_orig_mod.a._orig_mod.b", "not_orig_mod.a", "x._orig_mod"]


@pytest.mark.parametrize(
    ("names", "given", "wanted"),
    [
        (["module.a", "b", "module.c.d"], {}, ["a", "b", "c.d"]),
        (RESEMBLING, {}, RESEMBLING),
        (RESEMBLING, {"repeat": True}, RESEMBLING),
        (["module.module.a", "module.b"], {}, ["module.a", "b"]),
        (["module.module.a", "module.b"], {"repeat": True}, ["a", "b"]),
        (INSIDE, {"prefix": "_orig_mod.", "anywhere": True}, ["0.weight", "a.b", *INSIDE[2:]]),
        (["a.module.module.b"], {"anywhere": True}, ["a.module.b"]),
        (["a.module.module.b"], {"anywhere": True, "repeat": True}, ["a.b"]),
        (["ema.module.a", "module.b"], {"prefix": "ema.module."}, ["a", "module.b"]),
    ],
)
def test_a_prefix_is_stripped_between_whole_parts(names: list[str], given: Any, wanted: list[str]) -> None:
    assert stripped(*names, **given) == wanted


def test_a_prefix_of_a_million_letters_is_stripped_quickly() -> None:
    assert stripped("module." * 150_000 + "a", repeat=True) == ["a"]
    assert stripped("x." + "module." * 150_000 + "a", repeat=True, anywhere=True) == ["x.a"]
    assert len(found_prefixes(["module." * 150_000 + "a"])) < 100


@pytest.mark.parametrize("names", [["module.a", "a"], ["a", "module.a"], ["module.a", "b", "a"]])
def test_two_keys_that_would_become_one_are_refused_and_both_named(names: list[str]) -> None:
    with pytest.raises(Collision, match=r"'(module\.)?a' and '(module\.)?a' would both be named 'a'"):
        strip_names(names)


def test_repeating_can_collide_where_once_does_not_and_a_key_of_the_prefix_alone_is_refused() -> None:
    names = ["module.module.a", "module.b", "module.module.b"]
    assert stripped(*names) == ["module.a", "b", "module.b"]
    with pytest.raises(Collision):
        strip_names(names, repeat=True)
    with pytest.raises(Collision, match=r"'module\.' would be left without a name"):
        strip_names(["module.", "module.a"])


@pytest.mark.parametrize("prefix", ["module", "module.a"])
def test_a_prefix_without_its_dot_is_refused(prefix: str) -> None:
    with pytest.raises(UsageFault, match="with a dot too many") as refusal:
        strip_names(["module.a.b"], prefix)
    assert refusal.value.hint == f"with its dot: --prefix {prefix}."


@pytest.mark.parametrize("change", [strip_names, add_names])
def test_an_empty_prefix_is_refused(change: Any) -> None:
    with pytest.raises(UsageFault, match="empty"):
        change(["a"], "")


names = st.lists(st.text("abmodule._", min_size=1, max_size=12), unique=True, max_size=8)
prefixes = st.sampled_from(["module.", "_orig_mod.", "a.", "ema.module."])


@given(names, prefixes)
def test_stripping_undoes_adding(names: list[str], prefix: str) -> None:
    added = list(add_names(names, prefix).names.values())
    assert list(strip_names(added, prefix).names.values()) == names


@given(names, prefixes, st.booleans(), st.booleans())
def test_stripping_keeps_order_or_refuses(names: Any, prefix: str, repeat: bool, anywhere: bool) -> None:
    try:
        renaming = strip_names(names, prefix, repeat=repeat, anywhere=anywhere)
    except (Collision, UsageFault):
        return
    assert list(renaming.names) == names
    assert len(set(renaming.names.values())) == len(names)
    if repeat and not anywhere:
        assert not any(new.startswith(prefix) for new in renaming.names.values())
        assert all(old.endswith(new) for old, new in renaming.names.items())


def test_wrappers_are_found_with_their_nesting() -> None:
    names = ["module._orig_mod.a", "module.b", "c", "_fsdp_wrapped_module.d"]
    found = [(f.prefix, f.keys, f.of) for f in found_prefixes(names)]
    assert found == [("module.", 2, 4), ("module._orig_mod.", 1, 4), ("_fsdp_wrapped_module.", 1, 4)]


def judged(*names: str, versions: Any = None, **given: bool) -> list[tuple[str, bool]]:
    return [(found.prefix, found.certain) for found in found_prefixes(names, versions, **given)]


def test_a_prefix_that_all_keys_carry_is_a_wrapper_and_one_that_others_lack_may_be_a_module() -> None:
    assert judged("module.a.w", "module.b.w") == [("module.", True)]
    versions = {"": {}, "module": {}, "module.a": {}}
    assert judged("module.a.w", "module.b.w", versions=versions) == [("module.", True)]
    (found,) = found_prefixes(["module.a", "head.w"])
    assert not found.certain
    assert found.reason == "1 keys lack it: it may be a module of that name"


def test_a_sibling_module_without_parameters_makes_a_prefix_uncertain() -> None:
    """`_metadata` names the sibling that the keys lack; a module inside the prefix is no sibling."""
    versions = {"": {}, "module": {}, "module.a": {}, "relu": {}}
    (found,) = found_prefixes(["module.a.w"], versions)
    assert (found.certain, found.reason) == (False, "there may be a module of that name next to 'relu'")
    assert judged("module.a.w", versions={"": {}, "module": {}, "module.relu": {}}) == [("module.", True)]
    nested = {"": {}, "module": {}, "module.module": {}, "module.relu": {}, "module.module.a": {}}
    assert judged("module.module.a.w", versions=nested) == [("module.", True), ("module.module.", False)]


def test_the_counter_of_an_average_keeps_the_prefix_certain() -> None:
    (found,) = found_prefixes(["n_averaged", "module.a", "module.b"])
    assert (found.keys, found.of, found.wrapper, found.certain) == (2, 3, "AveragedModel", True)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
def test_prefixes_that_no_module_is_named_after_are_certain(prefix: str) -> None:
    assert judged(f"{prefix}a.w", "head.w") == [(prefix, True)]
    (found,) = inner_prefixes([f"0.{prefix}w", f"1.a.{prefix}b.{prefix}w", "not" + prefix, "2.w"])
    assert (found.prefix, found.keys, found.of) == (prefix, 2, 4)


def test_attributes_of_lightning_modules_are_offered_in_lightning_files_only_and_averages_in_all() -> None:
    names = ["model.a.w", "loss.w"]
    assert judged(*names) == []
    assert judged(*names, lightning=True) == [("model.", False)]
    assert judged("module.w", lightning=True) == [("module.", True)]
    found = judged("online_model.w", "ema_model.w", "step")  # an average beside the model
    assert found == [("ema_model.", False), ("online_model.", False)]


# Files.


class Net(torch.nn.Module):
    """A model of nested modules of several versions, a buffer, ties, and a name with the prefix inside."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.features.module = torch.nn.Sequential(torch.nn.Linear(4, 4))  # features.module.0.weight
        self.head = torch.nn.Linear(4, 4)
        self.head.weight = self.features[0].weight
        self.register_buffer("scale", torch.ones(1))


def rewritten(change: Any, tree: Any, folder: Path, **given: Any) -> Any:
    """Return what torch loads after a command that writes another `.pt`."""
    return loaded(change(opened(tree, folder), **given)[0], folder)


def metadata(state: Any) -> Any:
    return state._metadata


@pytest.mark.usefixtures("one_rank")
def test_stripping_a_ddp_state_gives_the_plain_state_and_adding_to_that_the_ddp_state(tmp_path: Path) -> None:
    net = Net()
    plain, wrapped = net.state_dict(), torch.nn.parallel.DistributedDataParallel(net).state_dict()
    ways = (ckpttool.strip_prefix, wrapped, plain), (ckpttool.add_prefix, plain, wrapped)
    for change, state, wanted in ways:
        found = rewritten(change, state, tmp_path)
        assert_same(wanted, found)
        assert list(metadata(found).items()) == list(metadata(wanted).items())


def test_stripping_a_compiled_state_gives_the_plain_state(tmp_path: Path) -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager").state_dict()  # inductor takes seconds to import
    assert_same(net.state_dict(), rewritten(ckpttool.strip_prefix, compiled, tmp_path, prefix="_orig_mod."))


def test_a_compiled_part_is_stripped_anywhere(tmp_path: Path) -> None:
    inner = torch.nn.Linear(2, 2)
    plain = torch.nn.Sequential(inner, torch.nn.Linear(2, 2)).state_dict()
    compiled = torch.nn.Sequential(torch.compile(inner, backend="eager"), torch.nn.Linear(2, 2))
    compiled.load_state_dict({k.replace("0.", "0._orig_mod."): v for k, v in plain.items()})
    given = {"prefix": "_orig_mod.", "anywhere": True}
    found = rewritten(ckpttool.strip_prefix, compiled.state_dict(), tmp_path, **given)
    assert list(found) == list(plain)
    assert metadata(found) == metadata(plain)


def test_half_the_keys_carry_the_prefix_and_the_others_stay_in_their_places(tmp_path: Path) -> None:
    state = OrderedDict((key, torch.ones(1)) for key in ["module.b", "c", "module.a", "d"])
    changed, renaming = ckpttool.strip_prefix(opened(state, tmp_path))
    assert (renaming.renamed, len(renaming.names)) == (2, 4)
    assert list(changed.state().tensors) == ["b", "c", "a", "d"]


def trained(net: torch.nn.Module) -> dict[str, Any]:
    """Return an optimizer's state after one step."""
    parameters = list(net.named_parameters())
    groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]
    optimizer = torch.optim.AdamW(groups, 0.1)
    sum(p.sum() for p in net.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer.state_dict()


def test_parameter_names_inside_the_optimizer_follow_the_keys(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    wrapper = torch.nn.Module()
    wrapper.module = net
    tree = {"model": wrapper.state_dict(), "optimizer": trained(wrapper), "epoch": 1}
    found = rewritten(ckpttool.strip_prefix, tree, tmp_path)
    names = [group["param_names"] for group in found["optimizer"]["param_groups"]]
    assert names == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    tree["optimizer"]["param_groups"] = found["optimizer"]["param_groups"]
    assert_same(tree["optimizer"]["state"], found["optimizer"]["state"])
    back = rewritten(ckpttool.add_prefix, found, tmp_path)
    assert back["optimizer"]["param_groups"][0]["param_names"] == ["module.0.weight", "module.0.bias"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (
            partial(ckpttool.rename_keys, rules=[(r"^module\.0", "module.first")]),
            ["first.weight", "first.bias"],
        ),
        (partial(ckpttool.rename_keys, rules=[(r"^module\.", "net.")]), ["net.0.weight", "net.0.bias"]),
        (ckpttool.add_prefix, ["module.0.weight", "module.0.bias"]),
        (ckpttool.strip_prefix, ["0.weight", "0.bias"]),
    ],
    ids=["inside the wrapper", "the wrapper", "another wrapper", "no wrapper"],
)
def test_an_optimizer_that_was_made_before_the_model_was_wrapped_follows(
    tmp_path: Path, change: Any, names: list[str]
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model = OrderedDict((f"module.{name}", value) for name, value in net.state_dict().items())
    found = rewritten(change, {"model": model, "optimizer": trained(net)}, tmp_path)
    assert found["optimizer"]["param_groups"][0]["param_names"] == names


def test_an_optimizer_of_other_parameters_than_those_in_the_wrapper_stays(tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": [0, 1], "param_names": ["a", "other"]}]}
    tree = {"model": {"module.a": torch.ones(1), "module.b": torch.ones(1)}, "optimizer": optimizer}
    found = rewritten(partial(ckpttool.rename_keys, rules=[("a$", "c")]), tree, tmp_path)
    assert found["optimizer"] == optimizer


def test_an_optimizer_keyed_by_name_follows_too(tmp_path: Path) -> None:
    state = {"module.a": {"step": torch.ones(1)}, "other": {"step": torch.ones(1)}}
    optimizer = {"state": state, "param_groups": [{"params": ["module.a", "other"], "lr": 1.0}]}
    tree = {"model": {"module.a": torch.ones(1)}, "optimizers": [optimizer]}
    found = rewritten(ckpttool.strip_prefix, tree, tmp_path)["optimizers"][0]
    assert list(found["state"]) == ["a", "other"]
    assert found["param_groups"] == [{"params": ["a", "other"], "lr": 1.0}]


def test_an_optimizer_whose_names_are_in_tuples_follows_too(tmp_path: Path) -> None:
    state = {"module.a": ONE, "module.b": ONE + 1}
    groups = ({"lr": 0.1, "params": ("module.a", "module.b")}, {"params": []})
    optimizer = {"state": {"module.b": {"step": 1}}, "param_groups": groups}
    new, _ = ckpttool.strip_prefix(opened({"model": state, "optimizer": optimizer}, tmp_path))
    wanted = {
        "state": {"b": {"step": 1}},
        "param_groups": ({"lr": 0.1, "params": ("a", "b")}, {"params": []}),
    }
    assert_same(wanted, loaded(new, tmp_path)["optimizer"])


def test_what_a_module_keeps_as_its_extra_state_is_no_state_of_names(tmp_path: Path) -> None:
    inner = {"module.amax": ONE}
    new, renaming = ckpttool.strip_prefix(opened({"module.w": ONE, "module._extra_state": inner}, tmp_path))
    assert_same({"w": ONE, "_extra_state": inner}, loaded(new, tmp_path))
    assert not renaming.also


def test_an_average_of_a_few_parameters_is_renamed_with_the_model(tmp_path: Path) -> None:
    model = {**{f"backbone.{i}.weight": torch.ones(2) for i in range(8)}, "head.weight": torch.ones(3)}
    other = {"head.weight": torch.ones(4)}  # of another shape: not this model's
    tree = {"model": model, "ema": {"head.weight": torch.zeros(3)}, "gan": other, "none": OrderedDict()}
    with opened(tree, tmp_path) as checkpoint:
        new, renaming = ckpttool.rename_keys(checkpoint, [(r"^head\.", "classifier.")])
        assert (list(new.tree["ema"]), list(new.tree["gan"])) == (["classifier.weight"], ["head.weight"])
        assert {where: each.renamed for where, each in renaming.also.items()} == {"ema": 1}


def test_the_kinds_of_batchnorm_layers_in_a_header_follow(tmp_path: Path) -> None:
    kinds = '{"module.bn": "BatchNorm1d", "module.head.1": "BatchNorm2d", "module.seq.0": "BatchNorm3d"}'
    tensors = {"module.bn.weight": ONE, "module.head.1.running_mean": ONE + 1}
    save_file(tensors, tmp_path / "in.safetensors", metadata={"batchnorm.kinds": kinds, "note": "module.bn"})
    with ckpttool.open(tmp_path / "in.safetensors") as checkpoint:
        new, _ = ckpttool.strip_prefix(checkpoint)
        wanted = '{"bn": "BatchNorm1d", "head.1": "BatchNorm2d", "seq.0": "BatchNorm3d"}'
        assert new.metadata == {"batchnorm.kinds": wanted, "note": "module.bn"}
        assert ckpttool.add_prefix(new)[0].metadata == checkpoint.metadata


def test_kinds_follow_a_map_and_end_with_the_last_key_of_their_layer(tmp_path: Path) -> None:
    kinds = {"b.0": "BatchNorm1d", "b.1": "BatchNorm2d", "b.2": "BatchNorm3d"}  # the last has no keys
    tensors = {"b.0.weight": ONE, "b.1.weight": ONE + 1, "b.1.bias": ONE + 2}
    save_file(tensors, tmp_path / "in.safetensors", metadata={"batchnorm.kinds": json.dumps(kinds)})
    rules = rules_in('[[rule]]\nfrom = "b.{i}.{kind:*}"\nto = "n.{i}.{kind}"')

    def recorded(checkpoint: Checkpoint) -> object:
        return json.loads(checkpoint.metadata.get("batchnorm.kinds", "null"))

    with ckpttool.open(tmp_path / "in.safetensors") as checkpoint:
        mapped, _ = apply(checkpoint, rules)
        assert recorded(mapped) == {"n.0": "BatchNorm1d", "n.1": "BatchNorm2d", "n.2": "BatchNorm3d"}
        for exclude, left in (["b.0.*", "b.1.weight"], ["b.1", "b.2"]), (["b.1.*"], ["b.0", "b.2"]):
            new, _ = ckpttool.select(checkpoint, exclude=exclude)
            assert recorded(new) == {layer: kinds[layer] for layer in left}


@pytest.mark.parametrize("text", ["[]", "no JSON", "{}"])
def test_what_is_no_record_of_kinds_stays_as_it_is(text: str, tmp_path: Path) -> None:
    save_file({"module.w": ONE}, tmp_path / "in.safetensors", metadata={"batchnorm.kinds": text})
    with ckpttool.open(tmp_path / "in.safetensors") as checkpoint:
        assert ckpttool.strip_prefix(checkpoint)[0].metadata == {"batchnorm.kinds": text}


def test_everything_else_in_the_file_stays_as_it_is(tmp_path: Path) -> None:
    shared = torch.ones(2)
    tree = {
        "model": OrderedDict({"module.a": shared, "module.extra": {"module.x": 1}}),
        "teacher": {"module.x": shared, "module.y": shared, "c": {"module.a": 1}},
        "history": [{"module.loss": 1.0}],
        "again": shared,
    }
    found = rewritten(ckpttool.strip_prefix, tree, tmp_path)
    tree["model"] = OrderedDict({"a": shared, "extra": {"module.x": 1}})
    tree["teacher"] = {"x": shared, "y": shared, "c": {"module.a": 1}}
    assert_same(torch.load(saved(tree, tmp_path / "expected.pt")), found)


def test_the_counter_of_an_average_stays_by_the_model_or_is_dropped(tmp_path: Path) -> None:
    state = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2)).state_dict()
    strip = ckpttool.strip_prefix
    assert list(rewritten(strip, state, tmp_path)) == ["n_averaged", "weight", "bias"]
    assert list(rewritten(strip, state, tmp_path, drop=["n_averaged"])) == ["weight", "bias"]
    with pytest.raises(NothingToDo, match="no key 'n_average' to drop"):
        rewritten(strip, state, tmp_path, drop=["n_average"])


def test_all_states_that_carry_the_prefix_lose_it_and_are_listed(tmp_path: Path) -> None:
    average = {"module.a": ONE * 2, "module.b": ONE}
    tree = {"state_dict": {"module.a": ONE, "module.b": ONE}, "state_dict_ema": average}
    tree |= {"discriminator": {"module.c": ONE}, "rng": {"cpu": ONE}}
    changed, renaming = ckpttool.strip_prefix(opened(tree, tmp_path))
    counts = {where: theirs.renamed for where, theirs in renaming.also.items()}
    assert counts == {"state_dict_ema": 2, "discriminator": 1}
    found = loaded(changed, tmp_path)
    assert [*found] == [*tree]
    assert [[*state] for state in found.values()] == [["a", "b"], ["a", "b"], ["c"], ["cpu"]]
    back = rewritten(ckpttool.add_prefix, found, tmp_path)
    assert list(back["state_dict_ema"]) == ["module.a", "module.b"]
    assert (list(back["discriminator"]), list(back["rng"])) == (["c"], ["cpu"])


def test_two_parameters_of_an_optimizer_that_would_get_one_name_are_refused(tmp_path: Path) -> None:
    groups = [{"params": [0, 1], "param_names": ["a", "module.a"]}]
    tree = {"model": {"module.a": torch.ones(1)}, "optimizer": {"state": {}, "param_groups": groups}}
    with pytest.raises(Collision, match=r"'a' and 'module\.a' would both be named 'a'"):
        ckpttool.strip_prefix(opened(tree, tmp_path))


def test_versions_of_nested_wrappers_are_removed_with_their_prefixes(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    outer, inner = torch.nn.Module(), torch.nn.Module()
    outer.module, inner.module = inner, net
    for choice in ({"repeat": True}, {"prefix": "module.module."}):
        found = rewritten(ckpttool.strip_prefix, outer.state_dict(), tmp_path, **choice)
        assert dict(metadata(found)) == dict(metadata(net.state_dict()))
    back = rewritten(ckpttool.add_prefix, found, tmp_path, prefix="module.module.")
    assert dict(metadata(back)) == dict(metadata(outer.state_dict()))


def test_only_the_named_state_is_renamed(tmp_path: Path) -> None:
    tree = {"model": {"module.a": torch.ones(1)}, "model_ema": {"module.a": torch.zeros(1)}}
    found = rewritten(ckpttool.strip_prefix, tree, tmp_path, state="model_ema")
    assert (list(found["model"]), list(found["model_ema"])) == (["module.a"], ["a"])


def test_a_state_in_two_places_stays_one(tmp_path: Path) -> None:
    state = {"module.a": torch.ones(1)}
    found = rewritten(ckpttool.strip_prefix, {"model": state, "best": state}, tmp_path)
    assert found["model"] is found["best"]
    assert list(found["best"]) == ["a"]


@pytest.mark.parametrize(
    ("tree", "where", "hint"),
    [
        ({"model": {"a": ONE}, "model_ema": {"module.a": ONE}}, "model", "'model_ema' do: --state model_ema"),
        ({"0._orig_mod.w": ONE}, "", "1 of 1 keys hold '_orig_mod.' inside: --prefix _orig_mod. --anywhere"),
        ({"state_dict": {"_module.a": ONE, "b": ONE}}, "state_dict", "'_module.': --prefix _module."),
        ({"conv.weight": ONE}, "", "the first key is 'conv.weight'"),
        ({"s": {"model.a.w": ONE, "model.b.w": ONE}}, "s", "all keys begin with 'model.': --prefix model."),
    ],
)
def test_the_hint_names_the_prefix_that_there_is(tree: Any, where: str, hint: str, tmp_path: Path) -> None:
    key = rf"no key{f' of .{where}.' if where else ''} begins with 'module\.'"
    with pytest.raises(NothingToDo, match=key) as nothing:
        ckpttool.strip_prefix(opened(tree, tmp_path))
    assert str(nothing.value.hint).endswith(hint)
    assert nothing.value.exit_code == 1


def test_the_input_checkpoint_is_not_changed(tmp_path: Path) -> None:
    checkpoint = opened({"module.a": torch.ones(1)}, tmp_path)
    before = (tmp_path / "in.pt").read_bytes()
    ckpttool.strip_prefix(checkpoint)
    assert list(checkpoint.state().tensors) == ["module.a"]
    assert (tmp_path / "in.pt").read_bytes() == before


def test_a_file_nested_too_deep_to_copy_is_refused_by_name(tmp_path: Path) -> None:
    nested: Any = []
    for _ in range(250):
        nested = [nested]
    with pytest.raises(ckpttool.CkptToolError, match=r"in\.pt: .*nested too deeply"):
        rewritten(ckpttool.strip_prefix, {"model": {"module.a": ONE}, "deep": nested}, tmp_path)


# No part of a name is empty, as torch has no module or parameter with an empty name.
part = st.text("amodule_é\n", min_size=1, max_size=8)
key = st.lists(part, min_size=1, max_size=3).map(".".join)
keys = st.lists(key, min_size=1, max_size=5, unique=True)


@given(keys, st.sampled_from(["module.", "_orig_mod.", "a.b."]))
@example(["b.w", "a.w"], "a.b.")  # a module of the model has the name of the outer wrapper
def test_stripping_what_was_added_is_the_file_again(keys: list[str], prefix: str) -> None:
    state = OrderedDict((key, torch.ones(1)) for key in keys)
    names = (key.split(".") for key in keys)
    modules = {".".join(parts[:depth]): {"version": depth} for parts in names for depth in range(len(parts))}
    state._metadata = OrderedDict(modules)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        path = saved({"model": state, "epoch": 1}, Path(folder) / "f.pt")
        added = rewritten(ckpttool.add_prefix, torch.load(path), Path(folder), prefix=prefix)
        assert list(added["model"]) == [prefix + key for key in keys]
        back = rewritten(ckpttool.strip_prefix, added, Path(folder), prefix=prefix)
        assert_same(torch.load(path), back)


@settings(max_examples=20)
@given(keys, st.sampled_from(["module.", "_orig_mod.", "module._orig_mod."]))
def test_adding_what_was_stripped_is_the_file_again(keys: list[str], prefix: str) -> None:
    """Keys, module versions, the optimizer's names and the average's keys all carry the prefix."""
    parts = prefix.split(".")[:-1]
    paths = [".".join(parts[:count]) for count in range(len(parts) + 1)]
    paths += [prefix + key.rpartition(".")[0] for key in keys if "." in key]
    state = OrderedDict((prefix + key, torch.ones(1)) for key in keys)
    state._metadata = OrderedDict((path, {"version": 1}) for path in paths)  # type: ignore[attr-defined]
    group = {"params": list(range(len(keys))), "param_names": list(state)}
    tree = {"model": state, "ema": dict(state), "optimizer": {"state": {}, "param_groups": [group]}}
    with tempfile.TemporaryDirectory() as folder:
        path = saved(tree, Path(folder) / "f.pt")
        stripped = rewritten(ckpttool.strip_prefix, torch.load(path), Path(folder), prefix=prefix)
        assert list(stripped["model"]) == list(stripped["ema"]) == keys
        assert stripped["optimizer"]["param_groups"][0]["param_names"] == keys
        back = rewritten(ckpttool.add_prefix, stripped, Path(folder), prefix=prefix)
        assert_same(torch.load(path), back)


def test_every_wrapper_of_a_chain_is_named() -> None:
    ddp = "DistributedDataParallel or DataParallel"
    chains = found_prefixes(["module._orig_mod.w", "module._orig_mod.b"])
    assert [chain.wrapper for chain in chains] == [ddp, f"{ddp} around torch.compile"]
    (*_, chain) = found_prefixes(["n_averaged", "module._orig_mod.w"])
    assert chain.wrapper == "AveragedModel around torch.compile"


def test_a_part_of_a_state_takes_no_name_of_the_rest(cli: Cli, tmp_path: Path) -> None:
    """An average in the model's own dict: its tensors were replaced by the model's, and lost."""
    both = {"fc.w": ONE, "module.fc.w": 2 * ONE, "module.fc.b": 3 * ONE, "n": torch.tensor(4)}
    saved({"model": both}, tmp_path / "in.pt")
    for command in (["rename-keys", "--map", "^fc=module.fc"], ["add-prefix"]):
        ran = cli(command[0], tmp_path / "in.pt", tmp_path / "out.pt", "--state", "!module", *command[1:])
        assert (ran.code, "two keys would be named 'module.fc.w'" in ran.err) == (3, True)
        assert not (tmp_path / "out.pt").exists()
    with opened({"model": both}, tmp_path) as checkpoint:
        new, _ = ckpttool.rename_keys(checkpoint, [("fc", "lin")], state="module")
        assert_same(
            loaded(new, tmp_path)["model"],
            {"fc.w": ONE, "module.lin.w": 2 * ONE, "module.lin.b": 3 * ONE, "n": torch.tensor(4)},
        )


def test_a_prefix_before_no_key_and_a_mean_of_no_tensor_are_nothing_to_do(tmp_path: Path) -> None:
    empty = opened({}, tmp_path)
    with pytest.raises(NothingToDo, match=r"no key to put 'module\.' before"):
        ckpttool.add_prefix(empty)
    with pytest.raises(NothingToDo, match="no tensor of a type that has a mean"):
        ckpttool.average([empty, empty])
