"""Draw the curves of one or several runs into one picture.

    python train/plot.py runs/a -o log_file.png
    python train/plot.py runs/a runs/b runs/c -o log_file.svg --force

One panel each for the loss, for every score that the runs have (accuracy, or what their task measures), for
the learning rate, and for the throughput. Curves of the test set are bold, with marks; those of the
training are thin. Runs may differ in batch size and in number of ranks: all curves are over epochs.

Needs matplotlib: pip install -e '.[plots]'. Exit codes: 0 drawn, 2 wrong flags or matplotlib is missing,
3 a log is missing, empty or malformed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

# The packages of this clone, whichever other one is installed; afterwards the user's modules come first.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from ckpttool.core.files.commit import naming
from ckpttool.core.formats.output import OutputPlace
from ckpttool.core.words import counted
from ckpttool.errors import CkptToolError, UsageFault, install
from ckpttool.inspecting import run_log
from train import console
from train.config.flags import Parser
from train.launch import program

sys.path.append(sys.path.pop(0))

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which the colour-blind can tell apart (https://jfly.uni-koeln.de/color/), without
# the yellow, which is pale on white. Marks tell runs apart in print; those beyond seven have other lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
LINES = ("-", "--", ":")

INK = "#333333"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    **dict.fromkeys(("axes.labelsize", "font.size"), 9),
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "ckpttool",
}

BOLD: dict[str, Any] = {"linewidth": 2, "markersize": 6.5, "markeredgecolor": "white"}
# The mean of each epoch of the training, among the points of its steps.
HOLLOW: dict[str, Any] = {"linewidth": 1.1, "markersize": 4, "markerfacecolor": "white", "zorder": 2.5}

MIN_SPAN = 0.05  # the least part of an axis of accuracy: a tenth of a per cent shall not look like much


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    try:
        draw(sys.argv[1:] if arguments is None else arguments)
    except CkptToolError as fault:
        return program.complain(fault)
    return 0


def draw(arguments: Sequence[str]) -> None:
    """Draw what a command line asks for, and say where it is."""
    about = "Draw the curves of one or several runs into one picture."
    example = "example:\n  python train/plot.py runs/a runs/b -o log_file.png\n"
    parser = Parser("train/plot.py", "RUN... -o PICTURE [flags]", about, example)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or its log.jsonl")
    written = "the picture to write: .png, .svg or .pdf"
    parser.add_argument("-o", "--out", required=True, metavar="PICTURE", help=written)
    parser.add_argument("--force", action="store_true", help="overwrite PICTURE")
    given = parser.parse_args(arguments)
    place = picture_place(given.out, force=given.force)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageFault("train/plot.py needs matplotlib, which is not installed", hint=install("plots"))
    runs = run_log.read_runs(given.runs)
    write(picture(runs), place)
    console.say(f"drew {counted(len(runs), 'run')} -> {given.out}")


def picture_place(path: str, *, force: bool) -> OutputPlace:
    """Return where the picture goes; refuse an unknown ending, and what may not be overwritten."""
    if not path.lower().endswith(ENDINGS):
        raise UsageFault(f"-o {path}: has none of the endings {' '.join(ENDINGS)}", hint="-o log_file.png")
    place = OutputPlace(path, force)
    place.require()
    return place


def write(figure: Figure, place: OutputPlace) -> None:
    """Write a picture; the same logs give the same bytes."""
    ending = os.path.splitext(place.path)[1].lower()
    without_date = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with naming(place.path), place.file() as file, _style():
        figure.savefig(file, format=ending[1:], metadata=without_date[ending])


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Set the style of the picture, whatever the user's own settings are."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that matplotlib deprecates; of glyphs its font lacks
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


# ---- the picture ---------------------------------------------------------------------------------------


def picture(runs: Sequence[run_log.RunCurves]) -> Figure:
    """Return a figure with a panel for each quantity that any of the runs has."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    quantities = run_log.panels(runs)
    rows = -(-len(quantities) // 2)
    head = 0.3 + 0.22 * -(-len(runs) // legend_columns(runs))
    height = 3.0 * rows + head
    with _style():
        layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - head / height), h_pad=0.12, w_pad=0.12)
        figure = Figure(figsize=(10, height), dpi=150, layout=layout)
        axes = figure.subplots(rows, 2, squeeze=False).flatten()
        for panel, quantity in zip(axes, quantities, strict=False):
            _draw_panel(panel, quantity, runs)
        for unused in axes[len(quantities) :]:
            unused.set_visible(False)
        _draw_legend(figure, runs, height)
    return figure


