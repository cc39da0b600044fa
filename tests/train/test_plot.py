"""train/plot.py: what is drawn of which log, how runs are named, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.formats.output import OutputPlace
from ckpttool.errors import install
from ckpttool.inspecting import run_log
from tests.ranks.programs import start, without
from train import plot

matplotlib = pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


def epoch(number: int, **more: Any) -> dict[str, Any]:
    usual = {"epoch": number, "loss": 2.0 / number, "train_loss": 1.5 / number, "lr": 0.1, "samples": 10}
    return {**usual, "seconds": 2.0, "train_samples": 100, **more}


def step(number: int, **more: Any) -> dict[str, Any]:
    usual = {"step": number, "epochs": number / 4, "loss": 3.0 / number, "lr": 0.2, "grad_norm": 1.0}
    return {**usual, "samples_per_second": 50.0 + number, **more}


def classes(epochs: int = 3) -> list[dict[str, Any]]:
    entries = []
    for e in range(1, epochs + 1):
        scored = epoch(e, accuracy=1 - 0.5 / e, train_accuracy=1 - 0.4 / e)
        entries += [step(4 * e - 2), step(4 * e), scored]
    return entries


def regression() -> list[dict[str, Any]]:
    scores = {"mae": 0.5, "r2": 0.1, "each": [1.0, 2.0]}
    return [step(2), step(4), epoch(1, metrics=scores), step(6), epoch(2, metrics={**scores, "mae": None})]


def write(folder: Path, entries: list[dict[str, Any]]) -> str:
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(folder)


def drawn(*paths: str) -> dict[str, Any]:
    """Return each panel of the picture by its title."""
    figure = plot.picture(run_log.read_runs(paths))
    figure.canvas.draw()  # a picture that can't be laid out fails here
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}


def lines(axes: Any) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.get_lines()]


CLASSES = ["Loss", "Accuracy", "Learning rate", "Throughput, samples per second"]


def test_training_and_test_curves_are_over_epochs(tmp_path):
    panels = drawn(write(tmp_path / "a", classes(2)))
    assert list(panels) == CLASSES
    trained, tested, by_epoch = lines(panels["Loss"])
    assert by_epoch == [(1, 1.5), (2, 0.75)]
    assert trained == [(s / 4, 3.0 / s) for s in (2, 4, 6, 8)]
    assert tested == [(1, 2.0), (2, 1.0)]
    assert lines(panels["Accuracy"])[1] == [(1, 0.5), (2, 0.75)]
    assert lines(panels["Throughput, samples per second"]) == [[(s / 4, 50.0 + s) for s in (2, 4, 6, 8)]]


def test_the_few_steps_at_the_end_of_a_training_are_no_outlier(tmp_path):
    entries = [step(4, steps=4), step(8, steps=4), step(10, steps=2), step(11, steps=1, loss=9.0)]
    panels = drawn(write(tmp_path / "a", entries))
    assert lines(panels["Loss"]) == [[(1.0, 0.75), (2.0, 0.375), (2.5, 0.3)]]
    assert len(lines(panels["Learning rate"])[0]) == 4


def test_a_log_without_steps_is_drawn_from_its_epochs(tmp_path):
    panels = drawn(write(tmp_path / "a", [epoch(1, accuracy=0.5), epoch(2, accuracy=0.6)]))
    assert list(panels) == CLASSES
    assert lines(panels["Loss"])[0] == [(1, 1.5), (2, 0.75)]
    assert lines(panels["Throughput, samples per second"]) == [[(1, 50.0), (2, 50.0)]]


def test_another_task_shows_its_own_scores_and_no_accuracy(tmp_path):
    panels = drawn(write(tmp_path / "a", regression()))
    assert list(panels) == ["Loss", "Mean absolute error", "R²", *CLASSES[2:]]
    (points,) = lines(panels["Mean absolute error"])
    assert points[0] == (1, 0.5) and points[1][1] != points[1][1]  # null is a gap


def test_runs_of_different_tasks_share_a_picture(tmp_path):
    panels = drawn(write(tmp_path / "a", classes()), write(tmp_path / "b", regression()))
    assert list(panels) == ["Loss", "Accuracy", "Mean absolute error", "R²", *CLASSES[2:]]
    assert [len(lines(panels[name])) for name in ("Loss", "Accuracy", "R²")] == [6, 2, 1]


def test_an_evaluation_within_an_epoch_is_a_point_of_the_test_set(tmp_path):
    evaluated = {"step": 2, "epochs": 0.5, "test_loss": 1.75, "test_accuracy": 0.25}
    evaluated["test_metrics"] = {"mae": 4}
    panels = drawn(write(tmp_path / "a", [step(2), evaluated, step(4), epoch(1, accuracy=0.5)]))
    assert lines(panels["Loss"])[1] == [(0.5, 1.75), (1, 2.0)]
    assert lines(panels["Accuracy"])[0] == [(0.5, 0.25), (1, 0.5)]
    assert lines(panels["Mean absolute error"]) == [[(0.5, 4)]]


@pytest.mark.parametrize(
    "entries",
    [[step(1)], [epoch(1)], [epoch(1, loss=None, train_loss=None)], [step(1, loss=0.0, lr=0.0)], classes(1)],
    ids=["one step", "one epoch", "NaN", "zero", "short"],
)
def test_a_run_of_one_point_can_be_drawn(tmp_path, entries):
    assert "Loss" in drawn(write(tmp_path / "a", entries))


@pytest.mark.covered(lambda odd, where: where in ("accuracy", "epochs"))
@pytest.mark.parametrize(
    "odd",
    [(10**400, -(10**400)), (1e308, -1e308), (1e149, -1e149), (5e-324, 1e140), (True, [1])],
    ids=["400 digits", "1e308", "1e149", "smallest", "no numbers"],
)
@pytest.mark.parametrize("where", ["loss", "train_loss", "seconds", "accuracy", "epoch", "epochs"])
def test_odd_numbers_can_be_drawn(tmp_path, odd, where):
    entries = [step(1), *classes(3)]
    for entry, number in zip((entry for entry in entries if where in entry), odd, strict=False):
        entry[where] = number
    assert "Loss" in drawn(write(tmp_path / "a", entries))


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "log.jsonl")
    for path in (tmp_path, tmp_path / "log.jsonl", Path("/dev/zero")):
        assert run(path, "-o", tmp_path / "a.png") == 3
        error = capsys.readouterr().err
        assert "is not a regular file" in error and error.count("\n") == 1


def test_an_accuracy_that_hardly_changes_does_not_look_like_much(tmp_path):
    panels = drawn(write(tmp_path / "a", [epoch(1, accuracy=0.99), epoch(2, accuracy=0.991)]))
    low, high = panels["Accuracy"].get_ylim()
    assert high - low >= 0.05 and low < 0.99 and 0.991 < high < 1.01


def test_losses_of_several_magnitudes_have_a_logarithmic_axis(tmp_path):
    entries = [step(s, loss=10.0**-s) for s in range(1, 5)]
    assert drawn(write(tmp_path / "a", entries))["Loss"].get_yscale() == "log"
    assert drawn(write(tmp_path / "b", [*entries, step(5, loss=0.0)]))["Loss"].get_yscale() == "linear"


def test_many_runs_differ_in_colour_mark_or_line():
    looks = [tuple(plot.look_of(number).values()) for number in range(20)]
    assert len({(colour, line) for colour, _, line in looks}) == len(looks)
    assert len({colour for colour, _, _ in looks[:7]}) == len({mark for _, mark, _ in looks[:7]}) == 7


def test_colours_are_told_apart_by_the_colour_blind():
    """Simulate red and green blindness (Viénot, Brettel and Mollon 1999) and compare in CIE Lab."""
    import numpy as np

    def lab(rgb: Any) -> Any:
        xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
        f = np.cbrt(xyz / np.array([0.9505, 1.0, 1.089]))
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    protan = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
    deutan = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    colours = [np.array([int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)]) ** 2.2 for c in plot.COLOURS]
    for view in (np.eye(3), protan, deutan):
        seen = [lab(np.clip(view @ colour, 0, 1)) for colour in colours]
        apart = [float(np.linalg.norm(a - b)) for i, a in enumerate(seen) for b in seen[:i]]
        assert min(apart) > 12, f"{min(apart):.1f}"


# ---- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("paths", "names"), [
    (["runs/a", "runs/b/"], ["a", "b"]),
    (["runs/a/log.jsonl"], ["a"]),
    (["one/a", "two/a", "b"], ["one/a", "two/a", "b"]),
    (["runs/a", "runs/a"], ["a (1)", "a (2)"]),
    (["x/a", "x/a/a"], ["x/a", "a/a"]),
    (["other.jsonl"], ["other.jsonl"]),
    (["n" * 30 + "o" * 40], ["n" * 21 + "…" + "o" * 22]),
])  # fmt: skip
def test_a_run_is_named_by_the_end_of_its_path_that_tells_it_apart(paths, names):
    assert run_log.names_of(paths) == names


def test_any_name_can_be_shown(tmp_path):
    names = ["_hidden", "$x^2$ $", "%s {0}", "名前", "a\\b"]
    figure = plot.picture(run_log.read_runs([write(tmp_path / name, classes()) for name in names]))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    plot.write(figure, OutputPlace(str(tmp_path / "a.png")))


# ---- the program ---------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    return plot.main([str(argument) for argument in arguments])


@pytest.mark.covered(lambda ending: ending != "png")
@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "PNG"])
def test_the_picture_is_written_and_named_and_the_same_logs_give_the_same_bytes(tmp_path, ending, capsys):
    first, again = (tmp_path / f"{name}.{ending}" for name in ("first", "again"))
    logs = write(tmp_path / "a", classes()), write(tmp_path / "b", classes(2))
    for picture in (first, again):
        assert run(*logs, "-o", picture) == 0
        assert capsys.readouterr().out == f"drew 2 runs -> {picture}\n"
    assert first.read_bytes() == again.read_bytes()
    if ending.lower() == "png":
        with Image.open(first) as image:
            assert image.size[0] == 1500 and 900 < image.size[1] < 1100
    else:
        assert first.read_bytes()[:5] == {"svg": b"<?xml", "pdf": b"%PDF-"}[ending]


def test_a_picture_is_overwritten_only_with_force(tmp_path, capsys):
    log, picture = write(tmp_path / "a", classes()), tmp_path / "a.png"
    picture.write_text("mine")
    assert run(log, "-o", picture) == 2
    assert capsys.readouterr().err == f"error: {picture}: already exists (write it anyway with --force)\n"
    assert picture.read_text() == "mine"
    assert run(log, "-o", picture, "--force") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("text", "said"), [
    (None, "no such file"),
    ("", "holds no entries yet"),
    ("epoch 1: loss 2\n", "line 1 is not a JSON object"),
    ("9" * 5000 + "\n", "line 1 is not a JSON object"),
    ('{"correct": 3}\n', "holds no entry with a loss or a score"),
    ('{"epoch": 1}\n{"epoch": "two", "loss": 1}\n', "holds no entry with a loss or a score"),
])  # fmt: skip
def test_a_log_without_curves_is_one_line_and_exit_code_3(tmp_path, text, said, capsys):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    assert run(tmp_path, "-o", tmp_path / "a.png") == 3
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and str(tmp_path) in error
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(("arguments", "said"), [
    (["-o", "a.jpg", "run"], "a.jpg: has none of the endings"),
    (["run"], "required: -o"),
    (["-o", "a.png"], "required: RUN"),
    (["run", "-o", "no/such/folder/a.png"], "no/such/folder"),
])  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_exit_code_2(here, arguments, said, capsys):
    write(here / "run", classes())
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(write(tmp_path / "a", classes()), "-o", "x.png") == 2
    hint = install("plots")
    said = f"error: train/plot.py needs matplotlib, which is not installed ({hint})\n"
    assert capsys.readouterr().err == said


def test_it_runs_as_a_program_without_torch_and_without_a_display(tmp_path):
    log, picture = write(tmp_path / "a", classes()), tmp_path / "a.png"
    done = start([*without("torch", "plot.py"), log, "-o", str(picture)], MPLBACKEND="TkAgg")
    assert (done.returncode, done.stderr) == (0, "")
    assert picture.exists()
