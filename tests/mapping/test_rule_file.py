"""A rule file is read, written and refused; the one on the page of maps does what the page says."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.errors import Damaged, Irreversible, Refused, Unreadable, UsageFault
from ckpttool.mapping import rule_file, state_mapping
from ckpttool.mapping.applying import apply, maps, names
from ckpttool.mapping.rule_file import VERBS, read, rules_in
from ckpttool.mapping.rules import Drop, MapRules, Rule, Tie, ValueCount, literal, templates
from ckpttool.mapping.verbs import Concat, Stack, Unknown, evaluated, first_known
from tests.support.dialects import LLAMA, assert_reversible, random_state, rules
from tests.support.running import ROOT

# ---- A rule file is read, written and refused: every mistake in it is named before a checkpoint is touched


RENAME = 'from = "a"\nto = "b"'

ALL = MapRules(
    (
        Rule(("a.{i}.{p:w|b}",), ("b.{i}.{p}",), optional=True),
        Rule(("e.{i}.{e}.x", "e.{i}.{e}.y"), ("f.{i}",), (Concat(0, ("h", 2)), Stack("e")), optional="moe"),
        Rule((literal('x{"}\\\x7f\t日'),), ("z",)),
        Drop("d.{i}", "to", computed=True),
        Tie("head", "b.0.w", when="tied"),
        Tie("tail", "b.1.w", adds=False, on="from"),
    ),
    rest="keep",
    numbers={"h": ("hidden", "a.b // 2", 7), "n": 3, "odd key": "x"},
    counts={
        "i": ValueCount("layers"),
        "e": ValueCount(4, first=1),
        "k": ValueCount(gaps=True),
        "m": ValueCount(("a", "b")),
    },
    name="all",
    start="one",
    end="another",
    source="here",
)


def test_rules_are_read_as_they_are_written() -> None:
    assert rules_in(ALL.to_toml()) == ALL
    assert rules_in(ALL.inverse().to_toml()) == ALL.inverse()
    assert ALL.inverse().inverse() == ALL
    assert (ALL.inverse().start, ALL.inverse().end) == ("another", "one")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_name_can_be_written_and_matches_itself_alone(name: str) -> None:
    by = MapRules((Rule((literal(name),), (literal(name + "!"),)),))
    assert rules_in(by.to_toml()) == by
    (template,) = by.rules[0].inputs  # type: ignore[union-attr]
    assert template.literal == template.fill({}) == name
    assert template.match(name) == {} and template.match(name + "x") is None


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("l.{i}.w", "l.10.w", {"i": "10"}),
        ("l.{i}.w", "l.01.w", None),
        ("l.{i}.w", "l.-1.w", None),
        ("l.{i}.w", "xl.1.w", None),
        ("l.{i}.w", "l.1.w.x", None),
        ("l.{i}.w", "l.１.w", None),  # another digit of Unicode
        ("l.{i}.{i}", "l.1.1", {"i": "1"}),
        ("l.{i}.{i}", "l.1.2", None),
        ("l{i}x.{p:w|w.b}", "l3x.w.b", {"i": "3", "p": "w.b"}),
        ("{r:*}.w", "a.b.w", {"r": "a.b"}),
        ("{r:*}.w", ".w", None),
        ("{r:*}.w", "a\nb.w", {"r": "a\nb"}),
        ("a.b", "aXb", None),
    ],
)
def test_a_template_matches_whole_names(text: str, name: str, found: dict[str, str] | None) -> None:
    (template,) = templates([text])
    assert (template.match(name) if template.literal is None else None if name != text else {}) == found
    if found:
        assert template.fill(found) == name


@pytest.mark.parametrize(
    ("said", "known", "value"),
    [
        ("heads * size", {"heads": 4, "size": 8}, 32),
        ("(h - 1) * 2 // 3 + -1", {"h": 4}, 1),
        ("text.hidden", {"text": {"hidden": 5}}, 5),
        (7, {}, 7),
    ],
)
def test_a_number_is_an_expression_of_the_config(
    said: str | int, known: dict[str, object], value: int
) -> None:
    assert evaluated(said, known) == value


@pytest.mark.parametrize(
    "said",
    [
        "2 ** 9",
        "f(1)",
        "1.5",
        "[1]",
        "a if b else c",
        "'a'",
        "1 +",
        "~1",
        "",
        "a" * 201,
        "True",
        "a[0]",
        "__import__",
    ],
)
def test_nothing_else_is_one(said: str) -> None:
    with pytest.raises((UsageFault, Unknown)):
        evaluated(said, {})


def test_a_number_that_the_config_lacks_is_looked_for_under_other_names() -> None:
    assert first_known(("kv", "heads"), {"kv": None, "heads": 4}) == 4
    assert first_known(("kv", "heads"), {"heads": True}) is None
    with pytest.raises(UsageFault, match="7 does not divide by 2"):
        first_known(("h // 2",), {"h": 7})
    with pytest.raises(UsageFault, match="does not divide by 0"):
        evaluated("1 // h", {"h": 0})
    with pytest.raises(UsageFault, match="larger than any tensor"):
        evaluated("*".join(["h"] * 9), {"h": 2**40})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no rules"),
        ("rule = 3", "it has no rules"),
        ("[[rule]", "it is not TOML"),
        ("a = " + "[" * 3000, "it is not TOML"),
        (f"extra = 1\n[[rule]]\n{RENAME}", "a rule file has no 'extra'"),
        (f"rest = 'some'\n[[rule]]\n{RENAME}", "rest = 'some'"),
        (f"from = 3\n[[rule]]\n{RENAME}", "from = 3 is no text"),
        (f"numbers = 3\n[[rule]]\n{RENAME}", "numbers = 3 is no table"),
        (f"[numbers]\nh = 1.5\n[[rule]]\n{RENAME}", "h = 1.5 is no number"),
        (f"[numbers]\nh = 'f()'\n[[rule]]\n{RENAME}", "'f()' is no number"),
        (f"[counts]\ni = {{ last = 3 }}\n[[rule]]\n{RENAME}", "the count 'i' has no 'last'"),
        (f"[counts]\ni = {{ first = 'a' }}\n[[rule]]\n{RENAME}", "first = 'a' is no number"),
        ("[[rule]]\nrename = 'a'", "has no verb"),
        ("[[rule]]\nfrom = 'a'", "a rule needs names on both sides"),
        ("[[rule]]\nfrom = 'a'\nto = 3", "to = 3 is no text"),
        ("[[rule]]\nfrom = 'a'\nto = ['b', 3]", "to = 3 is no text"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nsteps = 3", "steps = 3"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\noptional = 3", "optional = 3"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\ncomputed = true", "a rule with 'from' has no 'computed'"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\ndrop = 'c'", "a rule with 'from' has no 'drop'"),
        ("[[rule]]\ndrop = 'a'\non = 'side'", "on = 'side'"),
        ("[[rule]]\ndrop = 'a'\ncomputed = 1", "computed = 1"),
        ("[[rule]]\ntie = 'a'", "does not say of which tensor"),
        ("[[rule]]\ndrop = 'a.{'", "its brace at 2 belongs to no placeholder"),
        ("[[rule]]\nfrom = 'a.{0}'\nto = 'b'", "belongs to no placeholder"),
        ("[[rule]]\nfrom = '{a:*}.{b:*}'\nto = '{a}.{b}'", "two placeholders for any text"),
        ("[[rule]]\nfrom = 'a.{p:x|y}'\nto = 'b.{p:x}'", "described in two ways"),
        ("[[rule]]\nfrom = ['a.{i}', 'b']\nto = 'c.{i}'\nsteps = [{ concat = 0 }]", "different placeholders"),
        ("[[rule]]\nfrom = 'a.{i}'\nto = 'b'", "only one side has the placeholder 'i'"),
        ("[[rule]]\nfrom = 'a'\nto = 'b.{i}'", "only one side has the placeholder 'i'"),
        ("[[rule]]\nfrom = 'a.{i}'\nto = 'b.{i}'\nsteps = [{ stack = 'i' }]", "which only sources may have"),
        (
            "[[rule]]\nfrom = 'a.{i}'\nto = 'b.{i}'\nsteps = [{ unstack = 'i' }]",
            "which only targets may have",
        ),
        ("[[rule]]\nfrom = 'a.{p:x|y}'\nto = 'b'\nsteps = [{ stack = 'p' }]", "only numbers are stacked"),
        ("[[rule]]\nfrom = ['a', 'b']\nto = 'c'", "it makes 2 tensors and names 1"),
        ("[[rule]]\nfrom = 'a'\nto = ['b', 'c']", "it makes 1 tensors and names 2"),
        ("[[rule]]\nfrom = ['a', 'b']\nto = ['c', 'd']\nsteps = [{ split = 0 }]", "it splits 2 tensors"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nsteps = [{ concat = 0, split = 1 }]", "has 2 verbs"),
    ],
)
def test_a_mistake_in_a_rule_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageFault) as fault:
        read(str(tmp_path / "rules.toml"))
    assert said in str(fault.value) and "rules.toml" in str(fault.value)


def test_a_mistake_in_a_rule_is_found_by_its_line_and_its_likely_word(tmp_path: Path) -> None:
    good, step = f"[[rule]]\n{RENAME}\n\n", "{ permute-head = 4, to = 'pairs' }"
    (tmp_path / "rules.toml").write_text(f"# mine\n{good}[[ rule ]]\nfrom='c'\nto='d'\nsteps = [{step}]")
    with pytest.raises(UsageFault) as fault:
        read(str(tmp_path / "rules.toml"))
    said = 'rules.toml: line 6: the step { permute-head = 4, to = "pairs" } has 0 verbs'
    assert said in str(fault.value) and "did you mean permute-heads?" in str(fault.value)
    for text, said in (
        ("rule = [{ from = 'a', to = 'b' }, {}]", "rule 2: the rule {} has no verb"),
        ("[[rule]]\nx = 2020-01-01", 'line 1: the rule { x = "2020-01-01" } has no verb'),
    ):
        with pytest.raises(UsageFault) as fault:
            rules_in(text)
        assert said in fault.value.message


def test_a_file_that_is_no_rule_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable):
        read(str(tmp_path / "none.toml"))
    (tmp_path / "rules.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(Damaged, match="no text in UTF-8"):
        read(str(tmp_path / "rules.toml"))
    with (tmp_path / "rules.toml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Damaged, match="is longer than 16 MiB"):
        read(str(tmp_path / "rules.toml"))


@pytest.mark.parametrize(
    ("table", "top", "said"),
    [
        ('drop = "x"', 'rest = "refuse"', "drop = 'x': what is dropped is not there on the way back"),
        (RENAME, 'rest = "drop"', "rest = 'drop' can't be undone"),
        (f"{RENAME}\nsteps = [{{ scale = 2 }}]", 'rest = "refuse"', "'scale' can't be undone"),
        (f"{RENAME}\nsteps = [{{ cast = 'bf16' }}]", 'rest = "refuse"', "'cast' can't be undone"),
        (f"{RENAME}\nsteps = [{{ reshape = [4] }}]", 'rest = "refuse"', "without the shape before"),
    ],
)
def test_rules_without_a_way_back_say_which(table: str, top: str, said: str) -> None:
    by = rules(table, top=top)
    assert not by.reversible
    with pytest.raises(Irreversible) as fault:
        by.inverse()
    assert said in str(fault.value)


TEXTS = [each.to_toml() for each in maps()]
JUNK = [
    "{",
    "}",
    "{i}",
    "{e:*}",
    "[[rule]]",
    "steps = [",
    "]",
    "'",
    "1",
    "-1",
    "10 ** 9",
    "true",
    "\n",
    "=",
    "{ concat = 9 }",
]


@given(st.sampled_from(TEXTS), st.data())
def test_a_changed_rule_file_is_read_or_refused_in_one_line(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, min(begin + 12, len(text))))
        text = text[:begin] + data.draw(st.sampled_from(JUNK)) + text[end:]
    try:
        read_again = rules_in(text)
    except UsageFault as fault:
        assert len(str(fault)) < 2000
    else:
        assert rules_in(read_again.to_toml()) == read_again


def test_placeholders_side_by_side_are_refused() -> None:
    with pytest.raises(UsageFault, match="nothing between them"):
        templates(["{a}{b}"])


@pytest.mark.parametrize(
    "text",
    [
        "[numbers]\nx" + ".a" * 60_000 + " = 1",
        "x = " + "[" * 50_000,
        "x = " + "9" * 5000,
        "rest = 0x" + "F" * 5000,
    ],
)
def test_what_would_cost_much_is_refused_at_once(text: str) -> None:
    with pytest.raises(UsageFault):
        rules_in(text)


def listed(count: int, text: str, between: str = ", ") -> str:
    return between.join(text.replace("N", str(number)) for number in range(count))


MANY, WORDS = listed(20_000, "'{i}.aN'"), listed(400_000, "wN", "|")
ABC, DIGITS = listed(20, "{pN:a|b}", "."), listed(9, "{pN}", "1")
KEY, ALTERNATIVES = listed(37_500, '"a"', "."), listed(16, "{pN:a|aa}", "a")
ONE = f"[[rule]]\n{RENAME}\n"
TOO_MUCH = {
    "letters": ("a" * 5_000_000, "a number of more than 40 digits"),
    "other letters": ("z" * 5_000_000, "is not TOML"),
    "escapes": ('x = "' + '\\"' * 2_000_000, "is not TOML"),
    "open escapes": ('\\"' * 2_000_000, "is not TOML"),
    "quotes": ('"' * 4_000_000, "is not TOML"),
    "a quoted key": (f"{KEY} = 1", "a key of more than 8 parts"),
    "a spaced key": (listed(37_500, "'a'", " . ") + " = 1", "a key of more than 8 parts"),
    "a table's key": (f"[{listed(50_000, 'a', '.')}]", "a key of more than 8 parts"),
    "brackets": ("x = " + "[1, " * 50_000, "more than 8 brackets inside one another"),
    "tables": ("x = " + "{a = " * 50_000, "more than 8 brackets inside one another"),
    "commas": (f"x = [{'1,' * 2_000_001}]", "more than 2,000,000 lists, tables, keys and commas"),
    "rules": (listed(100_001, ONE, ""), "has 100,001 rules, and may have 100,000"),
    "names": (f"[[rule]]\nfrom = [{MANY}]\nto = 'b'", "20,000, and may list 1,000"),
    "targets": (f"[[rule]]\nfrom = 'b'\nto = [{MANY}]", "20,000, and may list 1,000"),
    "words": (f"[[rule]]\ndrop = '{{p:{WORDS}}}'", "400,000 words, and may stand for 1,000"),
    "placeholders": (f"[[rule]]\ndrop = '{ABC}'", "20 placeholders, and may have 16"),
    "alternatives": (f"[[rule]]\ndrop = '{ALTERNATIVES}'", "end only the rest of a name tells"),
    "digits": (f"[[rule]]\ndrop = '{DIGITS}'", "end only the rest of a name tells"),
    "steps": (f"{ONE}steps = [{listed(500, '{ scale = 2 }')}]", "has 500 steps, and may have 64"),
    "sizes": (f"{ONE}steps = [{{ reshape = [{listed(2000, '1')}] }}]", "lists 2,000, and may list 1,000"),
    "numbers": (
        f"[numbers]\n{listed(2000, 'nN = 1', chr(10))}\n{ONE}",
        "has 2,000 entries, and may have 1,000",
    ),
    "several": (f"[numbers]\nn = [{listed(2000, '1')}]\n{ONE}", "n lists 2,000, and may list 1,000"),
    "braces": ("[[rule]]\ndrop = '" + "{" * 1_000_001 + "'", "belongs to no placeholder"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_a_rule_file_has_limits_which_are_named(what: str, tmp_path: Path) -> None:
    text, said = TOO_MUCH[what]
    (tmp_path / "rules.toml").write_text(text)
    began = time.process_time()
    with pytest.raises(UsageFault) as fault:
        read(str(tmp_path / "rules.toml"))
    assert said in str(fault.value) and len(str(fault.value)) < 2000
    assert time.process_time() - began < 20


def test_rules_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rule_file, state_mapping):
        monkeypatch.setattr(module, "PATIENCE", -1.0)
    with pytest.raises(UsageFault, match="0 of its 1 rules took"):
        rules_in(ONE)
    monkeypatch.setattr(rule_file, "PATIENCE", 60.0)
    with pytest.raises(Refused, match="rules took -1 s to find their names"):
        state_mapping.matched(rules_in(ONE), ["a"], "a.pt")


def test_many_words_are_no_more_than_the_names(tmp_path: Path) -> None:
    torch.save({".".join("a" * 16): torch.ones(2)}, tmp_path / "a.pt")
    names, fields = listed(16, "{pN:a|b|c|d|e|f|g|h}", "."), listed(16, "{pN}", ".")
    text = f"[[rule]]\nfrom = '{names}'\nto = 'y.{fields}'"
    with (
        ckpttool.open(tmp_path / "a.pt") as checkpoint,
        pytest.raises(Refused, match="finds no tensor for p0 = a"),
    ):
        apply(checkpoint, rules_in(text))


def test_as_many_steps_as_there_may_be_are_taken(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 3)}, tmp_path / "a.pt")
    steps = "{ scale = 2 }, { transpose = [1, 0] }, { reshape = [2, 3] }, { scale = 0.5 }, " * 16
    rules = rules_in(f"[[rule]]\nfrom = 'a'\nto = 'b'\nsteps = [{steps}]")
    with ckpttool.open(tmp_path / "a.pt") as checkpoint:
        made, _ = apply(checkpoint, rules)
        assert made.state().tensors["b"].numpy().tolist() == [[1.0] * 3] * 2


# ---- The rule file on the page of maps does what the page says of it ----------------------------------


PAGE = (ROOT / "docs" / "maps.md").read_text(encoding="utf-8")


def the_example() -> MapRules:
    return rules_in(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])


def test_the_example_makes_a_llama_and_goes_back(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (11, 8), "mlp_norms": (2, 8), "norm.weight": (8,)}
    for i in range(2):
        shapes |= {f"blocks.{i}.qkv.weight": (32, 8), f"blocks.{i}.out.weight": (8, 16)}
        shapes |= {
            f"blocks.{i}.mlp.gate": (8, 12),
            f"blocks.{i}.mlp.up": (8, 12),
            f"blocks.{i}.mlp.down": (12, 8),
        }
        shapes[f"blocks.{i}.norm.weight"] = (8,)
    ours = random_state(shapes)
    there = assert_reversible(ours, tmp_path, the_example(), config=LLAMA)
    qkv = ours["blocks.1.qkv.weight"]
    assert torch.equal(there["model.layers.1.self_attn.v_proj.weight"], qkv[24:])
    k = [16 + 4 * head + row for head in (0, 1) for row in (0, 2, 1, 3)]
    assert torch.equal(there["model.layers.1.self_attn.k_proj.weight"], qkv[k])
    assert torch.equal(there["model.layers.1.mlp.up_proj.weight"], ours["blocks.1.mlp.up"].t())
    assert torch.equal(there["model.layers.1.post_attention_layernorm.weight"], ours["mlp_norms"][1])
    assert there["lm_head.weight"].data_ptr() == there["model.embed_tokens.weight"].data_ptr()
    assert len(there) == 21


def test_the_page_names_every_map_and_every_step() -> None:
    assert {name for name in names() if f"`--map {name}`" not in PAGE} == set()
    assert {verb for verb in VERBS if f"| `{{ {verb} = " not in PAGE} == set()
    example = the_example()
    assert {type(rule) for rule in example.rules} > {Rule, Tie} and example.reversible
