"""`explain` of error texts: as torch and safetensors raise them, as people paste them, and unknown ones."""

from __future__ import annotations

import io
import json
import pickle
import re
import shlex
import socket
import sys
import time
import traceback
import tracemalloc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import TextWrapper
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from ckpttool.core.cli import group
from ckpttool.explaining import messages
from ckpttool.explaining.messages import explain, rules
from tests.support.generated_page import generated, regenerate
from tests.support.raised_errors import RAISED as OF_PAGES
from tests.support.raised_errors import net
from tests.support.running import ROOT, Cli, assert_says

# ---- Raised here, by the libraries as they are installed ------------------------------------------------


def optimizer_of_fewer() -> None:
    state = torch.optim.Adam(net().parameters()).state_dict()
    state["param_groups"][0]["params"] = [0, 1]
    torch.optim.Adam(net().parameters()).load_state_dict(state)


def optimizer_of_more_groups() -> None:
    state = torch.optim.Adam(net().parameters()).state_dict()
    state["param_groups"] *= 2
    torch.optim.Adam(net().parameters()).load_state_dict(state)


def written(content: bytes, name: str = "last.pt") -> str:
    Path(name).write_bytes(content)
    return name


def of_another_header(change: Callable[[bytes], bytes]) -> Callable[[], object]:
    def raises() -> None:
        save_file({"w": torch.ones(100)}, "w.safetensors")
        load_file(written(change(Path("w.safetensors").read_bytes()), "model.safetensors"))

    return raises


def of_a_module_that_is_gone() -> None:
    sys.modules["gone"] = gone = types.ModuleType("gone")
    exec("class Net: pass", gone.__dict__)
    torch.save({"net": gone.Net()}, "last.pt")
    del sys.modules["gone"]
    torch.load("last.pt", weights_only=False)


def of_a_class_that_is_gone() -> None:
    sys.modules["mine"] = mine = types.ModuleType("mine")
    exec("class Net: pass", mine.__dict__)
    torch.save({"net": mine.Net()}, "last.pt")
    del mine.Net
    torch.load("last.pt", weights_only=False)


def into(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(state)


def with_prefix(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: tensor for key, tensor in net().state_dict().items()}


def wrapped(name: str) -> nn.Module:
    whole = nn.Module()
    whole.add_module(name, net())
    return whole


def bound_twice() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        dist.TCPStore("127.0.0.1", listener.getsockname()[1], 1, is_master=True)


def lacking_in_dcp() -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id="dcp", no_dist=True)
    dcp.load({"model.b": torch.ones(2)}, checkpoint_id="dcp", no_dist=True)


def of_jit() -> None:
    torch.jit.script(net()).save("last.pt")  # type: ignore[no-untyped-call]
    torch.load("last.pt")


def saved(state: object, **how: Any) -> str:
    torch.save(state, "last.pt", **how)
    return "last.pt"


