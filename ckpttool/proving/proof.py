"""`prove`: whether the record of a training run holds, and whether training again gives the same bits.

docs/proof.md says what each check shows. Only a replay needs torch, in a process of its own: the trainer's
program, which is never named by what is checked.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.files import digest
from ..core.files.digest import Link
from ..core.formats.reading import opened
from ..core.tensors.ref import TensorRef
from ..core.tensors.values import stream
from ..errors import CkptToolError, Damaged
from ..verifying.verify import verify
from .replay import Replay, RunRecord, differing, planned

# The names that the trainer gives, and no others: `step-7.pt` is a user's.
NUMBER = r"step-(\d{6}|[1-9]\d{6,})"
CHECKPOINT = re.compile(rf"(last|best|{NUMBER})\.pt|{NUMBER}\.delta\.safetensors")

# What each kind of entry has at least, for the checks here
BEGIN = {"step": int, "ranks": int, "every": int, "virtual_ranks": int | None, "weights": str, "code": dict}
FIELDS: dict[str, dict[str, Any]] = {
    "begin": BEGIN | {"source": dict | None, "versions": dict, "arguments": list, "init": list | None},
    "step": {"step": int, "weights": str, "samples": dict},
    "epoch": {"step": int, "epoch": int, "plan": str},
    "evaluation": {"step": int, "score": object},
    "checkpoint": {"step": int, "digests": dict},
}


@dataclass(frozen=True, slots=True)
class ProofFinding:
    """Something that does not hold.

    Attributes:
        kind: `chain`, `checkpoint` or `replay`.
        where: the line, the file, or the step.
        message: what is wrong there.
        step: of the training, where one is known.
    """

    kind: str
    where: str
    message: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Proved:
    """The outcome of checking a run.

    Attributes:
        lines: of its chain.
        head: the hash of the last one, which stands for all of them.
        ended: whether the last line says that the run has ended.
        checkpoints: the files that were compared with the chain, with the step of each.
        replayed: the steps that were trained again, as (from, to); None if none were.
        ranks: of the replay.
        findings: what does not hold.
        notes: what else is worth knowing.
        command: the replay's; empty without one.
    """

    lines: int
    head: str
    ended: bool
    checkpoints: tuple[tuple[str, int], ...]
    replayed: tuple[int, int] | None
    ranks: int
    findings: tuple[ProofFinding, ...] = field(metadata={"json": "problems"})
    notes: tuple[str, ...]
    command: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that was checked holds."""
        return not self.findings


