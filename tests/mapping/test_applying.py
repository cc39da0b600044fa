"""Rules on whole checkpoints: what they claim, keep and refuse, and what an optimizer keeps of parameters."""

from __future__ import annotations

import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import ckpttool
from ckpttool.errors import Collision, Refused, UsageFault
from ckpttool.mapping.applying import apply, named
from ckpttool.mapping.rules import MapRules, Rule
from ckpttool.mapping.verbs import Concat, PermuteHeads, Reshape, Stack, Transpose, Verb
from tests.support.comparing import opened
from tests.support.dialects import assert_reversible, mapped, random_state, refusal, rules
from tests.support.trees import big_endian

# ---- Rules on whole checkpoints: what they claim, keep, drop and refuse, and what stays as it was beside it


AB = {"a.w": torch.arange(6.0).reshape(2, 3), "b.w": torch.ones(3)}
A = 'from = "a.w"\nto = "x.w"'
TURN = f"{A}\nsteps = [{{ transpose = [1, 0] }}]"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (['from = "c"\nto = "d"'], "the rule 'c' -> 'd' finds no tensor\n  hint: the first name is 'a.w'"),
        ([A], "no rule names 1 of 2 tensors: 'b.w'"),
        ([A, 'from = "{m:a|b}.w"\nto = "{m}.v"'], "two rules claim 'a.w': the rule 'a.w' -> 'x.w'"),
        (['from = ["a.w", "{m:a|b}.w"]\nto = ["c", "d"]'], "have different placeholders"),
        ([A, 'drop = "{m:*}.w"'], "two rules claim 'a.w'"),
        ([A, 'from = "b.w"\nto = "x.w"'], "'a.w' and 'b.w' would both be named 'x.w'"),
        ([A, 'from = ["b.w", "c.w"]\nto = "d"\nsteps = [{ concat = 0 }]'], "has 'b.w' and no 'c.w'"),
        ([A, 'from = "b.w"\nto = "c"\nsteps = [{ transpose = [1, 0] }]'], "'b.w' has shape [3], whose axes"),
        ([A, 'from = "b.w"\nto = "c"\nsteps = [{ reshape = ["n"] }]'], "nothing says the number 'n'"),
        ([A, 'from = "b.w"\nto = "c"\nsteps = [{ reshape = ["7 // 2"] }]'], "7 does not divide by 2"),
        ([A, 'from = "b.w"\nto = "c.{i}"\nsteps = [{ unstack = "i" }, { cast = "bf16" }]'], ""),
        ([A, 'from = "b.w"\nto = "c"', 'tie = "d"\nof = "e"'], "has no 'e', which tie = 'd' needs"),
        ([A, 'from = "b.w"\nto = "c"', 'untie = "c"\nof = "x.w"\non = "to"'], "'c' is not 'x.w' under"),
        ([A, 'from = "b.w"\nto = "c"', 'untie = "a.w"\nof = "b.w"'], "'a.w' is not 'b.w' under another name"),
    ],
)  # fmt: skip
def test_what_rules_can_t_do_is_refused_by_name(tables: list[str], said: str, tmp_path: Path) -> None:
    if not said:
        assert [*mapped(AB, tmp_path, rules(*tables))[0]] == ["x.w", "c.0", "c.1", "c.2"]
        return
    try:
        assert said in refusal(AB, tmp_path, rules(*tables))
    except ckpttool.CkptToolError as fault:
        assert said in str(fault)


