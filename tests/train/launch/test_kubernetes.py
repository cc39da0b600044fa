"""The manifests of docs/several-machines.md have no field that the operators' own models of their API lack.

pip install kubeflow-training kubeflow-trainer-api
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks.programs import ROOT

yaml = pytest.importorskip("yaml")


def manifest(kind: str) -> dict[str, Any]:
    """Return the one manifest of a kind on the page."""
    page = (ROOT / "docs" / "several-machines.md").read_text()
    (found,) = [
        read
        for block in re.findall(r"```yaml\n(.*?)```", page, re.S)
        if (read := yaml.safe_load(block))["kind"] == kind
    ]
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
    operator = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )

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