RAISED: dict[str, tuple[str, Callable[[], object]]] = {
    "a pointer, weights alone": ("invalid-load-key", lambda: torch.load(written(b"version https://git-lfs"))),
    "a page, weights alone": ("invalid-load-key", lambda: torch.load(written(b"<html>"))),
    "jit.load of a state": ("jit-constants", lambda: torch.jit.load(saved({}))),  # type: ignore[no-untyped-call]
    "load of TorchScript": ("torchscript", of_jit),
    "empty": ("ran-out-of-input", lambda: torch.load(written(b""), weights_only=False)),
    "empty, weights alone": ("ran-out-of-input", lambda: torch.load(written(b""))),
    "a plain pickle": (
        "invalid-magic-number",
        lambda: torch.load(written(pickle.dumps({"a": 1})), weights_only=False),
    ),
    "HTML as safetensors": ("safetensors-header-too-large", of_another_header(lambda _: b"<html><body>")),
    "no JSON": (
        "safetensors-invalid-header",
        of_another_header(lambda _: b"\x10" + bytes(7) + b"not json at all!"),
    ),
    "cut at the end": ("safetensors-cut-short", of_another_header(lambda whole: whole[:-9])),
    "cut in the header": ("safetensors-cut-short", of_another_header(lambda whole: whole[:30])),
    "cut before the header": ("safetensors-cut-short", of_another_header(lambda whole: whole[:5])),
    "too long": ("safetensors-cut-short", of_another_header(lambda whole: whole + b"abc")),
    "a module": ("module-in-pickle", of_a_module_that_is_gone),
    "a class": ("attribute-in-pickle", of_a_class_that_is_gone),
    "NumPy's scalar": ("weights-only", lambda: torch.load(saved({"x": np.float64(3)}))),
    "placeholders": (
        "zero-placeholder",
        lambda: into(net(), dict.fromkeys(net().state_dict(), torch.ones(0))),
    ),
    "flat parameters": (
        "flat-param",
        lambda: into(net(), {**net().state_dict(), "_flat_param": torch.ones(2)}),
    ),
    "an adapter": ("adapter-keys", lambda: into(net(), {"0.base_layer.weight": torch.ones(2)})),
    "a model in DDP": ("missing-key-module", lambda: into(wrapped("module"), net().state_dict())),
    "a compiled model": ("missing-key-orig-mod", lambda: into(wrapped("_orig_mod"), net().state_dict())),
    "other names": ("keys", lambda: into(net(), with_prefix("encoder."))),
    "DCP": ("dcp-missing-key", lacking_in_dcp),
    "fewer parameters": ("optimizer-group-size", optimizer_of_fewer),
    "more groups": ("optimizer-groups", optimizer_of_more_groups),
    "half": ("dtypes-differ", lambda: nn.Linear(2, 2)(torch.ones(2, 2).half())),
    "half of a convolution": ("dtypes-differ", lambda: nn.Conv1d(2, 2, 1)(torch.ones(1, 2, 2).half())),
    "half of a product": ("dtypes-differ", lambda: torch.ones(2, 2).half() @ torch.ones(2, 2)),
    "meta": ("meta-tensor", lambda: nn.Linear(2, 2, device="meta").to("cpu")),
    "no group": ("no-process-group", lambda: dist.all_reduce(torch.ones(1))),
    "a port": ("address-in-use", bound_twice),
    **{f"page {kind}": (kind, raises) for kind, (raises, _, _) in OF_PAGES.items()},
}


def raised(raises: Callable[[], object]) -> tuple[str, str]:
    """Return the traceback of what is raised, and its end alone."""
    with pytest.raises(BaseException) as caught:
        raises()
    return "".join(traceback.format_exception(caught.value)), f"{caught.typename}: {caught.value}"


def kinds_of(text: str | bytes) -> list[str]:
    return [each.kind for each in explain([text.encode() if isinstance(text, str) else text])]


@pytest.mark.usefixtures("here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", RAISED)
def test_an_error_that_is_raised_here_is_known_by_its_traceback_and_by_its_last_part(case: str) -> None:
    kind, raises = RAISED[case]
    whole, end = raised(raises)
    assert kinds_of(whole)[0] == kind, whole
    if case not in ("empty, weights alone", "a module"):  # which only their stacks tell from others
        assert kinds_of(end)[0] == kind, end


# ---- As people paste them -------------------------------------------------------------------------------

TEXTS = json.loads((Path(__file__).parent / "texts.json").read_text(encoding="utf-8"))
PASTED: dict[str, str] = TEXTS["known"]
UNKNOWN: list[str] = TEXTS["unknown"]


def hard(width: int) -> Callable[[str], str]:
    """Return what a terminal makes of lines: cut anywhere."""
    return lambda text: "\n".join(
        line[at : at + width] for line in text.split("\n") for at in range(0, max(len(line), 1), width)
    )


def each_line(before: str, after: str = "") -> Callable[[str], str]:
    return lambda text: "\n".join(before + line + after for line in text.split("\n"))


