"""What the commands print that look, check or load: the fields of a result, and those that a command adds."""

from __future__ import annotations

from typing import Any, Literal

from .schemas import KEYS, NAMES, Fields, fields_like


def inspect() -> list[Fields]:
    from ...analysis.summary import Summary
    from ...analysis.tables import CheckpointRow, Stats, TensorRow

    renamed = {"nbytes": "bytes", "unused": "unused_bytes", "running": "could_run"}
    own = ("likes", "modules", "here", "outside", "other")
    tensor = {
        **fields_like(TensorRow, {}, maybe=("kind", "local_shape")),
        "stats?": (Stats | None, "with --stats"),
    }
    other: Fields = {
        "name": (str, "its dotted path"),
        "type": (str, "its type"),
        "value?": (object, "the value, when it is plain and short"),
        "size?": (int, "the number of entries of a container"),
        "same_as?": (str, "the first name of a container in several places, where its entries are"),
    }
    file: Fields = {
        **fields_like(Summary, renamed, without=own, maybe=("ranks", "commit", "made_of")),
        "dtypes": (dict[str, int], "dtype -> how many tensors of the state have it"),
        "devices": (dict[str, int], "device -> how many tensors of the state are tagged with it"),
        "state_bytes": (int, "bytes of the state's tensors, ties counted once"),
        "tensors": ([tensor], "every tensor of the file"),
        "other": ([other], "everything that is not a tensor"),
    }
    checkpoint: Fields = {
        **fields_like(CheckpointRow, {"nbytes": "bytes"}, without=("problem",)),
        "whole": (bool, "whether it can be read"),
        "problem": (str | None, "why it can't"),
    }
    run: Fields = {
        "path": (str, "the folder of a run"),
        "checkpoints": ([checkpoint], "those in it, the newest first"),
    }
    return [file, run]


def report() -> Fields:
    from ...reporting.report import Reported

    return {**fields_like(Reported), "dry_run?": (Literal[True], "nothing was written")}


def digest() -> Fields:
    return {
        "digest": (str, "SHA-256 of names, types, shapes and values; docs/digest.md"),
        "state": (str, "dotted path of the state that was hashed"),
        "keys": (int, "how many tensors it has"),
        "path": (str, "the file as it was named"),
    }


def verify() -> Fields:
    from ...analysis.verify import Verified

    return {
        "path": (str, "the file as it was named"),
        "ok": (bool, "whether there is no problem"),
        **fields_like(Verified, {"free": "unvouched"}),
    }


def diff() -> Fields:
    from ...analysis.comparison import Change, Comparison
    from ...analysis.distances import Distance

    distance = fields_like(Distance, {}, without=("where", "a", "b", "tolerated"))
    changed: Fields = {
        **fields_like(Change, {}, without=("distance", "index", "norms")),
        **{f"{name}?": said for name, said in distance.items()},
        "index?": (tuple[int, ...] | None, "the place of the largest difference, along each axis"),
        "norm_a?": (float, "the 2-norm of the tensor in A"),
        "norm_b?": (float, "the 2-norm of the tensor in B"),
        "norm_difference?": (float, "the 2-norm of their difference"),
        "relative?": (float | None, "that, divided by the norm in B"),
        "cosine?": (float | None, "of the angle between them"),
    }
    apart = ("changed", "aside_a", "aside_b", "matched_without_prefix", "same_files")
    return {
        "same": (bool, "whether nothing differs, or only by less than the tolerance"),
        "identical": (bool, "whether nothing differs at all"),
        **fields_like(Comparison, {}, without=apart),
        "changed": ([changed], "what both files have, with other contents"),
        "not_compared": (NAMES, "names that one of the formats can't hold"),
        "rtol": (float | None, "as given"),
        "atol": (float | None, "as given"),
    }