@pytest.mark.parametrize(
    "step",
    [
        "transpose = [1, 0]", "reshape = [-1]", 'permute-heads = 1, to = "halves"',
        "scale = 2", 'cast = "bf16"', 'unstack = "i"',
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_packed_tensors_are_renamed_and_no_more(step: str, part: str, tmp_path: Path) -> None:
    """Codes and scales are numbers only together."""
    packed = {"m.weight": torch.rand(8, 8).to(torch.float8_e4m3fn), "m.weight_scale_inv": torch.rand(2, 2)}
    to = "n.{i}" if "unstack" in step else "n"
    by = rules(f'from = "m.{part}"\nto = "{to}"\nsteps = [{{ {step} }}]', top='rest = "keep"')
    said = refusal(packed, tmp_path, by)
    of_type = (step, part) == ("scale = 2", "weight")  # refused before, as no float is
    assert ("is not scaled" if of_type else "is packed, and its codes can't be laid out") in said
    assert_reversible(packed, tmp_path, rules('from = "m.{w:*}"\nto = "layers.{w}"'))


def test_the_rest_is_kept_dropped_or_refused_as_the_rules_say(tmp_path: Path) -> None:
    kept, _ = mapped(AB, tmp_path, rules(A, top='rest = "keep"'))
    assert [*kept] == ["x.w", "b.w"]
    dropped, report = mapped(AB, tmp_path, rules(A, top='rest = "drop"'))
    assert ([*dropped], report.dropped) == (["x.w"], ("b.w",))
    with (
        opened({"a.w": torch.ones(1), "x.w": torch.ones(1)}, tmp_path) as checkpoint,
        pytest.raises(Collision),
    ):
        apply(checkpoint, rules(A, top='rest = "keep"'))


def test_names_may_be_exchanged(tmp_path: Path) -> None:
    made, report = mapped(AB, tmp_path, rules('from = ["a.w", "b.w"]\nto = ["b.w", "a.w"]'))
    assert torch.equal(made["b.w"], AB["a.w"]) and torch.equal(made["a.w"], AB["b.w"])
    assert report.renaming == {"a.w": "b.w", "b.w": "a.w"}


def test_ties_stay_ties_through_the_same_rules_and_end_where_rules_differ(tmp_path: Path) -> None:
    both = {"a.w": AB["a.w"], "b.w": AB["a.w"], "c.w": AB["a.w"]}
    by = rules(
        'from = "{m:a|b}.w"\nto = "{m}.v"\nsteps = [{ transpose = [1, 0] }, { reshape = [6] }]',
        'from = "c.w"\nto = "c.v"',
    )
    made, _ = mapped(both, tmp_path, by)
    assert made["a.v"].data_ptr() == made["b.v"].data_ptr() != made["c.v"].data_ptr()


def test_a_view_shares_its_storage_and_a_joined_tensor_has_its_own(tmp_path: Path) -> None:
    made, _ = mapped(
        AB,
        tmp_path,
        rules('from = "a.w"\nto = ["x", "y"]\nsteps = [{ split = 0 }]', 'from = "b.w"\nto = "z"'),
    )
    assert made["x"].untyped_storage().data_ptr() == made["y"].untyped_storage().data_ptr()
    assert made["y"].tolist() == [[3.0, 4.0, 5.0]]


def test_a_model_that_was_pickled_whole_gives_its_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save(model, tmp_path / "in.pt")
    by = rules('from = "0.weight"\nto = "fc.weight"\nsteps = [{ transpose = [1, 0] }]', top='rest = "keep"')
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        made, _ = apply(checkpoint, by)
        ckpttool.save(made, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["fc.weight"], model[0].weight.t())


def test_torch_s_versions_of_modules_move_along(tmp_path: Path) -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    made, _ = mapped(state, tmp_path, rules('from = "0.{p:*}"\nto = "norm.{p}"'))
    assert made._metadata["norm"] == {"version": 2}


def test_nested_dicts_and_a_named_state(tmp_path: Path) -> None:
    tree = {"state_dict": OrderedDict(AB), "other": OrderedDict(AB), "epoch": 3}
    made, _ = mapped(tree, tmp_path, rules(A, top='rest = "keep"'), state="other")
    assert [*made["state_dict"]] == ["a.w", "b.w"] and [*made["other"]] == ["x.w", "b.w"]
    made, _ = mapped(
        {"a": {"w": AB["a.w"]}, "b": {"w": AB["b.w"]}}, tmp_path, rules(TURN, top='rest = "keep"')
    )
    assert torch.equal(made["x.w"], AB["a.w"].t()) and "b.w" in made


def test_what_is_no_plain_tensor_is_renamed_and_no_more(tmp_path: Path) -> None:
    state = {"a.w": torch.eye(3).to_sparse(), "b.w": torch.ones(3), "c": 7}
    by = rules(A, 'from = "{n:b.w|c}"\nto = "new.{n}"')
    made, _ = mapped(state, tmp_path, by)
    assert made["x.w"].is_sparse and made["new.c"] == 7
    said = refusal(state, tmp_path, rules(TURN, top='rest = "keep"'))
    assert "'a.w' is not a plain tensor: rules can rename it, no more" in said


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), ()])
def test_tensors_without_elements_or_axes_go_through(shape: tuple[int, ...], tmp_path: Path) -> None:
    state = {f"l.{i}.w": torch.zeros(shape) for i in range(2)}
    made, _ = mapped(state, tmp_path, rules('from = "l.{i}.w"\nto = "w"\nsteps = [{ stack = "i" }]'))
    assert made["w"].shape == (2, *shape)


