"""The contract of each command: what it prints with --json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import answers, outputs
from .schemas import document

# By command: its fields; a list where it can print one or another, in which a list is an array
PRINTED: dict[str, Callable[[], Any]] = {
    "inspect": answers.inspect,
    "digest": answers.digest,
    "report": answers.report,
    "strip-prefix": outputs.rewritten,
    "add-prefix": outputs.rewritten,
    "rename-keys": outputs.rewritten,
    "convert": outputs.convert,
    "conform": outputs.conform,
    "maps": answers.maps,
    "merge": outputs.merge,
    "split": outputs.split,
    "slim": outputs.slim,
    "disarm": outputs.disarm,
    "convert-batchnorm": outputs.convert_batchnorm,
    "merge-lora": outputs.merge_lora,
    "extract-lora": outputs.extract_lora,
    "average": outputs.average,
    "optimizer": outputs.optimizer,
    "delta": outputs.delta,
    "apply": outputs.rewritten,
    "diff": answers.diff,
    "verify": answers.verify,
    "scan": answers.scan,
    "prove": answers.prove,
    "gather-metrics": answers.gather_metrics,
    "doctor": answers.doctor,
    "reload": answers.reload,
    "schema": answers.schema,
    "skill": answers.skill,
}
SEVERAL = ("inspect", "verify", "digest")  # these take several FILEs, and print `files` then


def schema(command: str, about: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints with --json, also where it fails."""
    printed = PRINTED[command]()
    variants = printed if isinstance(printed, list) else [printed]
    return document(f"ckpttool {command} --json", about, variants, several=command in SEVERAL)