DISGUISES: dict[str, Callable[[str], str]] = {
    "plain": str,
    "coloured": lambda text: re.sub(r"(\w+)", "\x1b[1;31m\\1\x1b[0m", text),
    "of a rank": each_line("[rank1]: "),
    "of a logger": each_line("2026-11-29 10:12:13,456 - root - ERROR - "),
    "of glog": each_line("[rank1]:[E1129 10:12:13.123456789 main.cpp:607] "),
    "of pytest": each_line("E   "),
    "quoted": each_line("> > "),
    "in a frame": each_line("│ ", " │"),
    "wrapped at words": lambda text: "\n".join(TextWrapper(60, drop_whitespace=False).wrap(text)),
    "wrapped at 33": hard(33),
    "wrapped, of a rank": lambda text: each_line("[rank12]: ")(hard(40)(text)),
    "of Windows": lambda text: text.replace("\n", "\r\n"),
    "in JSON": lambda text: json.dumps({"level": "error", "message": text}),
    "as a repr": repr,
    "typographic": lambda text: text.replace("'", "\u2019"),
    "in a log": lambda text: "step 1\n" * 100_000 + text + "\nstep 2" * 100_000,
}


@pytest.mark.parametrize("how", DISGUISES)
def test_a_text_is_known_as_people_paste_it(how: str) -> None:
    texts = (
        PASTED if how != "in a log" else {kind: PASTED[kind] for kind in ("size-mismatch", "child-failed")}
    )
    wrong = {
        kind: found for kind, text in texts.items() if (found := kinds_of(DISGUISES[how](text)))[:1] != [kind]
    }
    assert wrong == {}


def test_thirty_texts_and_all_rules_are_tried() -> None:
    assert len(PASTED) >= 30
    assert {rule.kind for rule in rules()} <= {*PASTED, *(kind for kind, _ in RAISED.values())}


