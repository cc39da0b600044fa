"""The contract of each command: what it prints with --json, those that write a checkpoint here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from . import answers
from .schemas import NAMES, Fields, document, fields_like

WRITTEN: Fields = {"seconds": (float, "how long it took"), "dry_run?": (Literal[True], "nothing was written")}
BESIDE: Fields = {
    "companions?": (NAMES, "files that were copied along"),
    "not_copied?": (NAMES, "other files of the input's folder, which stay behind"),
}


def _saved() -> Fields:
    from ...formats import Saved

    return fields_like(Saved)


def rewritten(more: Fields | None = None) -> Fields:
    """Return the fields of all commands that write one checkpoint from another."""
    from ...formats.one_of_several import ModelFile

    return {
        **_saved(),
        "renamed": (int, "how many keys of the state got another name"),
        "also_renamed": (dict[str, int], "dotted path of another state -> how many of its keys did"),
        "left_out": (NAMES, "dotted names of what the output lacks"),
        "kept": (NAMES, "keys that kept their names while others changed"),
        **BESIDE,
        "piece?": (fields_like(ModelFile), "of an input that is one of several files of one model"),
        "overflows?": (int, "how many finite values became infinite"),
        "underflows?": (int, "how many values became 0 when they were cast"),
        "nans?": (int, "how many finite values became NaN"),
        **(more or {}),
        **WRITTEN,
    }


def _among(more: Fields) -> Fields:
    """Return the fields of a command that writes, and of its result those that have no name of its own."""
    return rewritten({name: said for name, said in more.items() if name not in rewritten()})


def merge() -> Fields:
    from ...checkpoint.ranks import Ranks

    ranks = fields_like(Ranks, {}, without=("held", "replicated", "missing", "lacking", "device"))
    return _among({"ranks?": (ranks, "those that wrote the input")})


def split() -> list[Fields]:
    from ...formats.splitting import Split

    as_dtensors: Fields = {
        **fields_like(Split),
        "format": (Literal["dtensor-ranks"], "the output's"),
        "keys": (int, "how many names the state has"),
        "renamed": (int, "always 0"),
        **BESIDE,
        **WRITTEN,
    }
    return [as_dtensors, _among({"ranks": (int, "as given")})]


def convert() -> Fields:
    from ...transforms.mapping.applying import Mapped
    from ...transforms.quantization.dequantize import Dequantized
    from ...transforms.quantization.quantize import Quantized

    error: Fields = {
        "name": (str, "the tensor"),
        "relative": (float, "norm of what is lost / norm"),
        "max_abs": (float, "the largest error of an element"),
    }
    results = {**fields_like(Mapped), **fields_like(Dequantized), **fields_like(Quantized)}
    optional = {f"{name}?": said for name, said in results.items() if name not in rewritten()}
    return _among({**optional, "errors?": ([error], "with --quantize: of each tensor")})


def slim() -> list[Fields]:
    from ...slimming import SlimmedRun

    freed: Fields = {"freed": (int, "bytes that there is now room for")}
    return [rewritten(), {**fields_like(SlimmedRun), **freed, **WRITTEN}]


def conform() -> Fields:
    from ...transforms.conforming.conform import Conformed

    row: Fields = {
        "from": (NAMES, "templates of the names here"),
        "to": (NAMES, "templates of the names there"),
        "steps": (list[dict[str, Any]], "as a rule file has them"),
        "rests_on": (str, "by what it was found"),
        "layers": (int, "how many layers it stands for"),
        "numbers": (dict[str, str], "placeholder -> what it stands for"),
    }
    return _among({**fields_like(Conformed), "mapping": ([row], "each rule, with what it rests on")})


def disarm() -> Fields:
    change: Fields = {
        "name": (str, "dotted path of the value"),
        "from": (str, "its type before"),
        "to": (str, "what it became"),
    }
    return _among({"changed": ([change], "every object that became a plain value")})


def convert_batchnorm() -> Fields:
    from ...batchnorm.convert_states import BatchNormReport
    from ...batchnorm.pool_files import PoolReport

    return _among({**fields_like(PoolReport, maybe=("exact",)), **fields_like(BatchNormReport)})


def average() -> Fields:
    from ...transforms.average import Averaged

    return _among(fields_like(Averaged))


def optimizer() -> Fields:
    from ...transforms.optimizer.rekey import Rekeyed

    return _among(fields_like(Rekeyed))


def merge_lora() -> Fields:
    from ...transforms.lora.merge import Merged

    return _among(fields_like(Merged))


def extract_lora() -> Fields:
    from ...transforms.lora.adapter_folder import SavedAdapter
    from ...transforms.lora.extract import Extracted, Layer

    worst = (Layer, "the layer with the largest error")
    return {**fields_like(Extracted), "worst": worst, **fields_like(SavedAdapter), **WRITTEN}


def delta() -> Fields:
    from ...formats.delta.writing import Delta

    named: Fields = {"base": (str, "BASE as it was named"), "new": (str, "NEW as it was named")}
    return {**named, **fields_like(Delta, without=("saved",)), **_saved(), **WRITTEN}


# By command: its fields; a list where it can print one or another, in which a list is an array
PRINTED: dict[str, Callable[[], Any]] = {
    "inspect": answers.inspect,
    "digest": answers.digest,
    "report": answers.report,
    "strip-prefix": rewritten,
    "add-prefix": rewritten,
    "rename-keys": rewritten,
    "convert": convert,
    "conform": conform,
    "maps": answers.maps,
    "merge": merge,
    "split": split,
    "slim": slim,
    "disarm": disarm,
    "convert-batchnorm": convert_batchnorm,
    "merge-lora": merge_lora,
    "extract-lora": extract_lora,
    "average": average,
    "optimizer": optimizer,
    "delta": delta,
    "apply": rewritten,
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