def look_of(number: int) -> dict[str, Any]:
    """Return the colour, mark and line of a run."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
    }


def _draw_panel(axes: Axes, quantity: str, runs: Sequence[run_log.RunCurves]) -> None:
    for number, run in enumerate(runs):
        tested, trained = run.test.get(quantity, []), run.train.get(quantity, [])
        by_epoch, look = run.epochs.get(quantity, []), look_of(number)
        if trained:
            # A few points show by marks; many would cover the line.
            thin = look | {"marker": "." if len(trained) < 4 else ""}
            weight = {"linewidth": 1.1, "alpha": 0.55} if tested else {"linewidth": 1.6}
            axes.plot(*zip(*trained, strict=True), zorder=2, **(thin | weight))
        if tested:
            every = max(1, len(tested) // 12)
            marked = {"markevery": ((len(tested) - 1) % every, every), "markeredgewidth": 0.8, "zorder": 3}
            axes.plot(*zip(*tested, strict=True), **(look | BOLD | marked))
        if by_epoch:
            axes.plot(*zip(*by_epoch, strict=True), **(look | HOLLOW))
    axes.set_title(run_log.title(quantity), parse_math=False)
    _set_scales(axes, quantity, runs)
    if any(quantity in run.test for run in runs) and any(quantity in run.train for run in runs):
        _draw_key(axes, by_epoch=any(quantity in run.epochs for run in runs))


def _set_scales(axes: Axes, quantity: str, runs: Sequence[run_log.RunCurves]) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

    longest = max((at for run in runs for c in (run.train, run.test) for p in c.values() for at, _ in p))
    axes.set_xlabel("epochs")
    axes.set_xlim(0, longest * 1.03 or 1)  # the same in all panels
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=longest > 4))
    points = [p for run in runs for p in (*run.train.get(quantity, ()), *run.test.get(quantity, ()))]
    values = [value for _, value in points if value == value] or [1.0]
    low, high = min(values), max(values)
    if quantity == "accuracy" or quantity.endswith("_accuracy"):
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        if high - low < MIN_SPAN:
            middle = min(max((low + high) / 2, MIN_SPAN / 2), 1 - MIN_SPAN / 2)
            axes.set_ylim(middle - 0.55 * MIN_SPAN, middle + 0.55 * MIN_SPAN)
    elif quantity in ("lr", "samples_per_second"):
        axes.set_ylim(0, high * 1.1 or 1)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}" if quantity == "lr" else "{x:,g}"))
    elif low > 0 and high > 50 * low:  # several magnitudes
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _draw_key(axes: Axes, *, by_epoch: bool) -> None:
    """Say in a panel which lines are of the training and which of the test set."""
    from matplotlib.lines import Line2D

    trained = Line2D([], [], color="#777777", linewidth=1.1, alpha=0.7)
    tested = Line2D([], [], color="#777777", linewidth=2, marker="o", markersize=5, markeredgecolor="white")
    lines, names = [trained, tested], ["training", "test"]
    if by_epoch:
        lines.insert(1, Line2D([], [], color="#777777", marker="o", **HOLLOW))
        names.insert(1, "training, by epoch")
    axes.legend(lines, names, loc="best", handlelength=2.2)


def legend_columns(runs: Sequence[run_log.RunCurves]) -> int:
    """Return how many names of runs stand in one row above the panels."""
    longest = max(len(run.name) for run in runs)
    return max(1, min(len(runs), 4, 110 // (longest + 6)))


def _draw_legend(figure: Figure, runs: Sequence[run_log.RunCurves], height: float) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **look_of(number), **BOLD) for number in range(len(runs))]
    place: dict[str, Any] = {"bbox_to_anchor": (0.01, 1 - 0.08 / height), "ncols": legend_columns(runs)}
    place |= {"fontsize": 10, "handlelength": 2.2, "columnspacing": 2.4}
    legend = figure.legend(lines, ["run"] * len(runs), loc="upper left", **place)
    for text, run in zip(legend.get_texts(), runs, strict=True):
        text.set_parse_math(False)  # a name may have dollar signs, or begin with _
        text.set_text(run.name)


if __name__ == "__main__":
    sys.exit(main())