@pytest.mark.parametrize("text", UNKNOWN)
def test_another_text_is_not_known(text: str, cli: Cli, piped: Callable[[str], None]) -> None:
    piped(text)
    ran = cli("explain")
    assert (ran.code, ran.err) == (1, "") and ran.out.startswith("not known: ")
    piped(text)
    ran = cli("explain", "--json")
    assert (ran.code, ran.json["kind"], ran.json["commands"]) == (1, "unknown", [])


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what puts a text into stdin."""

    def put(text: str) -> None:
        stdin = SimpleNamespace(buffer=io.BytesIO(text.encode()), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stdin)

    return put


def test_the_cause_comes_first_and_what_follows_from_it_after(cli: Cli, here: Path) -> None:
    log = [PASTED[kind] for kind in ("child-failed", "nccl-watchdog", "cuda-out-of-memory")]
    (here / "error.log").write_text("\n".join(each_line(f"[rank{n}]: ")(text) for n, text in enumerate(log)))
    ran = cli("explain", "error.log")
    assert ran.out.startswith("cuda-out-of-memory: The GPU is full.")
    assert "also: nccl-watchdog, child-failed" in ran.out
    assert [each["kind"] for each in cli("explain", "error.log", "--json").json["also"]] == [
        "nccl-watchdog",
        "child-failed",
    ]
    assert "\nnccl-watchdog: " in cli("explain", "error.log", "-v").out
    (here / "other.log").write_text(PASTED["numpy-core"])
    assert cli("explain", "error.log", "other.log", "--json").json["kind"] == "numpy-core"


# ---- What it says ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ('torch.load("runs/a/last.pt")', "ckpttool strip-prefix runs/a/last.pt last.mended.pt"),
        ("torch.load('my runs/a.pth')", "ckpttool strip-prefix 'my runs/a.pth' a.mended.pt"),
        ("Resuming from C:\\runs\\new.ckpt ...", "ckpttool strip-prefix 'C:\\runs\\new.ckpt' new.mended.pt"),
        (
            "load_file('model.safetensors')",
            "ckpttool strip-prefix model.safetensors model.mended.safetensors",
        ),
        ("torch.load('-rf.pt')", "ckpttool strip-prefix ./-rf.pt ./-rf.mended.pt"),
        ("torch.load('a$(touch x).pt'); torch.load(\"a';rm -rf b;.pt\")", "ckpttool strip-prefix FILE NEW"),
        ('torch.load("$(touch x).pt")', "ckpttool strip-prefix '$(touch x).pt' '$(touch x).mended.pt'"),
        ("torch.load('a\x07b.pt')", "ckpttool strip-prefix FILE NEW"),
        ("torch.load(f'{folder}/last.pt')", "ckpttool strip-prefix FILE NEW"),
        ("torch.load(path)", "ckpttool strip-prefix FILE NEW"),
        ("torch.load('a.pt')\ntorch.load('b.pt')", "ckpttool strip-prefix FILE NEW"),
    ],
)
def test_the_file_that_a_text_names_is_in_the_commands(line: str, command: str) -> None:
    (found,) = explain([f"{line}\n{PASTED['unexpected-key-module']}".encode()])[:1]
    assert found.commands == (command,)
    assert shlex.split(command)[:2] == ["ckpttool", "strip-prefix"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("size-mismatch", "fc.weight is [1000,512] in the file and [10,512] in the model."),
        ("module-in-pickle", "The module: models.yolo."),
        ("attribute-in-pickle", "It wants Net of the module __main__."),
        ("nccl-watchdog", "The collective: ALLREDUCE, number 1580."),
        ("dtypes-differ", "The two: float and c10::Half."),
        ("no-file-named", "It looked for: pytorch_model.bin,model.safetensors,tf_model.h5,model.ckpt.index."),
    ],
)
def test_the_names_in_a_text_are_in_the_answer(kind: str, said: str) -> None:
    for how in ("plain", "wrapped at 33", "of a rank"):
        assert explain([DISGUISES[how](PASTED[kind]).encode()])[0].message.endswith(said)


def test_a_folder_is_in_the_command_and_control_characters_are_escaped(cli: Cli, here: Path) -> None:
    assert explain([PASTED["no-file-named"].encode()])[0].commands == ("ckpttool inspect /models/t5-v1",)
    (of_option,) = explain([PASTED["no-file-named"].replace("/models/t5-v1", "--out=x").encode()])
    assert of_option.commands == ("ckpttool inspect ./--out=x",)
    (here / "error.log").write_text(PASTED["size-mismatch"].replace("fc.weight", "fc\x07.w\x1b[31meight"))
    assert "fc\\x07.weight is [1000,512]" in cli("explain", "error.log").out


def words_of(command: str) -> Iterator[str]:
    for word in shlex.split(command):
        yield {"FILE": "last.pt", "FOLDER": "last.pt", "SPEC": "net.py:net", "NEW": "new.pt"}.get(word, word)


@pytest.mark.usefixtures("here")
def test_every_command_is_there_and_takes_what_is_given(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "torch.optim.SGD(model.parameters(), 0.1) if model else torch.nn.BatchNorm1d(2)"
    Path("net.py").write_text(f"import torch\n\ndef net(model=None):\n    return {made}\n")
    torch.save({f"module.{key}": tensor for key, tensor in nn.BatchNorm1d(2).state_dict().items()}, "last.pt")
    for command in dict.fromkeys(command for rule in rules() for command in rule.commands):
        program, name, *words = words_of(command)
        assert program == "ckpttool" and name in group.commands
        if "rank" in command:  # files of several ranks
            assert cli(name, "--help").code == 0
        else:
            more = ["--force"] if any(word.startswith(("new.", "NEW.")) for word in words) else []
            ran = cli(name, *words, *more)
            assert ran.code in (0, 1, 3) or "holds no piece of a tensor that one rank" in ran.err, command


# ---- Hostile and large ----------------------------------------------------------------------------------


def test_a_text_of_any_size_takes_little_memory_and_is_read_to_its_end() -> None:
    block = b"epoch 1 step 2 loss 0.3 File 'x.py' line 12\n" * 1000
    most = 0

    def blocks() -> Iterator[bytes]:
        for _ in range(20):
            yield block
        yield PASTED["size-mismatch"].encode()

    tracemalloc.start()
    found = explain(blocks())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found[0].kind == "size-mismatch" and most < 10 * len(block) + (1 << 20)


@pytest.mark.parametrize("cut", [1, 7, 100, 150])
def test_a_message_in_two_blocks_is_found(cut: int) -> None:
    text = PASTED["size-mismatch"].encode()
    assert explain([b"x" * 70_000, text[:cut], text[cut:]])[0].kind == "size-mismatch"


def test_utf_16_as_of_a_shell_of_windows_is_read() -> None:
    assert kinds_of(PASTED["size-mismatch"].encode("utf-16")) == ["size-mismatch"]


HOSTILE = {
    **{
        f"{word!r} again and again": word
        for word in ("[", "[a", "> ", "E   ", "\x1b[", "\x1b]", '"', "'a", "\\")
    },
    "messages without their ends": "size mismatch for " + "a" * 300,
    "names without ends": 'Missing key(s) in state_dict: "' + "a" * 400,
    "no modules": "No module named ",
    "paths": "a/b.pt " * 3 + "/",
    "one path": "a",
    "times": "2026-11-29 ",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_time_grows_with_the_length_of_the_text(name: str) -> None:
    def seconds(size: int) -> float:
        text = (HOSTILE[name] * (size // len(HOSTILE[name]) + 1)).encode() + b"\nEADDRINUSE"
        started = time.perf_counter()
        explain([text])
        return time.perf_counter() - started

    few = min(seconds(30_000) for _ in range(3))
    assert seconds(300_000) < 40 * few + 0.5


@given(st.text(max_size=300), st.sampled_from(sorted(PASTED)), st.text(max_size=300))
def test_any_text_around_a_message_leaves_it_known(before: str, kind: str, after: str) -> None:
    text = f"{before}\n{PASTED[kind]}\n{after}".encode("utf-8", "surrogatepass")
    assert kind in kinds_of(text)
    for each in explain([text]):
        assert all(shlex.split(command)[0] == "ckpttool" for command in each.commands)


def test_a_checkpoint_in_the_place_of_a_text_is_named(cli: Cli, here: Path) -> None:
    torch.save({}, here / "last.pt")
    ran = cli("explain", "last.pt")
    assert ran.code == 2 and "last.pt: is a checkpoint, and not the text of an error" in ran.err


def test_a_message_in_the_place_of_a_file_is_sent_to_stdin(cli: Cli) -> None:
    assert_says(cli("explain", "size mismatch for w"), 2, "no such file", "echo 'TEXT' | ckpttool explain")
    assert cli("explain", "nowhere.log").code == 3


# ---- docs/errors.md: what the rules say; `make docs` writes it -------------------------------------------

PAGE = ROOT / "docs" / "errors.md"
BEGIN, END = "<!-- rules -->\n", "<!-- /rules -->"


def table() -> str:
    """Return the rules as a page: each message, with what it means, and where there is more."""
    lines = [""]
    seen = set[str]()
    for rule in rules():
        says = rule.says[0].replace("|", "\\|")
        more = f" [More]({rule.page})." if rule.page != "errors.md" else ""
        commands = f" `{'`, `'.join(rule.commands)}`." if rule.commands else ""
        counted = f" ({rule.threads} threads)" if rule.threads else ""
        if rule.kind not in seen:
            lines += [f"- `{says}`{counted}: {rule.means}{commands}{more}"]
        seen.add(rule.kind)
    return "\n".join([*lines, "", ""])


def write() -> None:
    regenerate(PAGE, BEGIN, END, table())


@pytest.mark.lint
def test_the_page_says_what_the_rules_say() -> None:
    assert generated(PAGE, BEGIN, END) == table(), "docs/errors.md is stale: run `make docs` and commit it"


def test_every_rule_leads_to_a_page_and_every_page_has_a_rule() -> None:
    pages = {f"errors/{page.name}" for page in (ROOT / "docs" / "errors").glob("*.md")}
    assert pages <= {rule.page for rule in rules()}
    assert all((ROOT / "docs" / rule.page).exists() for rule in rules())


def test_what_a_page_shows_is_known_by_its_rule() -> None:
    for page in (ROOT / "docs" / "errors").glob("*.md"):
        shown = re.findall(r"(?:^    .*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)[0]
        assert kinds_of(shown)[:1] == [page.stem], shown


def test_the_rules_are_read_once_and_only_when_they_are_needed() -> None:
    assert messages.rules() is messages.rules()


if __name__ == "__main__":
    write()