def prove(
    run: str | os.PathLike[str],
    *,
    replay: Replay | None = None,
    announce: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Proved:
    """Check a training run: its record, its checkpoints, and a part trained again, bit for bit.

    Args:
        run: the folder of a run that was trained with `--prove-every`.
        replay: which part to train again, and how; nothing by default, and then torch is not needed.
        announce: called with the command of the replay before it starts.
        progress: called during the replay with the steps that are done, and how many there are.

    Returns:
        What was checked and what does not hold.

    Raises:
        Unreadable: there is no run.jsonl, or it can't be read.
        Damaged: it is no record of a run.
        UsageFault: the part can't be replayed: there is no checkpoint to start from, the run names code and
            `run_code` is not set, or the trainer's program is not there.

    Example:
        >>> ckpttool.prove("runs/a").ok
        True
    """
    folder = os.fspath(run)
    path = os.path.join(folder, digest.NAME)
    links, breaks = digest.read(path)
    if not any(link.entry.get("kind") == "begin" for link in links):
        raise Damaged(path, "is no record of a run")
    _require_entries(path, links)
    findings = [ProofFinding("chain", f"line {fault.number}", fault.message) for fault in breaks]
    plan = None
    try:
        findings += _begun_elsewhere(links)
        record = RunRecord(links)
        whole, wrong, foreign = _checkpoints(folder, links)
        findings += wrong
        notes = [*_notes(record), *foreign, *_absent(links, whole)]
        if replay is not None:
            plan = planned(path, record, whole, replay)
            notes += [plan.why] if plan.why else []
            if not replay.dry:
                announce(shlex.join(plan.command))
                if part := differing(plan, record, progress):
                    findings.append(ProofFinding("replay", f"step {part.step}", part.message, part.step))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(path, f"is no record of a run: an entry is of another form ({error})") from error
    record_of = len(links), links[-1].hash, record.end is not None, tuple(whole.items())
    steps = (plan.start, plan.end) if plan and replay and not replay.dry else None
    ranks, command = (plan.ranks, plan.command) if plan else (0, ())
    return Proved(*record_of, steps, ranks, tuple(findings), tuple(notes), command)


def _require_entries(path: str, links: list[Link]) -> None:
    """Refuse a record in which an entry lacks a field, or has one of another type."""
    for link in links:
        kind = link.entry.get("kind")
        for name, kinds in FIELDS.get(str(kind), {}).items():
            what = f"line {link.number} is no entry of a run"
            if name not in link.entry:
                raise Damaged(path, f"{what}: '{kind}' lacks '{name}'")
            value = link.entry[name]
            if not isinstance(value, kinds) or isinstance(value, bool):  # which Python takes for a number
                raise Damaged(path, f"{what}: '{name}' of '{kind}' is a {type(value).__name__}")
            if name == "source" and value is not None and "digests" not in value:
                raise Damaged(path, f"{what}: 'source' of 'begin' lacks 'digests'")


def _begun_elsewhere(links: list[Link]) -> Iterator[ProofFinding]:
    """Yield the lines that go on from a checkpoint that no earlier line records."""
    told: list[tuple[int, Any]] = []
    for link in links:
        entry = link.entry
        if entry.get("kind") == "checkpoint":
            told.append((entry["step"], entry["digests"]))
        goes_on = entry.get("kind") == "begin" and entry["source"] and link is not links[0]
        if goes_on and (entry["step"], entry["source"]["digests"]) not in told:
            message = f"goes on from a checkpoint of step {entry['step']} that no line before it records"
            yield ProofFinding("chain", f"line {link.number}", message, entry["step"])


def _notes(record: RunRecord) -> Iterator[str]:
    for line, last, step in record.returns:
        yield f"line {line}: the run went back from step {last} to step {step}, and on from there"
    if record.begins[0]["step"]:
        yield f"the record begins at step {record.begins[0]['step']}, with a resume"
    if record.end is None:
        yield "the record has no end: the run was interrupted or goes on, or the end was removed"


def _absent(links: list[digest.Link], checkpoints: Mapping[str, int]) -> Iterator[str]:
    """Yield which of the checkpoints that the chain records are not in the folder."""
    steps = [link.entry["step"] for link in links if link.entry.get("kind") == "checkpoint"]
    if steps and not checkpoints:
        yield f"none of the {len(steps)} recorded checkpoints is in the folder and whole"
    elif steps and 0 <= checkpoints.get("last.pt", -1) != steps[-1] and steps[-1] not in checkpoints.values():
        yield f"last.pt is of step {checkpoints['last.pt']}, and the record's last checkpoint of {steps[-1]}"


def _checkpoints(folder: str, links: list[Link]) -> tuple[dict[str, int], list[ProofFinding], list[str]]:
    """Return the steps of the sound checkpoints by name, faults of the others, and notes on users' files."""
    names = filter(CHECKPOINT.fullmatch, sorted(os.listdir(folder)))
    outcomes = {name: _check_checkpoint(folder, name, links) for name in names}
    whole = {name: step for name, step in outcomes.items() if isinstance(step, int)}
    wrong = [fault for fault in outcomes.values() if isinstance(fault, ProofFinding)]
    return whole, wrong, [note for note in outcomes.values() if isinstance(note, str)]


def _check_checkpoint(folder: str, name: str, links: list[Link]) -> int | ProofFinding | str:
    """Return the step of a recorded checkpoint, or its fault, or a note that it is a user's file."""
    path = os.path.join(folder, name)
    told = [link.entry for link in links if link.entry.get("kind") == "checkpoint"]
    begins = [link.entry for link in links if link.entry.get("kind") == "begin" and link.entry["source"]]
    told += [{"step": entry["step"], "digests": entry["source"]["digests"]} for entry in begins]
    named = re.match(r"step-(\d+)\.", name)
    is_told = named is None or int(named[1]) in [entry["step"] for entry in told]
    try:
        problems = verify(path).problems
        if problems:
            return _unreadable(name, f"{problems[0].name}: {problems[0].message}", is_told)
        with opened(path) as checkpoint:
            tree: Any = checkpoint.tree
            step, digests, head = tree["progress"]["global_step"], dict(tree["digests"]), tree.get("chain")
            model = _digest(tree["model"])
    except CkptToolError as error:
        return _unreadable(name, error.message.removeprefix(f"{path}: "), is_told)
    except (KeyError, TypeError, AttributeError, ValueError):
        reason = "is no checkpoint of the trainer"
        return f"{name}: {reason}" if named else ProofFinding("checkpoint", name, reason)
    of_step = [entry["digests"] for entry in told if entry["step"] == step]
    message = ""
    if not of_step:
        message = f"is of step {step}, for which the chain has no checkpoint"
    elif digests not in of_step:
        changed = next((part for part in digests if digests[part] != of_step[-1].get(part)), "run")
        message = f"its {changed} is not the one of step {step} in the chain"
    elif named and int(named[1]) != step:
        message = f"is of step {step}, not the one in its name"
    elif model != digests["model"]:
        message = f"the model's values are not those that step {step} saved"
    elif head is not None and head not in {digest.FIRST, *(link.hash for link in links)}:
        message = f"was saved with another chain: no line has the hash {head[:16]}… that it holds"
    return ProofFinding("checkpoint", name, message, step) if message else int(step)


def _unreadable(name: str, reason: str, is_told: bool) -> ProofFinding | str:
    """Return the fault of an unreadable file, or a note if the record has no checkpoint of its name."""
    if is_told:
        return ProofFinding("checkpoint", name, reason)
    return f"{name}: {reason}; the record has no checkpoint of that step"


def _digest(model: dict[str, TensorRef]) -> str:
    """Return the digest of a model's state as the trainer computes it (collectives.digest_all)."""
    digest = hashlib.sha256()
    for name, tensor in model.items():
        of_tensor = hashlib.sha256(f"torch.{tensor.dtype.name} {tuple(tensor.shape)} ".encode())
        for piece in stream(tensor):
            of_tensor.update(piece)
        digest.update(f"{len(name)}:{name}".encode() + of_tensor.digest())
    return digest.hexdigest()
