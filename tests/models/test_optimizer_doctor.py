"""Doctor's commands for an optimizer, run: load_state_dict takes it, each momentum at its own parameter."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import ckpttool
from ckpttool.errors import Refused
from ckpttool.models import factory
from ckpttool.models.live_optimizer import built, described
from ckpttool.models.optimizer_refit import refit
from tests.support import optimizer_cases as cases
from tests.support.comparing import prefixed
from tests.support.running import Cli, Ran

HERE = cases.__file__
Tree = dict[str, Any]


def usual(model: nn.Module, optimizer: Any) -> Tree:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def ddp(model: nn.Module, optimizer: Any, prefix: str = "module.") -> Tree:
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    return {"model": prefixed(model.state_dict(), prefix), "optimizer": state}


def with_changed(change: Callable[[Tree], object]) -> Callable[[nn.Module, Any], Tree]:
    def tree(model: nn.Module, optimizer: Any) -> Tree:
        made = usual(model, optimizer)
        change(made)
        return made

    return tree


def in_bf16(tree: Tree) -> None:
    for entry in tree["optimizer"]["state"].values():
        entry |= {key: value.bfloat16() for key, value in entry.items() if value.ndim}


def keyed_by_text(tree: Tree) -> None:
    state = tree["optimizer"]["state"]
    tree["optimizer"]["state"] = {str(key): entry for key, entry in state.items()}


def without_buffers(tree: Tree) -> None:
    for entry in tree["optimizer"]["state"].values():
        entry["momentum_buffer"] = None


def never_stepped(tree: Tree) -> None:
    tree["optimizer"]["state"] = {}


def lightning(model: nn.Module, optimizer: Any) -> Tree:
    state = {"pytorch-lightning_version": "2.5", "optimizer_states": [optimizer.state_dict()]}
    return {**state, "state_dict": prefixed(model.state_dict(), "model.")}


def without_model(model: nn.Module, optimizer: Any) -> Tree:
    return optimizer.state_dict()


def pickled(model: nn.Module, optimizer: Any) -> Tree:
    alike = cases.net()  # of a class that can be pickled
    alike.load_state_dict(model.state_dict())
    return {"model": alike, "optimizer": optimizer.state_dict()}


def with_numpy(tree: Tree) -> None:
    group = tree["optimizer"]["param_groups"][0]
    group |= {"lr": numpy.float64(0.5), "note": argparse.Namespace(a=1)}


def several(model: nn.Module, made: Any) -> Tree:
    return {"model": model.state_dict(), "optimizers": [each.state_dict() for each in made]}


@dataclass(frozen=True)
class Case:
    """A file, and what it should load into; names are those of parameters."""

    then: str = "adamw"  # the optimizer that wrote it
    now: str = "adamw"
    model: str = "net"
    model_now: str = ""
    tree: Callable[[nn.Module, Any], Tree] = usual
    fresh: str = ""  # parameters that have nothing kept of them afterwards: "d.weight d.bias"
    commands: int = 1  # how many `ckpttool optimizer` there are
    says: str = ""  # an expression that the output matches


CASES = {
    "as it was": Case(commands=0),
    "a group split": Case(now="decay", says="different number of parameter groups"),
    "groups merged": Case(then="decay"),
    "groups in another order": Case(
        "decay(named=True)", "decay(named=True, flip=True)", says="goes by posit"
    ),
    "groups of one size swapped, without names": Case("decay", "decay(flip=True)", says="would get"),
    "a group for the head": Case(now="head_first"),
    "a parameter added": Case(model_now="net('abcd')", fresh="d.weight d.bias", says="2 parameters new: d.w"),
    "a parameter added in the middle, by name": Case(
        then="named", model_now="net('adbc')", fresh="d.weight d.bias"
    ),
    "a parameter added in front": Case(model_now="net('dabc')", fresh="d.weight d.bias"),
    "a layer in place of another, by name": Case(
        "named", "named", "net('abc')", "net('bdc')", fresh="d.weight d.bias", says="would get"
    ),
    "a parameter removed": Case(
        model="net('abcd')", model_now="net('abd')", says="2 parameters gone: c.weig"
    ),
    "a parameter frozen": Case(now="trained", model_now="net(frozen='b')", says="gone: b.weight"),
    "frozen before and now": Case("trained", "trained", "net(frozen='b')", "net(frozen='b')", commands=0),
    "unfrozen, by name": Case("named", "adamw", "net('ac')", "net('abc')", fresh="b.weight b.bias"),
    "resized": Case(model_now="resized", fresh="c.weight c.bias", says="of shape .2, 4., not .5, 4."),
    "renamed by DDP": Case(then="named", now="decay", tree=ddp),
    "renamed by compile": Case("named", "decay", tree=lambda m, o: ddp(m, o, "_orig_mod.")),
    "a compiled model now": Case("named", "decay", model_now="compiled"),
    "DDP and compile": Case("named", "decay", tree=lambda m, o: ddp(m, o, "module._orig_mod.")),
    "layers in another order, by name": Case(
        "named", "named", model_now="net('bac')", says="'b.weight' would"
    ),
    "layers in another order, without names": Case(model_now="net('bac')", says="if it lists them as the fi"),
    "layers in another order, told by shapes": Case(
        "adamw", "adamw", "net('ac')", "net('ca')", says="a.weight' would|c.weight' would"
    ),
    "decay groups without names": Case("decay", "decay", commands=0),
    "decay groups with a new layer": Case("decay", "decay", model_now="net('abcd')", fresh="d.weight d.bias"),
    "keyed by names": Case("named", "decay", tree=usual),
    "keyed by text, as DCP leaves it": Case(tree=with_changed(keyed_by_text), says="would get nothing"),
    "Adam to SGD": Case("named", "sgd", fresh="*", says="SGD does not know its exp_avg, exp_avg_sq"),
    "SGD to Adam": Case("sgd", "adamw", fresh="*", says="AdamW does not know its momentum_buffer"),
    "Adam to Adamax": Case("adamw", "torch.optim:Adamax(lr=0.1)", fresh="*", says="needs its exp_inf"),
    "no momentum to momentum": Case("sgd(momentum=0.0)", "sgd", commands=0, fresh="*"),
    "amsgrad added, whose setting is the file's": Case(
        "adamw", "adamw(amsgrad=True)", commands=0, says="amsg"
    ),
    "momentum_buffer None": Case("sgd", "sgd", tree=with_changed(without_buffers), commands=0, fresh="*"),
    "states in bf16": Case(tree=with_changed(in_bf16), commands=0, says="states are bfloat16"),
    "bf16, and a new group": Case(now="decay", tree=with_changed(in_bf16)),
    "foreach to fused": Case(
        "adamw(foreach=True)", "adamw(fused=True)", commands=0, says="foreach True in the"
    ),
    "fused, and a new group": Case("adamw(fused=True)", "decay"),
    "Adagrad with a new layer": Case("adagrad", "adagrad", model_now="net('abcd')", says="2 parameters new"),
    "LBFGS": Case("lbfgs", "lbfgs", commands=0, fresh="*"),
    "Lightning": Case("named", "decay", tree=lightning),
    "Lightning without names": Case(now="decay", tree=lightning),
    "a file of the optimizer alone": Case(tree=without_model, commands=0),
    "the same, by name, and a new group": Case("named", "decay", tree=without_model),
    "two optimizers": Case("two", "two", model_now="net('abcd')", tree=several, fresh="d.weight d.bias"),
    "never stepped": Case(now="decay", tree=with_changed(never_stepped), fresh="*"),
    "tied then and now": Case("adamw", "decay", "net(tied='ab')", "net(tied='ab')"),
    "tied since": Case("named", "adamw", "net()", "net(tied='ab')", says="gone: b.weight"),
    "untied since": Case("named", "adamw", "net(tied='ab')", "net()", fresh="b.weight"),
    "a whole pickled model": Case("named", "decay", tree=pickled, says="pickled-model"),
    "objects among the settings": Case(now="decay", tree=with_changed(with_numpy), says="lr numpy"),
    "a class": Case(
        "named", "torch.optim:AdamW(lr=0.5)", commands=0, says="lr 0.1 in the file, 0.5 in the op"
    ),
}


def spec(name: str) -> str:
    name = re.sub(r"net\('(\w+)'", r"net(order='\1'", name)
    return name if ":" in name else f"{HERE}:{name}"


def made(model: str, optimizer: str) -> tuple[nn.Module, Any]:
    """Build both with values."""
    built_model = factory.with_values(spec(model))
    of = built_model.parameters() if optimizer.startswith("torch.optim") else built_model
    return built_model, factory.function(spec(optimizer))(of)


def written(case: Case, path: Path) -> None:
    model, optimizer = made(case.model, case.then)
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        cases.stepped(model, each)
    torch.save(case.tree(model, optimizer), path)


def commands_of(ran: Ran) -> list[str]:
    return [line for line in ran.out.splitlines() if line and not line.startswith("#")]


def python_of(ran: Ran) -> str:
    found = re.search(r"^# (?:or )?in Python: (optimizer.*)$", ran.out, re.MULTILINE)
    assert found, ran.out
    return found[1]


def require_momentum(case: Case, model: nn.Module, optimizers: list[Optimizer], before: nn.Module) -> None:
    """Compare what each parameter has with the number of its name."""
    fresh, known = case.fresh.split(), dict(before.named_parameters())
    plain = {name.removeprefix("_orig_mod."): each for name, each in model.named_parameters()}
    for optimizer in optimizers:
        for name, parameter in plain.items():
            kept = optimizer.state.get(parameter, {})
            tensors = {k: v for k, v in kept.items() if isinstance(v, torch.Tensor) and v.ndim}
            if "d" in tensors:  # LBFGS, which keeps all of them in one vector
                assert tensors["d"].numel() == sum(each.numel() for each in plain.values())
            elif name in fresh or fresh == ["*"]:
                assert not tensors, name
            elif "sum" in tensors and name not in known:
                assert tensors["sum"].eq(0.25).all()
            elif optimizer.param_groups and any(
                parameter is each for group in optimizer.param_groups for each in group["params"]
            ):
                assert tensors, name
                for key, tensor in tensors.items():
                    wanted = torch.tensor(cases.value_of(name, key))
                    assert torch.allclose(tensor.float(), wanted, rtol=0.01), (name, key)


@pytest.mark.parametrize("name", CASES)
def test_its_commands_put_each_momentum_at_its_own_parameter(name: str, cli: Cli, tmp_path: Path) -> None:
    case = CASES[name]
    written(case, tmp_path / "last.pt")
    model_now = case.model_now or case.model
    args = ["--model", spec(model_now), "--optimizer", spec(case.now)]
    ran = cli("doctor", tmp_path / "last.pt", *args)
    commands = [line for line in commands_of(ran) if shlex.split(line)[1] == "optimizer"]
    assert len(commands) == case.commands, ran.out + ran.err
    text = re.sub(r"\n#   +", " ", ran.out)
    assert re.search(case.says, text), text
    for line in commands_of(ran):
        if shlex.split(line)[1] != "reload":  # the model of some cases does not fit, and says so
            assert cli(*shlex.split(line)[1:]).code == 0, line
    model, optimizer = made(model_now, case.now)
    if case.tree is pickled or "in Python: optimizer" not in ran.out:  # torch.load refuses objects
        output = shlex.split(commands[-1])[3]
        optimizer.load_state_dict(torch.load(output, weights_only=False)["optimizer"])
    else:
        exec(python_of(ran), {"torch": torch, "optimizer": optimizer})
    every = optimizer if isinstance(optimizer, list) else [optimizer]
    before, _ = made(case.model, case.then)
    require_momentum(case, model, every, before)
    for each in every:  # and the next step works
        cases.stepped(model, each)
    if commands:
        output = shlex.split(commands[-1])[3]
        again = cli("doctor", output, *args, "--json").json
        assert again["optimizer_loads"] is True
        assert not [each for each in again["problems"] if each["kind"].startswith("optimizer-g")]


def test_a_shell_runs_what_doctor_prints(cli: Cli, tmp_path: Path) -> None:
    case = CASES["layers in another order, by name"]
    written(case, tmp_path / "last.pt")
    spec_now = ["--model", spec(case.model_now), "--optimizer", spec(case.now)]
    ran = cli("doctor", tmp_path / "last.pt", *spec_now)
    there = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-e"], input=ran.out, text=True, env=there, capture_output=True)
    assert done.returncode == 0, done.stderr
    model, optimizer = made(case.model_now, case.now)
    exec(python_of(ran), {"torch": torch, "optimizer": optimizer})
    require_momentum(case, model, [optimizer], model)


# ---- What no command can do


REFUSED = {
    "LBFGS with a new layer": (Case("lbfgs", "lbfgs", model_now="net('abcd')"), "LBFGS, which keeps all"),
    "LBFGS in another order": (Case("lbfgs", "lbfgs", model_now="net('cab')"), "LBFGS, which keeps all"),
    "a file of the optimizer alone": (
        Case(model="net('ac')", tree=without_model, model_now="net('abc')"),
        "names no parameters, and more than one assignment of the model's parameters fits",
    ),
    "groups that nothing tells apart": (
        Case("head_first(head='a')", "head_first(head='a')", "net('ab')", "net('abd')"),
        "names no parameters, and (more than one|no) assignment",
    ),
    "two for one": (
        Case("two", "adamw", tree=several),
        "has 2 .optimizers.0, optimizers.1., and there are 1",
    ),
    "no state": (
        Case(tree=lambda m, o: {"model": m.state_dict(), "optimizer": {"param_groups": []}}),
        "no optimizer's state .*begins afresh",
    ),
    "no optimizer": (Case(tree=lambda m, o: {"model": m.state_dict()}), "no optimizer's state .*begins afr"),
    "a class that refuses it": (Case("adamw", "wrapped"), "no command can fix it: KeyError: 'mine'"),
    "momentum of another shape": (
        Case("named", tree=with_changed(lambda tree: tree["optimizer"]["state"][0].update(swapped()))),
        "keeps momentum of shape .9. for 'a.weight'",
    ),
}


def odd(tree: Tree) -> None:
    for entry in tree["optimizer"]["state"].values():
        entry.clear()
        entry |= {1: torch.ones(2), "a": (torch.ones(3),), None: 3}


def test_odd_keys_are_no_obstacle(cli: Cli, tmp_path: Path) -> None:
    tree, said = rebuilt(cli, tmp_path, Case("named", tree=with_changed(odd)))
    assert tree["optimizer"]["state"] == {}
    assert said["reset"][0] == "a.weight (AdamW does not know its 1, None, a)"


def swapped() -> Tree:
    return {"exp_avg": torch.ones(9), "exp_avg_sq": torch.ones(9)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_command_can_mend_is_said_by_name(name: str, cli: Cli, tmp_path: Path) -> None:
    case, message = REFUSED[name]
    written(case, tmp_path / "last.pt")
    args = ["--model", spec(case.model_now or case.model), "--optimizer", spec(case.now)]
    ran = cli("doctor", tmp_path / "last.pt", *args)
    assert not [line for line in commands_of(ran) if shlex.split(line)[1] == "optimizer"]
    text = re.sub(r"\n#   +", " ", ran.out)
    assert ran.code == 1 and re.search(message, text) and "# no command can fix" in text, text
    if name != "a class that refuses it":
        to = cli("optimizer", tmp_path / "last.pt", tmp_path / "out.pt", "--to", "indices", *args)
        assert to.code == 3 and not (tmp_path / "out.pt").exists(), to


def test_an_optimizer_of_foreign_parameters_is_refused(cli: Cli, tmp_path: Path) -> None:
    written(CASES["as it was"], tmp_path / "last.pt")
    for factory_of, message in {
        "foreign": "has a parameter that is none of the model's: number 6 of its group 0",
        "nothing": "returned a Net, not a torch.optim.Optimizer",
        "value_of": "takes neither params nor model",
    }.items():
        ran = cli("doctor", tmp_path / "last.pt", "--model", spec("net"), "--optimizer", spec(factory_of))
        assert ran.code == 2 and message in ran.err, ran


@pytest.mark.parametrize("command", ["doctor last.pt", "optimizer last.pt out.pt --to indices"])
def test_an_optimizer_needs_its_model(command: str, cli: Cli, tmp_path: Path) -> None:
    like = ["--like", "last.pt"] if command.startswith("doctor") else []
    ran = cli(*command.split(), "--optimizer", spec("adamw"), *like)
    assert ran.code == 2 and "--optimizer needs its model: --model SPEC" in ran.err
    if not like:
        ran = cli(*command.split(), "--settings", "file")
        assert ran.code == 2 and "--settings is about the groups" in ran.err


# ---- The command


def rebuilt(cli: Cli, tmp_path: Path, case: Case, *more: str, to: str = "indices") -> tuple[Tree, Any]:
    written(case, tmp_path / "last.pt")
    args = ["--model", spec(case.model_now or case.model), "--optimizer", spec(case.now), *more]
    ran = cli("optimizer", tmp_path / "last.pt", tmp_path / "out.pt", "--to", to, "--json", *args)
    assert ran.code == 0, ran.err
    return torch.load(tmp_path / "out.pt"), ran.json


def test_the_settings_of_groups_are_the_file_s_but_for_how_a_step_is_computed(
    cli: Cli, tmp_path: Path
) -> None:
    case = Case("adamw(lr=0.5, foreach=True, weight_decay=0.25)", "decay", model_now="net('abcd')")
    tree, said = rebuilt(cli, tmp_path, case)
    groups = tree["optimizer"]["param_groups"]
    assert [(group["lr"], group["weight_decay"], group["foreach"]) for group in groups] == [
        (0.5, 0.25, None),
        (0.5, 0.25, None),
    ]
    assert sorted(said["settings"]) == [
        "group 0: weight_decay 0.25 in the file, 0.1 in the optimizer: the file's",
        "group 1: weight_decay 0.25 in the file, 0.0 in the optimizer: the file's",
        "groups 0, 1: foreach True in the file, None in the optimizer: the optimizer's",
        "groups 0, 1: lr 0.5 in the file, 0.1 in the optimizer: the file's",
    ]
    assert said["added"] == ["d.weight", "d.bias"] and said["dropped"] == []


def test_or_the_optimizer_s_and_what_an_option_adds_begins_as_zeros(cli: Cli, tmp_path: Path) -> None:
    case = Case("named", "adamw(amsgrad=True, lr=0.25)", tree=with_changed(in_bf16))
    tree, said = rebuilt(cli, tmp_path, case, "--settings", "optimizer")
    assert said["padded"][0] == "a.weight: max_exp_avg_sq" and len(said["padded"]) == 6
    entry = tree["optimizer"]["state"][0]
    assert entry["max_exp_avg_sq"].dtype == torch.bfloat16 and not entry["max_exp_avg_sq"].any()
    model, optimizer = made("net", case.now)
    optimizer.load_state_dict(tree["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["amsgrad"]
    cases.stepped(model, optimizer)


def test_of_another_class_the_settings_are_the_optimizer_s(cli: Cli, tmp_path: Path) -> None:
    tree, said = rebuilt(cli, tmp_path, Case("named", "sgd"))
    (group,) = tree["optimizer"]["param_groups"]
    assert (group["lr"], group["momentum"], "betas" in group) == (0.1, 0.9, False)
    assert tree["optimizer"]["state"] == {} and len(said["reset"]) == 6


@pytest.mark.parametrize("to", ["names", "flat"])
def test_groups_are_rebuilt_by_names_too(to: str, cli: Cli, tmp_path: Path) -> None:
    tree, _ = rebuilt(cli, tmp_path, Case("named", "decay", tree=ddp), to=to)
    kept = tree["optimizer"]
    if to == "flat":
        assert kept["param_groups.module.a.bias.lr"] == 0.1
        moment = kept["state.module.b.weight.exp_avg"]
        case = Case("named", "decay", tree=lambda m, o: tree)
        tree, _ = rebuilt(cli, tmp_path, case, "--force")
        assert torch.equal(tree["optimizer"]["state"][1]["exp_avg"], moment)
    else:
        assert kept["param_groups"][0]["params"] == [f"module.{name}.weight" for name in "abc"]
        moment = kept["state"]["module.b.weight"]["exp_avg"]
    assert moment.eq(cases.value_of("b.weight", "exp_avg")).all()


def test_what_fits_has_nothing_to_do_and_the_rest_of_the_file_stays(cli: Cli, tmp_path: Path) -> None:
    case = Case("named", "decay")
    tree, said = rebuilt(cli, tmp_path, case)
    assert tree["epoch"] == 3 and [*tree["model"]] == [*cases.net().state_dict()] and said["moved"] == 4
    args = ["--to", "indices", "--model", spec("net"), "--optimizer", spec("decay")]
    again = cli("optimizer", tmp_path / "out.pt", tmp_path / "more.pt", *args)
    assert again.code == 1 and "has the groups of that optimizer already" in again.err


def test_a_dropped_parameter_is_named_and_one_of_several_optimizers_can_stay(tmp_path: Path) -> None:
    model, both = made("net", "two")
    for each in both:
        cases.stepped(model, each)
    torch.save(several(model, both), tmp_path / "two.pt")
    smaller = cases.net("ac")
    live = described(smaller, torch.optim.AdamW(smaller.c.parameters()), "SPEC")  # type: ignore[union-attr]
    with ckpttool.open(tmp_path / "two.pt") as checkpoint:
        new, change = refit(checkpoint, "indices", optimizers=[None, live])
        ckpttool.save(new, tmp_path / "out.pt")
    assert change.dropped == ("b.bias", "b.weight") and change.optimizers == ("optimizers.1",)
    assert change.absent == ("a.weight", "a.bias")
    kept = torch.load(tmp_path / "out.pt")["optimizers"]
    assert kept[0].keys() == both[0].state_dict().keys() and len(kept[0]["state"]) == 2
    assert [entry["exp_avg"].shape for entry in kept[1]["state"].values()] == [(2, 4), (2,)]


# ---- In Python


def test_doctor_takes_a_live_optimizer_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    written(CASES["a group split"], tmp_path / "last.pt")
    model, optimizer = made("net", "decay")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)  # which wraps its step
    cases.stepped(model, optimizer)
    before = [value.clone() for entry in optimizer.state.values() for value in entry.values()]
    diagnosis = ckpttool.doctor(tmp_path / "last.pt", model, optimizer=optimizer)
    assert (diagnosis.loads, diagnosis.optimizer_loads) == (True, False)
    after = [value for entry in optimizer.state.values() for value in entry.values()]
    assert all(map(torch.equal, before, after)) and scheduler.last_epoch == 0
    assert diagnosis.problems[0].kind == "optimizer-groups"
    assert ckpttool.doctor(tmp_path / "last.pt", model).optimizer_loads is None
    with pytest.raises(TypeError, match="takes an optimizer with its model"):
        ckpttool.doctor(tmp_path / "last.pt", like=tmp_path / "last.pt", optimizer=optimizer)


def test_an_optimizer_takes_no_memory_for_what_it_keeps(tmp_path: Path) -> None:
    model, (optimizer,) = built(spec("net"), spec("adamw"))
    assert all(each.is_meta for each in model.parameters()) and optimizer is not None
    model, (optimizer,) = built(spec("net"), spec("adagrad"))  # keeps sums from the beginning
    assert not any(each.is_meta for each in model.parameters())


def test_an_object_among_the_settings_is_refused(tmp_path: Path) -> None:
    model, optimizer = made("net", "adamw")
    torch.save(usual(model, cases.stepped(model, optimizer)), tmp_path / "last.pt")
    optimizer.param_groups[0]["rule"] = cases.net
    live = described(model, optimizer, "SPEC")
    with ckpttool.open(tmp_path / "last.pt") as checkpoint:
        with pytest.raises(Refused, match="has the setting 'rule', a function"):
            refit(checkpoint, "indices", optimizers=[live])
        with pytest.raises(Refused, match=r"has 1 .optimizer., and there are 0"):
            refit(checkpoint, "indices", optimizers=[])
