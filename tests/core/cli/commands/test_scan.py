"""`ckpttool scan`: what it prints, its exit codes, JSON and SARIF."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.support.scan_corpus import PAYLOAD

LOGS = b"\x80\x02clogging\nFileHandler\nX\x01\x00\x00\x00x\x85R."
LFS = b"version https://git-lfs.github.com/spec/v1\n"


@pytest.fixture
def files(here: Path) -> Path:
    (here / "models").mkdir()
    contents = {"bad.pkl": PAYLOAD, "own.pkl": LOGS, "fine.pkl": pickle.dumps([1]), "pointer.pt": LFS}
    for called, data in contents.items():
        (here / "models" / called).write_bytes(data)
    return here


@pytest.mark.usefixtures("files")
def test_each_file_that_is_not_safe_is_a_line_and_the_last_line_counts_all(cli: Any) -> None:
    ran = cli("scan models")
    assert ran.out.splitlines() == [
        "models/bad.pkl: dangerous: os.mkdir",
        "models/own.pkl: unknown: logging.FileHandler",
        "scanned 4 files: 1 dangerous, 1 unknown, 1 unreadable, 1 safe",
    ]
    assert ran.err.startswith("unreadable: models/pointer.pt: is a Git LFS pointer")
    assert "models/fine.pkl: safe\n" in cli("scan models -v").out


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("models", 1),
        ("models/bad.pkl", 1),
        ("models/own.pkl", 1),
        ("models/pointer.pt", 3),
        ("models/own.pkl models/pointer.pt", 1),
        ("models/fine.pkl", 0),
        ("missing.pt", 3),
        ("models/fine.pkl missing.pt", 3),
    ],
)
def test_something_that_could_run_is_exit_1_and_then_something_unreadable_is_3(
    typed: str, code: int, cli: Any
) -> None:
    for more in ("", " --json", " --sarif", " -q"):
        assert cli(f"scan {typed}{more}").code == code


@pytest.mark.usefixtures("files")
def test_json_holds_a_verdict_for_each_file(cli: Any) -> None:
    ran = cli("scan models --json")
    assert ran.err == ""
    by_name = {os.path.basename(each["path"]): each for each in ran.json["files"]}
    verdicts = {name: each["verdict"] for name, each in by_name.items()}
    expected = {"bad.pkl": "dangerous", "own.pkl": "unknown", "fine.pkl": "safe", "pointer.pt": "unreadable"}
    assert verdicts == expected
    assert by_name["bad.pkl"]["names"] == ["os.mkdir"]
    assert by_name["bad.pkl"]["found"] == [{"name": "os.mkdir", "where": "", "dangerous": True}]
    assert by_name["pointer.pt"]["problems"][0]["reason"].startswith("is a Git LFS pointer")


@pytest.mark.usefixtures("files")
def test_quiet_leaves_what_could_not_be_looked_at(cli: Any) -> None:
    ran = cli("scan models -q")
    assert ran.out == "" and len(ran.err.splitlines()) == 1


@pytest.mark.usefixtures("files")
def test_names_of_a_file_cannot_steer_the_terminal(cli: Any) -> None:
    Path("x\x1b[2J.pkl").write_bytes(b"\x80\x04\x8c\x02os\x8c\x05\x1b[31m\x93.")
    ran = cli("scan .")
    assert "\x1b" not in ran.out + ran.err


@pytest.mark.usefixtures("files")
def test_allowed_names_are_harmless_but_what_attacks_use_has_to_be_named(cli: Any) -> None:
    assert cli("scan models/own.pkl --allow logging.*").code == 0
    assert cli("scan models/own.pkl --allow Logging.* --allow json.*").code == 1
    assert cli("scan models/bad.pkl --allow * --allow os.*").code == 1
    assert cli("scan models/bad.pkl --allow os.mkdir").code == 0
    assert "dangerous" in cli("scan models --allow *").out


# SARIF.


@pytest.mark.usefixtures("files")
def test_sarif_has_a_result_for_each_name_and_each_problem(cli: Any) -> None:
    log = json.loads(cli("scan models --sarif").out)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    results = {
        each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]: each for each in run["results"]
    }
    assert {uri: each["ruleId"] for uri, each in results.items()} == {
        "models/bad.pkl": "pickle/dangerous",
        "models/own.pkl": "pickle/unknown",
        "models/pointer.pt": "pickle/unreadable",
    }
    assert all(rules[each["ruleIndex"]] == each["ruleId"] for each in run["results"])
    assert results["models/bad.pkl"]["level"] == "error"
    assert results["models/bad.pkl"]["locations"][0]["physicalLocation"]["region"]["startLine"] == 1


@pytest.mark.usefixtures("files")
def test_sarif_of_safe_files_has_no_results(cli: Any) -> None:
    assert json.loads(cli("scan models/fine.pkl --sarif").out)["runs"][0]["results"] == []


def test_sarif_names_files_as_references_from_the_current_folder(here: Path, cli: Any) -> None:
    Path("a b#%.pkl").write_bytes(PAYLOAD)
    for typed in ("'./a b#%.pkl'", f"'{here}/a b#%.pkl'"):
        (result,) = json.loads(cli(f"scan {typed} --sarif").out)["runs"][0]["results"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b%23%25.pkl"


@pytest.mark.usefixtures("files")
def test_fingerprints_stay_the_same_and_tell_results_apart(cli: Any) -> None:
    def prints() -> list[str]:
        results = json.loads(cli("scan models --sarif").out)["runs"][0]["results"]
        return [each["partialFingerprints"]["placeAndName/v1"] for each in results]

    assert prints() == prints() and len({*prints()}) == 3
