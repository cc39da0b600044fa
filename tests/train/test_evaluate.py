"""train/evaluate.py: scores of any checkpoint, in one process or many."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.ranks import trainings
from tests.ranks.programs import BROKEN_DATA, start
from tests.support.running import ROOT
from train import evaluate
from train import main as train
from train.data import data_set
from train.evaluate import main, parse
from train.model import builtin as models

TEST_SET = ROOT.parent / "shared" / "data" / "cifar10-mini" / "test"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The same weights in every form that an evaluation reads."""
    folder = tmp_path_factory.mktemp("saved")
    state = trainings.seeded(lambda: models.resnet20(num_classes=10)).state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save({"model": wrapped, "epoch": 3}, folder / "ddp.pt")
    torch.save(state, folder / "plain.pt")
    torch.save({"state_dict": wrapped}, folder / "legacy.th", _use_new_zipfile_serialization=False)
    save_file(state, folder / "plain.safetensors")
    return folder


def score_on_ranks(rank: int, world_size: int, arguments: list[str]) -> Any:
    """Return the result of an evaluation in which only rank 0 has the path of the checkpoint."""
    if rank:
        arguments = ["/nowhere/model.pt", *arguments[1:]]
    job = evaluate.prepare(parse(arguments))
    return evaluate.as_json(job, evaluate.evaluate(job))


def without_ranks(score: dict[str, Any]) -> str:
    """Return a score to the last digit, without the number of ranks."""
    left_out = ("checkpoint", "state", "ranks", "schema")
    return json.dumps({name: score[name] for name in sorted(score) if name not in left_out})


@pytest.mark.covered(lambda size: size == 1)
@pytest.mark.parametrize("size", [1, 3])
def test_the_published_resnet20_gets_776_of_846_right_and_rank_0_alone_reads_it(run_ranks, resnet20, size):
    if not TEST_SET.exists():
        pytest.skip("needs data/cifar10-mini in the folder `shared` beside the repository")
    arguments = [str(resnet20), "--model", "resnet20", "--data", f"folder:{TEST_SET}"]
    answers = run_ranks(size, score_on_ranks, arguments, timeout=200)
    for answer in answers:
        assert (answer["correct"], answer["samples"], answer["ranks"]) == (776, 846, size)
        right = [one["correct"] for one in answer["per_class"]]
        assert (len(right), sum(right), answer["per_class"][3]["class"]) == (10, 776, "cat")
        assert answer["accuracy"] == 776 / 846


@pytest.mark.covered(lambda data: data == "fake:150")
@pytest.mark.parametrize("data", ["fake:150", "fake:10"])
def test_any_number_of_ranks_gives_the_same_digits(run_ranks, saved, data):
    """Of several batches, and of two samples: fewer than ranks."""
    arguments = [str(saved / "plain.pt"), "--model", "resnet20", "--data", data, "--eval-batch", "20"]
    (alone,) = run_ranks(1, score_on_ranks, arguments, timeout=200)
    for size in (2, 3, 4):
        for answer in run_ranks(size, score_on_ranks, arguments, timeout=200):
            assert answer["ranks"] == size
            assert without_ranks(answer) == without_ranks(alone)


SCALED = """
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 1.0

    def forward(self, x):
        return self.net(x) * self.scale

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]
"""


def test_every_rank_has_the_extra_state_of_the_checkpoint(run_ranks, tmp_path):
    (tmp_path / "own.py").write_text(SCALED)
    model = models.build(f"{tmp_path}/own.py:Scaled", shape=(), classes=0)
    model.set_extra_state({"scale": 3.0})
    torch.save(model.state_dict(), tmp_path / "scaled.pt")
    arguments = [f"{tmp_path}/scaled.pt", "--model", f"{tmp_path}/own.py:Scaled", "--eval-batch", "100"]
    (alone,) = run_ranks(1, score_on_ranks, arguments)
    for answer in run_ranks(2, score_on_ranks, arguments):
        assert without_ranks(answer) == without_ranks(alone)


def certify_on_ranks(rank: int, world_size: int, arguments: list[str]) -> None:
    evaluate.evaluate(evaluate.prepare(parse(arguments)))


