"""Ranks on several machines: other flags or code are refused, a machine is lost, the link between two is cut.

Network namespaces stand in for the machines. Only the first one has the run's folder. The manifests of
docs/several-machines.md have no field that the operators' own models of their API lack:
pip install kubeflow-training kubeflow-trainer-api
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import CkptToolError
from tests.drill import agents
from tests.drill.agents import ROOT, Agent, Machine
from tests.ranks.runs import different
from train import main
from train.checkpoint import format as checkpoints
from train.config import command_line
from train.config.flags import Every
from train.config.sections import TrainConfig
from train.evaluate import EvaluateConfig
from train.launch import same_settings

OTHER: dict[str, tuple[Any, str]] = {
    "seed": (7, "--seed 7 on rank 1, and --seed 0 on ranks 0 and 2"),
    "batch_size": (12, "--batch-size 12 on rank 1, and --batch-size 64 on ranks 0 and 2"),
    "accumulate": (2, "--accumulate 2 on rank 1, and --accumulate 1"),
    "lr": (0.05, "--lr 0.05 on rank 1, and --lr 0.1"),
    "clip_norm": (1.0, "--clip-norm 1.0 on rank 1, and no --clip-norm"),
    "epochs": (3, "--epochs 3 on rank 1, and --epochs 10"),
    "amp": ("bf16", "--amp bf16 on rank 1, and --amp none"),
    "sampler": ("torch", "--sampler torch on rank 1, and --sampler exact"),
    "model": ("resnet20", "--model resnet20 on rank 1, and --model simple-cnn"),
    "save_every": (Every(2, "steps"), "--save-every 2steps on rank 1, and --save-every 1epochs"),
    "rank_share": ((1, 2, 3), "--rank-share 1,2,3 on rank 1, and no --rank-share"),
    "drop_last": (True, "--drop-last on rank 1, and no --drop-last on"),
    "change": (("lr",), "--change lr on rank 1, and no --change on"),
}
OWN = {
    "out": "runs/here",
    "workers": 4,
    "data": "folder:/mnt/pictures",
    "model": "/home/b/own.py:model",
    "resume": "/mnt/last.pt",
}


def compared(rank: int, size: int, configs: list[TrainConfig], torch: list[str] | None = None) -> str:
    with pytest.MonkeyPatch.context() as patch:  # the process goes on to other tests
        if torch:
            versions = {"torch": torch[rank], "ckpttool": "1", "python": "3"}
            patch.setattr(same_settings, "versions", lambda: versions)
        try:
            warnings = same_settings.compare(configs[rank])
        except CkptToolError as error:
            return f"{type(error).__name__}: {error.message} ({error.hint})"
    return "; ".join(warnings)


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_that_differs_is_named_with_values_and_ranks(run_ranks, name):
    value, text = OTHER[name]
    usual = TrainConfig()
    said = run_ranks(3, compared, [usual, TrainConfig.of(**{name: value}), usual])
    for of_rank in said:
        assert of_rank.startswith("RanksDiffer: ") and text in of_rank


def test_all_settings_that_differ_are_named_in_one_error_as_is_another_factory_of_a_file(run_ranks):
    said = run_ranks(
        2, compared, [TrainConfig.of(model="a.py:one"), TrainConfig.of(model="b/a.py:two", seed=1)]
    )
    assert "--model b/a.py:two on rank 1, and --model a.py:one on rank 0" in said[0]
    assert "--seed 1 on rank 1" in said[0]


@pytest.mark.parametrize("name", OWN)
def test_what_is_a_nodes_own_may_differ(run_ranks, name):
    here: dict[str, Any] = {"data": "folder:pictures", "model": "own.py:model", "resume": "auto"}
    configs = [TrainConfig.of(**here), TrainConfig.of(**{**here, name: OWN[name]})]
    assert run_ranks(2, compared, configs) == ["", ""]


def test_ranks_of_an_evaluation_are_compared_too(run_ranks):
    one: Any = EvaluateConfig.of(checkpoint="a.pt")
    said = run_ranks(2, compared, [one, EvaluateConfig.of(checkpoint="/b/a.pt", resize=8)])
    assert "--resize 8 on rank 1, and no --resize on rank 0 (give the same on every node; only" in said[0]
    assert run_ranks(2, compared, [one, one]) == ["", ""]


OLDER = "torch is 2.13.0 on rank 1, and 2.14.1 on rank 0"
VERSIONS = [
    ("2.14.1", ""),
    ("2.14.0+cu130", "torch is 2.14.0+cu130 on rank 1, and 2.14.1 on rank 0"),
    ("2.13.0", f"RanksDiffer: {OLDER}"),
]


@pytest.mark.parametrize(("other", "outcome"), VERSIONS)
def test_versions_of_torch(run_ranks, other, outcome):
    said = run_ranks(2, compared, [TrainConfig()] * 2, ["2.14.1", other])
    assert said[1].startswith(outcome) and bool(said[1]) == bool(outcome)


CODE = {
    "own.py": "from beside import width\nfrom torch import nn\n\ndef model(num_classes):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(3072 * width, num_classes))\n",
    "beside.py": "width = 1\n",
}


def warned(rank: int, size: int, folder: Path) -> str:
    """Train with the code of this rank's own node; return what is said on stderr."""
    flags = (
        f"--model {folder}/node{rank}/own.py:model --data fake:8 --batch-size 8 --epochs 1 --out {folder}/run"
    )
    job = main.prepare(command_line.parse(flags.split()))
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()) as errors:
        assert main.train(job) == 0
    return errors.getvalue()