def test_bits_are_kept_of_any_type(tmp_path: Path) -> None:
    kinds = [torch.float8_e4m3fn, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.bool]
    for dtype in kinds:
        raw = torch.arange(48 * dtype.itemsize, dtype=torch.int64).remainder(2).to(torch.uint8)
        state = {"a.w": raw.view(dtype).reshape(6, 8), "b.w": raw.view(dtype).reshape(6, 8)}
        steps = '{ concat = 0 }, { permute-heads = 2, to = "pairs" }, { transpose = [1, 0] }'
        by = rules(f'from = ["a.w", "b.w"]\nto = "c"\nsteps = [{steps}]')
        there, _ = mapped(state, tmp_path, by)
        back, _ = mapped(there, tmp_path, by.inverse())
        assert all(back[n].contiguous().view(torch.uint8).equal(state[n].view(torch.uint8)) for n in state), (
            dtype
        )


def test_a_file_of_another_byte_order_gives_the_same_values(tmp_path: Path) -> None:
    tensor = torch.arange(48.0).reshape(6, 8)
    big_endian(tensor, tmp_path / "in.pt")
    turned = 'from = "t"\nto = "u"\nsteps = [{ transpose = [1, 0] }, { permute-heads = 2, to = "halves" }'
    for step, wanted in ((" ]", tensor), (", { scale = 3 } ]", tensor * 3)):
        with ckpttool.open(tmp_path / "in.pt") as checkpoint:
            made, _ = apply(checkpoint, rules(turned + step))
            ckpttool.save(made, tmp_path / "out.safetensors", force=True)
        made_of = load_file(tmp_path / "out.safetensors")["u"]
        assert torch.equal(made_of, wanted.t()[[0, 2, 1, 3, 4, 6, 5, 7]])


def test_no_state_and_an_empty_one(tmp_path: Path) -> None:
    assert "holds no" in refusal({"epoch": 3}, tmp_path, rules(A))
    assert "finds no tensor" in refusal({}, tmp_path, rules(A))
    optional = rules(f"{A}\noptional = true")
    assert mapped({}, tmp_path, optional)[0] == {}


def test_many_names_take_a_moment(tmp_path: Path) -> None:
    one = torch.ones(1)
    state = {f"layers.{i}.experts.{e}.w{n}": one for i in range(20) for e in range(100) for n in (1, 2, 3)}
    tables = [
        f'from = "layers.{{i}}.experts.{{e}}.w{n}"\nto = "m.{{i}}.w{n}"\nsteps = [{{ stack = "e" }}]'
        for n in (1, 2, 3)
    ]
    started = time.process_time()
    with opened(state, tmp_path) as checkpoint:
        made, _ = apply(checkpoint, rules(*tables))
    assert made.state("")["m.19.w3"].shape == (100, 1)
    exact = MapRules(tuple(Rule((name,), (f"new.{name}",)) for name in state))
    with opened(state, tmp_path) as checkpoint:
        apply(checkpoint, exact)
    assert time.process_time() - started < 30


def test_nothing_is_read_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state({"transformer.wte.weight": (11, 8), "lm_head.weight": (11, 8)})
    with opened(state, tmp_path) as checkpoint:
        read: list[int] = []
        checkpoint.source.observers.append(lambda offset, data: read.append(len(data)))
        with pytest.raises(Refused):
            apply(checkpoint, named("nanogpt-gpt2"))
        apply(
            checkpoint,
            rules(
                'from = "transformer.wte.weight"\nto = "w"\nsteps = [{ transpose = [1, 0] }]',
                top='rest = "keep"',
            ),
        )
        assert read == []