def test_the_certificate_agrees_with_the_files_of_the_ranks(run_ranks, saved, tmp_path, cli):
    out = tmp_path / "eval"
    arguments = [str(saved / "ddp.pt"), "--model", "resnet20", "--data", "fake:100", "--out", str(out)]
    run_ranks(3, certify_on_ranks, arguments)
    statement, *files = sorted(out.iterdir())
    assert [path.name for path in files] == [f"rank{rank}.safetensors" for rank in range(3)]
    said = json.loads(statement.read_text())
    assert (said.pop("checkpoint"), said.pop("state")) == (str(saved / "ddp.pt"), "model")
    assert cli("gather-metrics", *files, "--json").json == said
    assert said["digest"] == cli("digest", saved / "ddp.pt", "--json").json["digest"]
    assert (said["samples"], said["rank_samples"], said["threads"]) == (20, [20, 0, 0], 1)
    assert cli("gather-metrics", *files[1:]).code == 1


def test_an_evaluation_is_overwritten_only_with_force_and_completely(saved, tmp_path, capsys):
    out = tmp_path / "eval"
    out.mkdir()
    for name in ("rank7.safetensors", "eval.json", "notes.txt"):
        (out / name).write_text("older")
    arguments = [str(saved / "plain.pt"), "--model", "resnet20", "--data", "fake:20", "--out", str(out)]
    assert main(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["missing.pt", *arguments[1:], "--force"]) == 3
    assert (out / "rank7.safetensors").read_text() == "older"  # until a new one can begin
    assert main([*arguments, "--force"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["eval.json", "notes.txt", "rank0.safetensors"]


SETS = """
import torch
from torch.utils.data import TensorDataset

def sets(size, classes=10):
    inputs = torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(size))
    return TensorDataset(inputs, torch.arange(size) % classes)

def data():
    return sets(12), sets(20)

def hard(size=9):
    return sets(10), sets(size)

def numbers(size=9):
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
    halves = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    return halves, halves

def net():
    return torch.nn.Linear(4, 1)

def by_batch():
    norms = torch.nn.InstanceNorm1d(4), torch.nn.BatchNorm1d(4, track_running_stats=False)
    return torch.nn.Sequential(*norms, net())
"""


@pytest.fixture
def sets(tmp_path, monkeypatch) -> Path:
    (tmp_path / "sets.py").write_text(SETS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", [1, 2])
def test_more_test_sets_are_scored_as_each_is_by_itself(run_ranks, saved, sets, cli, size):
    """Of 20, 9 and 1 samples: one rank has none of the last."""
    given = [str(saved / "plain.pt"), "--model", "resnet20", "--eval-batch", "4"]
    data, hard = f"{sets / 'sets.py'}:data", f"{sets / 'sets.py'}:hard"
    specs = {"hard": hard, "one": f"{hard}(size=1)"}
    also = [part for name, spec in specs.items() for part in ("--also-test", f"{name}={spec}")]
    answers = run_ranks(size, score_on_ranks, [*given, "--data", data, *also, "--out", str(sets / "eval")])
    assert answers == [answers[0] | {"checkpoint": answer["checkpoint"]} for answer in answers]
    tests = answers[0].pop("tests")
    assert list(tests) == list(specs)
    for name, spec in {"": data, **specs}.items():
        (alone,) = run_ranks(1, score_on_ranks, [*given, "--data", spec])
        basis = {part: alone[part] for part in ("threads", "batch_size")}
        assert without_ranks({**basis, **(tests[name] if name else answers[0])}) == without_ranks(alone)
        files = sorted((sets / "eval" / name).glob("rank*.safetensors"))
        assert len(files) == size
        said = json.loads((sets / "eval" / name / "eval.json").read_text())
        del said["checkpoint"], said["state"]
        assert cli("gather-metrics", *files, "--json").json == said
        assert (said["samples"], said["loss"]) == (alone["samples"], alone["loss"])


def test_more_test_sets_of_another_task_have_its_metrics(sets, capsys):
    torch.save(nn.Linear(4, 1).state_dict(), "net.pt")
    given = ["net.pt", "--model", "sets.py:net", "--task", "regression", "--out", "eval"]
    given += ["--data", "sets.py:numbers", "--also-test", "few=sets.py:numbers(size=3)"]
    assert main([*given, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    few = answer["tests"]["few"]
    assert (answer["samples"], few["samples"], set(few["metrics"])) == (9, 3, set(answer["metrics"]))
    assert json.loads((sets / "eval/few/eval.json").read_text())["loss"] == few["loss"]
    assert main(given) == 2  # no file of it is replaced unasked
    assert main([*given, "--force"]) == 0
    own, other = capsys.readouterr().out.splitlines()
    assert own.startswith("net.pt: loss ") and own.endswith("9 samples, on 1 rank")
    assert other.startswith("few: loss ") and other.endswith("3 samples, on 1 rank")
    assert main([*given[:-2], "--force"]) == 2  # whose scores would stay in eval/few
    assert "--out eval: holds the scores of another test set, 'few'" in capsys.readouterr().err


@pytest.mark.parametrize(("also", "said"), [
    (["few"], "--also-test few: is not NAME=DATA"),
    (["../a=fake:9"], "--also-test ../a=fake:9: is not NAME=DATA"),
    (["a=fake:20", "a=fake:20"], "another test set is named a"),
    (
        ["a=sets.py:hard(size=0)"],
        "--also-test a=sets.py:hard(size=0): --data sets.py:hard(size=0): there are",
    ),
    (["a=digits"], "does not take the"),
])  # fmt: skip
def test_a_test_set_that_can_not_be_scored_is_refused_by_name(saved, sets, capsys, also, said):
    flags = [part for one in also for part in ("--also-test", one)]
    given = [str(saved / "plain.pt"), "--model", "resnet20", "--data", "sets.py:data"]
    assert main([*given, *flags, "--out", "eval"]) == 2
    assert said in capsys.readouterr().err and not (sets / "eval").exists()


def test_a_layer_that_normalises_by_the_batch_when_scored_is_refused(sets, capsys):
    """Another number of ranks, or another --eval-batch, would give another score."""
    torch.save({}, "net.pt")
    flags = ["--model", "sets.py:by_batch", "--task", "regression", "--data", "sets.py:numbers"]
    for program, given in ((train.main, ["--out", "run", "--batch-size", "3"]), (main, ["net.pt"])):
        assert program([*flags, *given]) == 2
        said = capsys.readouterr().err
        assert "--model sets.py:by_batch: 1 keeps no running statistics" in said and said.count("\n") == 1


def fail_on_one(rank: int, world_size: int, arguments: list[str]) -> tuple[str, str] | None:
    return trainings.error_of(lambda: certify_on_ranks(rank, world_size, arguments), Exception)


@pytest.fixture
def broken(tmp_path) -> list[str]:
    """An evaluation of which one sample can't be read."""
    model = trainings.seeded(lambda: models.build("simple-cnn", shape=(1, 8, 8), classes=10))
    torch.save(model.state_dict(), tmp_path / "cnn.pt")
    (tmp_path / "broken.py").write_text(BROKEN_DATA)
    return [str(tmp_path / "cnn.pt"), "--model", "simple-cnn", "--data", f"{tmp_path / 'broken.py'}:make"]


def test_a_rank_that_fails_ends_all_with_its_error_at_once(run_ranks, broken):
    """Sample 300 is in the third batch, which is rank 2's first: no rank goes on to a second one."""
    answers = run_ranks(3, fail_on_one, broken)
    assert [name for name, _ in answers] == ["RankFailed", "RankFailed", "Unreadable"]
    assert all("sample 300 is broken" in said for _, said in answers)


def test_a_spawned_rank_that_fails_ends_all_and_sets_the_exit_code(broken):
    ran = start([sys.executable, "train/evaluate.py", *broken, "--spawn", "2", "--timeout", "500"])
    assert (ran.returncode, "sample 300 is broken" in ran.stderr) == (3, True), ran.stderr


def test_every_form_of_a_checkpoint_gives_the_numbers_of_plain_pytorch(saved, capsys):
    found = []
    states = {"ddp.pt": "model", "plain.pt": "", "legacy.th": "state_dict", "plain.safetensors": ""}
    for name, state in states.items():
        assert main([str(saved / name), "--model", "resnet20", "--data", "fake:100", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer.pop("checkpoint"), answer.pop("state")) == (str(saved / name), state)
        found.append(answer)
    assert found == [found[0]] * 4
    numbers = {
        "schema",
        "correct",
        "samples",
        "accuracy",
        "loss",
        "per_class",
        "ranks",
        "threads",
        "batch_size",
    }
    assert set(found[0]) == numbers and found[0]["samples"] == 20
    samples = data_set.load(parse(["x", "--model", "resnet20", "--data", "fake:100"]).data).test
    inputs, labels = map(torch.stack, zip(*[(x, torch.tensor(y)) for x, y in samples], strict=True))
    model = models.resnet20()
    model.load_state_dict(torch.load(saved / "plain.pt", weights_only=True))
    with torch.no_grad():
        scores = model.eval()(inputs)
    assert found[0]["correct"] == (scores.argmax(1) == labels).sum()
    assert found[0]["loss"] == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-5)


def test_without_json_the_result_is_one_line(saved, capsys):
    assert main([str(saved / "ddp.pt"), "--model", "resnet20", "--data", "fake:100"]) == 0
    said = capsys.readouterr()
    assert (said.err, said.out.count("\n")) == ("", 1)
    assert "of 20 correct" in said.out and said.out.endswith("on 1 rank\n")


FAILURES: dict[str, tuple[str, int, str]] = {
    "no file": ("absent.pt --model resnet20 --data fake:9", 3, "absent.pt: no such file"),
    "other model": ("ddp.pt --model simple-cnn --data fake:9", 1, "does not fit the model"),
    "no data": ("ddp.pt --model resnet20 --data folder:/no/such", 2, "/no/such: no such folder"),
    "other samples": ("ddp.pt --model torchvision:resnet18 --data digits", 2, "does not take the"),
    "no model": ("ddp.pt --model no-such --data fake:9", 2, "no such model"),
    "model not given": ("ddp.pt --data fake:9", 2, "--model"),
    "nothing given": ("--model resnet20", 2, "CKPT"),
    "no threads": ("ddp.pt --model resnet20 --threads 0", 2, "--threads: 0 is less than 1"),
    "no folder": ("ddp.pt --model resnet20 --data fake:9 --out ddp.pt", 2, "--out ddp.pt: "),
}


@pytest.mark.parametrize(
    ("what", "as_json"),
    [*((what, True) for what in FAILURES), ("other model", False), ("nothing given", False)],
)
def test_a_failure_is_one_line_and_an_object_for_scripts(saved, capsys, monkeypatch, what, as_json):
    arguments, code, said = FAILURES[what]
    monkeypatch.chdir(saved)
    assert main([*arguments.split(), *(["--json"] if as_json else [])]) == code
    answer = capsys.readouterr()
    assert answer.err.startswith("error: ") and answer.err.count("\n") == 1 and said in answer.err
    assert bool(answer.out) == as_json
    if as_json:
        error = json.loads(answer.out)["error"]
        assert said in error["message"] and set(error) == {"kind", "message", "hint"}


@pytest.mark.long
def test_a_damaged_checkpoint_is_not_scored(saved, tmp_path, capsys):
    raw = bytearray((saved / "plain.pt").read_bytes())
    values = torch.load(saved / "plain.pt")["conv1.weight"].numpy().tobytes()
    at = raw.index(values) + len(values) // 2
    raw[at : at + 40] = bytes(byte ^ 255 for byte in raw[at : at + 40])
    (tmp_path / "in.pt").write_bytes(raw)
    assert main([str(tmp_path / "in.pt"), "--model", "resnet20", "--data", "fake:10"]) == 3
    said = capsys.readouterr()
    assert said.out == "" and "in.pt: the bytes of 'conv1.weight' do not match their checksum" in said.err


def test_an_evaluation_does_not_import_the_compiler(saved):
    """It takes more than a second, and only training needs it."""
    code = "import sys; from train.evaluate import main; sys.exit(main() or 'torch._dynamo' in sys.modules)"
    arguments = [str(saved / "plain.pt"), "--model", "resnet20", "--data", "fake:20"]
    done = start([sys.executable, "-c", code, *arguments], anew=True)
    assert done.returncode == 0, done.stderr


# ---- a run's checkpoint says its model ------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    flags = ["--data", "fake:20", "--epochs", "1", "--batch-size", "10", "--eval-batch", "3"]
    assert train.main([*flags, "--model", "resnet20", "--out", str(tmp_path / "run")]) == 0
    return tmp_path / "run" / "last.pt"


def test_a_runs_checkpoint_needs_no_flags(run, capsys):
    capsys.readouterr()
    given = ["--model", "resnet20", "--data", "fake:20", "--eval-batch", "3"]
    answers = []
    for flags in ([], given, ["--data", "fake:10"]):
        assert main([str(run), "--json", *flags]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert (answers[0]["samples"], answers[0]["batch_size"], answers[2]["samples"]) == (4, 3, 2)


NAMED = "code that is run only if you name it"


@pytest.mark.parametrize(("config", "said"), [
    (None, "does not say it (give --model SPEC)"),
    ({"model": 3}, "does not say it"),
    ({"model": "own.py:net"}, f"is of own.py:net, {NAMED} (--model own.py:net)"),
    (
        {"model": "own.py:net", "data": "fake:5", "eval_batch": 128, "mean": [0.5]},
        "(--model own.py:net --data fake:5 --mean 0.5)",
    ),
    ({"model": "os:getcwd"}, f"is of os:getcwd, {NAMED}"),
    ({"model": "resnet20", "data": "own.py:data"}, "--model resnet20 --data own.py:data)"),
    ({"model": "resnet20", "mean": "a,b"}, "argument --mean: 'a' is not a number"),
    ({"model": "resnet20", "eval_batch": [[]]}, "argument --eval-batch"),
    ({"model": "no-such"}, "--model no-such: no such model"),
])  # fmt: skip
def test_code_that_a_checkpoint_names_is_not_run(tmp_path, capsys, config, said):
    torch.save({"model": {"w": torch.zeros(2)}, "config": config}, tmp_path / "a.pt")
    assert main([str(tmp_path / "a.pt")]) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1


# ---- the weights that a run was scored by ----------------------------------------------------------------


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> Path:
    """A run with `--ema`, whose averages score otherwise than the weights of its last step."""
    out = tmp_path_factory.mktemp("averaged") / "run"
    flags = ["--data", "fake:40", "--epochs", "2", "--batch-size", "8", "--lr", "0.3", "--keep", "2"]
    assert train.main([*flags, "--ema", "0.8", "--out", str(out)]) == 0
    return out


def scored(capsys, *arguments: object) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_a_checkpoint_of_a_run_with_averages_has_the_score_that_the_run_said(averaged, tmp_path, cli, capsys):
    """All files of the run, slimmed and renamed ones, and the published weights."""
    log = [json.loads(line) for line in (averaged / "log.jsonl").read_text().splitlines()]
    epochs = [entry["loss"] for entry in log if "epoch" in entry]
    best, last = averaged / "best.pt", averaged / "last.pt"
    for path in (last, averaged / "step-000010.pt"):
        answer, said = scored(capsys, path)
        assert (answer["loss"], answer["state"]) == (pytest.approx(epochs[1], rel=1e-6), "ema.averages")
        assert said == "state: 'ema.averages', by which its run was scored; also available: --state model\n"
    answer, said = scored(capsys, last, "--state", "model")
    assert answer["state"] == "model" and abs(answer["loss"] - epochs[1]) > 1e-4 and not said
    losses = {scored(capsys, best)[0]["loss"]}
    assert min(abs(loss - losses.copy().pop()) for loss in epochs) < 1e-5
    flags = ["--model", "simple-cnn", "--data", "fake:40"]
    cli("strip-prefix", best, tmp_path / "stripped.pt")
    cli("strip-prefix", best, tmp_path / "published.safetensors", "--state", "ema.averages")
    for name in ("stripped.pt", "published.safetensors"):
        losses.add(scored(capsys, tmp_path / name, *flags)[0]["loss"])
    assert len(losses) == 1


def test_tools_say_by_which_weights_a_run_was_scored(averaged, tmp_path, cli, capsys):
    best, also = averaged / "best.pt", "--state ema.averages (by which its run was scored)"
    assert also in cli("strip-prefix", best, tmp_path / "a.safetensors").err
    assert also in cli("reload", best, "--model", "train.model.builtin:simple_cnn").err
    assert also in cli("inspect", best).out
    flags = ["--data", "fake:40", "--epochs", "1", "--init", str(best), "--out", str(tmp_path / "next")]
    assert train.main(flags) == 0
    assert "it also holds 'ema.averages', by which its run was scored; to start" in capsys.readouterr().out


def test_of_another_programs_average_it_is_said_which_state_is_scored(saved, tmp_path, capsys):
    state = torch.load(saved / "plain.pt", weights_only=True)
    torch.save({"state_dict": state, "state_dict_ema": state}, tmp_path / "timm.pt")
    answer, said = scored(capsys, tmp_path / "timm.pt", "--model", "resnet20", "--data", "fake:20")
    assert answer["state"] == "state_dict"
    assert said == "state: 'state_dict'; also available: --state state_dict_ema\n"


def test_the_test_set_that_a_run_is_best_by_is_named_where_it_is_not_scored(tmp_path, capsys):
    flags = ["--data", "fake:20", "--epochs", "1", "--out", str(tmp_path / "run")]
    few = ["--also-test", "few=fake:10"]
    assert train.main([*flags, *few, "--best", "few/loss"]) == 0
    _, said = scored(capsys, tmp_path / "run" / "best.pt")
    assert "its run's best is by few/loss, of a test set that is not scored here: --also" in said
    assert "few" not in scored(capsys, tmp_path / "run" / "best.pt", *few)[1]