@pytest.mark.parametrize("changed", CODE)
def test_code_that_differs_is_a_warning_also_where_a_file_imports_it(fresh_ranks, tmp_path, changed):
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        for name, text in CODE.items():
            (tmp_path / f"node{node}" / name).write_text(
                text + "\n# more\n" * (node == 1 and name == changed)
            )
    first, second = fresh_ranks(2, warned, tmp_path)
    assert first.startswith("warning: ") and f"{changed} of rank 1 is not that of rank 0" in first
    assert second == ""


# ---- two machines, each with one rank: one is lost, the link between them is cut -----------------------


ADDRESSES = ("10.77.0.1", "10.77.0.2")
SETTINGS = ["--data", "fake:50", "--batch-size", "12", "--epochs", "2", "--eval-batch", "2"]
SETTINGS += ["--save-every", "1steps", "--model", f"{ROOT}/tests/drill/saboteur.py:model"]
SETTINGS += ["--resume", "auto"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with a link between them, `wire` on both sides."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` and root")
    names = [f"machine-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = ["wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1]]
        ip("link", "add", *ends)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces can be made here: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


class TwoMachines:
    """A run on two machines, of which only the first has its folder."""

    def __init__(self, networks: list[str], folder: Path, pauses: list[Any], timeout: float) -> None:
        self.networks, self.folder, self.timeout = networks, folder, timeout
        self.agents: list[Agent] = []
        (folder / "run").mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(pauses))

    def start(self, number: int) -> None:
        """Start the agent of a machine; the first is where the agents meet."""
        meeting = f"--rdzv-backend c10d --rdzv-id run --rdzv-endpoint {ADDRESSES[0]}:29500"
        conf = f"--rdzv-conf is_host={1 - number},keep_alive_interval=1,read_timeout=20"
        own = f"--nnodes 2 --nproc-per-node 1 --max-restarts 3 --local-addr {ADDRESSES[number]}"
        machine = Machine(self.networks[number], lacks=str(self.folder / "run") if number else "")
        arguments = [*SETTINGS, "--out", str(self.folder / "run"), "--timeout", str(self.timeout)]
        options = f"{own} {meeting} {conf}".split()
        self.agents.append(Agent(options, arguments, self.folder, fresh=True, machine=machine))

    def wait_for(self, mark: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not (self.folder / mark).exists():
            assert time.monotonic() < end and any(agent.code is None for agent in self.agents), self.said()
            time.sleep(0.02)

    def cut_link(self, seconds: float) -> None:
        """Cut the link where the first rank pauses, which then goes on."""
        self.wait_for("kill-0")
        ip("-n", self.networks[1], "link", "set", "wire", "down")
        (self.folder / "go-0").touch()
        time.sleep(seconds)
        ip("-n", self.networks[1], "link", "set", "wire", "up")

    def ends(self, seconds: float = 90) -> list[int | None]:
        """Return the exit codes of the agents, once they have ended."""
        end = time.monotonic() + seconds
        while None in (codes := [agent.code for agent in self.agents]) and time.monotonic() < end:
            time.sleep(0.05)
        return codes

    def said(self) -> str:
        return "\n".join(f"== {agent.log.name}\n{agent.log.read_text()[-9000:]}" for agent in self.agents)


@pytest.fixture
def two_machines(networks: list[str], tmp_path: Path) -> Iterator[Any]:
    """Start a run: `two_machines(pauses, timeout)`; end what is left of it."""
    runs = []

    def start(pauses: list[dict[str, Any]], timeout: float = 60) -> TwoMachines:
        run = TwoMachines(networks, tmp_path / "two", pauses, timeout)
        runs.append(run)
        for number in (0, 1):
            run.start(number)
        return run

    yield start
    for run in runs:
        agents.kill_all(run.folder, run.agents)


def pause(step: int) -> dict[str, Any]:
    """Return the plan of a rank that waits in a step until the test has done what it has in mind."""
    return {"at": "step", "whom": "worker", "signal": "none", "rank": 1, "step": step}


def assert_undisturbed(folder: Path, tmp_path: Path) -> None:
    """Compare the weights with those of two ranks on one machine."""
    one = tmp_path / "one"
    one.mkdir()
    (one / "plan.json").write_text("[]")
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    options += ["--rdzv-id", "one"]
    agent = Agent(options, [*SETTINGS, "--out", str(one / "run")], one, fresh=True)
    while agent.code is None:
        time.sleep(0.05)
    assert agent.code == 0, agent.log.read_text()
    names = sorted(os.listdir(one / "run"))
    assert sorted(os.listdir(folder)) == names == ["best.pt", "config.toml", "last.pt", "log.jsonl"]
    ends = [checkpoints.read(str(each / "last.pt")) for each in (folder, one / "run")]
    assert different(*ends) == []


@pytest.mark.long
def test_a_machine_that_is_lost_and_comes_back_and_a_link_that_is_cut_change_no_bit(two_machines, tmp_path):
    run = two_machines([pause(3), pause(6)])
    run.cut_link(2)  # not for long: the run goes on as if nothing had been
    run.wait_for("run/last.pt")
    run.wait_for("kill-1")
    for pid in subprocess.check_output(["ip", "netns", "pids", run.networks[1]], text=True).split():
        os.kill(int(pid), signal.SIGKILL)
    agents.kill_all(run.folder / "none", run.agents[1:])
    run.start(1)
    assert run.ends() == [0, -9, 0], run.said()
    assert_undisturbed(run.folder / "run", tmp_path)


@pytest.mark.long
def test_a_link_that_is_cut_for_long_ends_a_step_and_the_run_goes_on_when_it_is_back(two_machines, tmp_path):
    run = two_machines([pause(3)], timeout=6)
    run.cut_link(12)
    assert run.ends() == [0, 0], run.said()
    assert "error: rank 1: rank 0 does not answer" in run.said()
    assert_undisturbed(run.folder / "run", tmp_path)


# ---- manifests for Kubernetes ------------------------------------------------------------------------


def manifest(kind: str) -> dict[str, Any]:
    """Return the one manifest of a kind on the page."""
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "several-machines.md").read_text()
    read = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.S))
    (found,) = [manifest for manifest in read if manifest["kind"] == kind]
    return found