def scan() -> Fields:
    from ...scanning.verdicts import Scanned

    file: Fields = {
        **fields_like(Scanned, {}),
        "verdict": (Literal["safe", "unknown", "dangerous", "unreadable"], "what unpickling it could do"),
        "names": (NAMES, "the names that could run something, the worst first"),
    }
    return {"files": ([file], "every file that was looked at")}


def prove() -> Fields:
    from ...proving.proof import Proved

    checkpoint: Fields = {"file": (str, "its name"), "step": (int, "of the training")}
    return {
        "path": (str, "the folder of the run"),
        "ok": (bool, "whether everything holds"),
        **fields_like(Proved, {"findings": "problems"}),
        "checkpoints": ([checkpoint], "the files that were compared with the chain"),
        "seconds": (float, "how long it took"),
    }


def gather_metrics() -> Fields:
    score: Fields = {
        "class": (str, "its name"),
        "correct": (int, "samples of this class that were predicted as such"),
        "samples": (int, "samples of this class"),
        "predicted": (int, "samples of any class that were predicted as this one"),
        "precision": (float | None, "correct / predicted; null if it was never predicted"),
        "recall": (float | None, "correct / samples; null if it has no samples"),
        "f1": (float | None, "the harmonic mean of both"),
    }
    return {
        "correct": (int, "samples that were predicted right"),
        "samples": (int, "samples in all, each once"),
        "accuracy": (float, "correct / samples"),
        "loss": (float | None, "the mean over samples; null where it is no finite number"),
        "per_class": ([score], "by label"),
        "ranks": (int, "how many files there were"),
        "rank_samples": (tuple[int, ...], "how many samples each rank scored"),
        "every_sample_once": (Literal[True], "else there is an error"),
        "index_digest": (str, "SHA-256 of the set of samples"),
        "digest": (str | None, "that of the model's state, as digest prints it"),
        "data": (str | None, "the data set"),
        "device": (str | None, "the type of the device"),
        "threads": (int | None, "of each rank"),
        "batch_size": (int | None, "of each rank"),
    }


def doctor() -> Fields:
    from ...models.diagnosis.report import Diagnosis

    problem: Fields = {
        "kind": (str, "a stable word for scripts"),
        "message": (str, "what is wrong"),
        "remark": (bool, "the state loads strictly all the same"),
        "command?": (str, "the command that fixes it, after those of the problems before it"),
    }
    return {
        **fields_like(Diagnosis, {}, without=("fit",)),
        "problems": ([problem], "in the order in which to fix them"),
        **KEYS,
    }


def reload() -> Fields:
    from ...models.reloading import Reloaded

    part: Fields = {"loaded": (int, "from the file"), "of": (int, "in the model")}
    renamed = {"kept": "missing", "ignored": "unexpected"}
    return {
        **fields_like(Reloaded, renamed, without=("path", "format", "covered")),
        "loaded": (int, "how many tensors of the model got values"),
        "mismatched": (KEYS["mismatched"][0], "always empty: what does not fit is an error"),
        "parameters": (part, "elements of the parameters that got values"),
        "bytes": (part, "bytes of the parameters and buffers that got values"),
        "seconds": (float, "how long it took"),
        "output_shape?": (list[int] | str, "of the output for --input-shape; its type, if it is no tensor"),
    }


def maps() -> list[Any]:
    listed: Fields = {
        "name": (str, "as --map takes it"),
        "from": (str, "the architecture that it starts at"),
        "to": (str, "the one that it leads to"),
        "reversible": (bool, "whether --inverse is possible"),
    }
    return [[listed], {"name": (str, "as --map takes it"), "rules": (str, "the rule file's text")}]


def schema() -> Fields:
    parts: Fields = dict.fromkeys(("if", "then", "else", "$defs"), (object, ""))
    return {
        "$schema": (str, "the dialect of JSON Schema"),
        "title": (str, "the command"),
        "description": (str, "what it does"),
        **parts,
    }


def skill() -> Fields:
    return {"name": (str, "the skill's"), "text": (str, "the page, as Markdown with its front matter")}