def test_a_map_is_applied_by_name_or_file_both_ways(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(rules(TURN, top='rest = "keep"').to_toml(), encoding="utf-8")
    with opened(AB, tmp_path) as checkpoint:
        there, report = ckpttool.apply_map(checkpoint, str(tmp_path / "mine.toml"))
        assert report.names == {"x.w": ("a.w",), "b.w": ("b.w",)}
        back, _ = ckpttool.apply_map(there, str(tmp_path / "mine.toml"), inverse=True)
        assert back.state("").tensors["a.w"].shape == (2, 3)
        with pytest.raises(UsageFault, match="no such map"):
            ckpttool.apply_map(checkpoint, "mine")
        with pytest.raises(TypeError, match="takes an open checkpoint, not a path"):
            ckpttool.apply_map("in.pt", "meta-llama")  # type: ignore[arg-type]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Rule, dict[str, torch.Tensor]]:
    """Draw a rule of any reversible steps that go together, and tensors for it."""
    parts, experts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = [4 * draw(st.integers(1, 2)), 4 * draw(st.integers(1, 2))]
    names = [f"w.{{e}}.{part}" for part in range(parts)]
    state = {
        f"w.{e}.{part}": torch.arange(float(shape[0] * shape[1])).reshape(shape) + 100 * e + 1000 * part
        for e in range(experts)
        for part in range(parts)
    }
    kinds = draw(st.permutations(["concat", "stack", *draw(st.lists(st.sampled_from(EACH), max_size=4))]))
    steps: list[Verb] = []
    for kind in kinds:
        axis = draw(st.integers(0, len(shape) - 1))
        if kind == "concat" and parts > 1:
            steps.append(Concat(axis))
            shape[axis] *= parts
        elif kind == "stack":
            steps.append(Stack("e", axis))
            shape.insert(axis, experts)
        elif kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            steps.append(Transpose(axes=tuple(order)))
            shape = [shape[each] for each in order]
        elif kind == "reshape":
            steps.append(Reshape(shape=(-1, 2), before=tuple(shape)))
            shape = [int(np.prod(shape)) // 2, 2]
        elif kind == "permute-heads" and shape[axis] % 4 == 0:
            steps.append(PermuteHeads(heads=2, to=draw(st.sampled_from(["halves", "pairs"])), axis=axis))
    return Rule(tuple(names), ("v",), tuple(steps)), state


EACH = ["transpose", "reshape", "permute-heads"]


@given(pipelines())
def test_any_reversible_rule_is_undone_bit_for_bit(drawn: tuple[Rule, dict[str, torch.Tensor]]) -> None:
    rule, state = drawn
    with tempfile.TemporaryDirectory() as folder:
        assert_reversible(state, Path(folder), MapRules((rule,)))


# ---- What an optimizer keeps of parameters follows them through the rules, and training goes on as before


FUSE = 'from = ["q.weight", "k.weight", "v.weight"]\nto = "qkv.weight"\n'
FUSE += "steps = [{ concat = 0, sizes = [4, 2, 2] }]"
TURN_MOMENTS = 'from = "out.weight"\nto = "proj.weight"\nsteps = [{ transpose = [1, 0] }]'
NAME = 'from = "out.bias"\nto = "proj.bias"'
BY = rules(FUSE, TURN_MOMENTS, NAME)


class Apart(nn.Module):
    """Attention without the attention: q, k and v of different sizes, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, size, bias=False) for size in (4, 2, 2))
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.q(x), self.k(x), self.v(x)], -1))


class Turned(nn.Module):
    """A linear layer whose weight is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(8, 5)), nn.Parameter(torch.zeros(5))


class Fused(nn.Module):
    """The same with q, k and v as one layer, and a transposed one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 8, bias=False)
        self.proj = Turned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x) @ self.proj.weight + self.proj.bias


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.1, amsgrad=True),
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    "plain": lambda named: torch.optim.SGD(named, lr=0.1),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(6, 3)).pow(2).sum().backward()
    optimizer.step()


def trained(
    make: Make, groups: Callable[[nn.Module], Any] = lambda m: m.named_parameters()
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Apart()
    optimizer = make(groups(model))
    for seed in range(3):
        step(model, optimizer, seed)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "live": (model, optimizer)}


def saved_of(run: dict[str, Any]) -> dict[str, Any]:
    return {"model": run["model"], "optimizer": run["optimizer"]}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    run = trained(OPTIMIZERS[kind])
    made, _ = mapped(saved_of(run), tmp_path, BY)
    model = Fused()
    model.load_state_dict(made["model"])
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    optimizer.load_state_dict(made["optimizer"])
    assert made["optimizer"]["param_groups"][0]["param_names"] == ["qkv.weight", "proj.weight", "proj.bias"]
    old, its = run["live"]
    step(old, its, 9)
    step(model, optimizer, 9)
    fused = torch.cat([old.q.weight, old.k.weight, old.v.weight])
    torch.testing.assert_close(model.qkv.weight, fused, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.proj.weight.t(), old.out.weight, rtol=1e-5, atol=1e-6)


def by_name(run: dict[str, Any]) -> dict[str, Any]:
    names = run["optimizer"]["param_groups"][0]["param_names"]
    state = {names[number]: entry for number, entry in run["optimizer"]["state"].items()}
    group = {**run["optimizer"]["param_groups"][0], "params": names}
    del group["param_names"]
    return {"state": state, "param_groups": [group]}


def flat(run: dict[str, Any]) -> dict[str, Any]:
    nested = by_name(run)
    group = {key: value for key, value in nested["param_groups"][0].items() if key != "params"}
    state = {
        f"state.{name}.{key}": value
        for name, entry in nested["state"].items()
        for key, value in entry.items()
    }
    return state | {
        f"param_groups.{name}.{key}": value for name in nested["state"] for key, value in group.items()
    }


def test_every_form_of_an_optimizer_follows(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["adamw"])
    unnamed = {
        "state": run["optimizer"]["state"],
        "param_groups": [dict(run["optimizer"]["param_groups"][0])],
    }
    del unnamed["param_groups"][0]["param_names"]
    forms = {"names": by_name(run), "flat": flat(run), "numbers": run["optimizer"]}
    made = {
        form: mapped({"model": run["model"], "optimizer": its}, tmp_path, BY)[0]
        for form, its in forms.items()
    }
    old = by_name(run)["state"]
    moment = torch.cat([old[f"{each}.weight"]["exp_avg_sq"] for each in "qkv"])
    assert torch.equal(made["names"]["optimizer"]["state"]["qkv.weight"]["exp_avg_sq"], moment)
    assert torch.equal(made["flat"]["optimizer"]["state.qkv.weight.exp_avg_sq"], moment)
    assert torch.equal(made["numbers"]["optimizer"]["state"][0]["exp_avg_sq"], moment)
    turned = made["flat"]["optimizer"]["state.proj.weight.exp_avg"]
    assert torch.equal(turned, old["out.weight"]["exp_avg"].t())
    assert made["flat"]["optimizer"]["param_groups.qkv.weight.lr"] == 0.1
    assert made["names"]["optimizer"]["state"]["qkv.weight"]["step"] == 3
    back = mapped(made["numbers"], tmp_path, BY.inverse())[0]["optimizer"]
    assert back["param_groups"] == run["optimizer"]["param_groups"]
    assert all(
        torch.equal(back["state"][n][key], value)
        for n, e in run["optimizer"]["state"].items()
        for key, value in e.items()
    )


def test_what_nobody_stepped_stays_without_a_state(tmp_path: Path) -> None:
    model = Apart()
    fresh = torch.optim.AdamW(model.named_parameters()).state_dict()
    made, _ = mapped({"model": model.state_dict(), "optimizer": fresh}, tmp_path, BY)
    assert made["optimizer"]["state"] == {}
    assert made["optimizer"]["param_groups"][0]["params"] == [0, 1, 2]


def test_numbers_stay_where_rules_only_rename(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["adamw"])
    del run["optimizer"]["param_groups"][0]["param_names"]
    names = [f'from = "{old}"\nto = "new.{old}"' for old in run["model"]]
    run["model"]["k.weight"] = run["model"]["k.weight"].clone()  # k and v of one shape: no names are certain
    made, _ = mapped(saved_of(run), tmp_path, rules(*names))
    assert [*made["model"]] == [f"new.{old}" for old in run["model"]]
    assert made["optimizer"]["param_groups"] == run["optimizer"]["param_groups"]


def test_an_average_of_the_weights_is_changed_too(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["plain"])
    average = {name: tensor + 1 for name, tensor in run["model"].items()}
    made, report = mapped({"model": run["model"], "ema": average}, tmp_path, BY)
    assert report.also == ("ema",)
    assert torch.equal(made["ema"]["proj.weight"], average["out.weight"].t())


def test_an_average_that_does_not_fit_is_named_and_left_alone_where_it_is_left_out(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["plain"])
    average = {name: tensor for name, tensor in run["model"].items() if name != "out.bias"}
    tree = {"model": run["model"], "ema": average}
    assert "in.pt, ema: the rule 'out.bias' -> 'proj.bias' finds no tensor" in refusal(tree, tmp_path, BY)
    made, _ = mapped(tree, tmp_path, BY, optimizers=False)
    assert [*made["ema"]] == [*average] and "qkv.weight" in made["model"]


def test_parameters_whose_names_are_numbers_stay_keyed_by_numbers(tmp_path: Path) -> None:
    state = {"0": torch.ones(2, 3), "1": torch.ones(4)}
    moments = {n: {"exp_avg": state[str(n)] * 2} for n in range(2)}
    group = {"params": [0, 1], "param_names": ["0", "1"]}
    by = rules('from = "{n}"\nto = "w.{n}"', top='rest = "keep"')
    tree = {"model": state, "optimizer": {"state": moments, "param_groups": [group]}}
    made = mapped(tree, tmp_path, by)[0]["optimizer"]
    assert (made["param_groups"][0]["params"], [*made["state"]]) == ([0, 1], [0, 1])
    assert made["param_groups"][0]["param_names"] == ["w.0", "w.1"]


# What can't follow.


def change(run: dict[str, Any], how: str) -> dict[str, Any]:
    """Return a checkpoint whose optimizer is no longer like its model, or keeps something else."""
    optimizer = run["optimizer"]
    state, group = optimizer["state"], optimizer["param_groups"][0]
    if how == "another step":
        state[1]["step"] = torch.tensor(2.0)
    elif how == "factored":
        for number in range(3):
            state[number] = {"exp_avg_sq_row": torch.ones(4 - number)}
    elif how == "one never stepped":
        del state[1]
    elif how == "other entries":
        del state[1]["exp_avg"]
    elif how == "unknown names":
        group["param_names"][4] = "module.out.bias"
    elif how == "a part only":
        group["params"].remove(1)
        group["param_names"].remove("k.weight")
        del state[1]
    return saved_of(run)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("another step", "keeps another 'step' of 'q.weight' and 'k.weight'"),
        ("factored", "keeps 'exp_avg_sq_row' of 'q.weight' in another shape"),
        ("one never stepped", "keeps other things of 'k.weight' than of 'q.weight'"),
        ("other entries", "keeps other things of 'k.weight' than of 'q.weight'"),
        ("unknown names", "would keep 'module.out.bias', which the state does not have"),
        ("a part only", "keeps 'q.weight' and not 'k.weight', which the rule"),
    ],
)
def test_what_can_t_follow_is_refused_by_name(how: str, said: str, tmp_path: Path) -> None:
    tree = change(trained(OPTIMIZERS["adamw"]), how)
    tree["opt_g"] = tree.pop("optimizer")
    message = refusal(tree, tmp_path, BY)
    assert said in message and "its optimizer" in message and "--drop opt_g" in message


@pytest.mark.parametrize("verb", ["scale = 2.0", 'cast = "bf16"'])
def test_values_that_change_leave_the_moments_behind_and_are_refused(verb: str, tmp_path: Path) -> None:
    names = [f'from = "{name}"\nto = "{name}"' for name in ("q.weight", "k.weight", "v.weight", "out.weight")]
    by = rules(*names, f'from = "out.bias"\nto = "out.bias"\nsteps = [{{ {verb} }}]')
    run = saved_of(trained(OPTIMIZERS["adamw"]))
    assert f"keeps 'out.bias', whose state can't follow '{verb.split()[0]}'" in refusal(run, tmp_path, by)
    assert mapped(run, tmp_path, by, optimizers=False)[0]["optimizer"]["state"]


def test_two_groups_do_not_become_one(tmp_path: Path) -> None:
    run = trained(
        OPTIMIZERS["sgd"],
        lambda model: [
            {"params": [each for each in model.named_parameters() if each[0] != "k.weight"]},
            {"params": [("k.weight", model.k.weight)], "lr": 1.0},
        ],
    )
    said = refusal(saved_of(run), tmp_path, BY)
    assert "has 'q.weight' and 'k.weight' in two groups" in said


def test_unnamed_parameters_of_one_shape_are_refused_with_the_way_out(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["adamw"])
    del run["optimizer"]["param_groups"][0]["param_names"]
    said = refusal(saved_of(run), tmp_path, BY)
    assert "names no parameters, and more than one assignment" in said and "--model SPEC" in said


def test_what_is_dropped_leaves_the_optimizer_too(tmp_path: Path) -> None:
    by = rules(FUSE, TURN_MOMENTS, 'drop = "out.bias"')
    made, report = mapped(saved_of(trained(OPTIMIZERS["adamw"])), tmp_path, by)
    assert report.dropped == ("out.bias",)
    assert made["optimizer"]["param_groups"][0]["param_names"] == ["qkv.weight", "proj.weight"]
    assert [*made["optimizer"]["state"]] == [0, 1]