def test_the_pytorchjob_has_no_field_that_the_operator_does_not_know():
    operator = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is not installed")
    kubernetes = pytest.importorskip("kubernetes.client.models")

    def check(value: Any, kind: str, path: str) -> None:
        outer, _, inner = kind.rstrip(")]").replace("(", "[").partition("[")
        if outer in ("list", "dict"):
            for key, each in value.items() if outer == "dict" else enumerate(value):
                check(each, inner.removeprefix("str, "), f"{path}.{key}")
        elif model := getattr(operator, kind, None) or getattr(kubernetes, kind, None):
            names = {given: name for name, given in model.attribute_map.items()}
            for key, each in value.items():
                assert key in names, f"{path}.{key}"
                check(each, model.openapi_types[names[key]], f"{path}.{key}")
        else:
            types = {"int": int, "str": (str, int)}  # a quantity may be a number
            assert isinstance(value, types[kind]), f"{path} is no {kind}"

    check(manifest("PyTorchJob"), "KubeflowOrgV1PyTorchJob", "PyTorchJob")


def test_the_trainjob_has_no_field_that_the_operator_does_not_know():
    operator = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")

    def models(annotation: Any) -> Iterator[Any]:
        if hasattr(annotation, "model_fields") and "actual_instance" not in annotation.model_fields:
            yield annotation
        for part in typing.get_args(annotation):
            yield from models(part)

    def check(value: Any, model: Any, path: str) -> None:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        for key, each in value.items():
            assert key in fields, f"{path}.{key}"
            for inner in models(fields[key].annotation):
                for one in each if isinstance(each, list) else [each]:
                    check(one, inner, f"{path}.{key}")

    check(manifest("TrainJob"), operator.TrainerV1alpha1TrainJob, "TrainJob")
    assert operator.TrainerV1alpha1TrainJob.from_dict(manifest("TrainJob"))
