"""Plot of the gradient compression study."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from tf_optimizers.demo.plots import STYLE, add_legend, draw_runs

FILE = "gradient_compression.png"


def draw(result: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write the plot; return its caption -> its file name."""
    panels = {"loss": "training loss (nats, log scale)"}
    caption = "Training loss by epoch"
    if is_counted(result):
        panels["bytes_per_step"] = "bytes per step and worker (log scale)"
        caption += ", and what a worker sent"
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(3 + 4 * len(panels), 4.8), layout="constrained"
        )
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (key, label) in zip(axes, panels.items(), strict=True):
            _draw_epochs(axis, key, result)
            axis.set_ylabel(label)
        add_legend(figure, columns=4)
        figure.savefig(folder / FILE, dpi=120)
    caption += (
        ": mean (line), lowest and highest seed (band); in the grey areas the "
        "sparsity rises and falls"
    )
    return {caption: FILE}


def is_counted(result: dict[str, Any]) -> bool:
    """Return whether the kernel has counted the bytes of all optimizers."""
    return all(row["bytes_per_step"] for row in _rows(result))


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for pair in result["pairs"] for row in pair["optimizers"]]


def _draw_epochs(axis: Axes, key: str, result: dict[str, Any]) -> None:
    every = [run for pair in result["pairs"] for run in pair["runs"]]
    for number, row in enumerate(_rows(result)):
        name = row["optimizer"]
        runs = np.array([r[key] for r in every if r["optimizer"] == name])
        epochs = np.arange(1, runs.shape[1] + 1)
        draw_runs(axis, epochs, runs, number, name)
    settings = result["settings"]
    first, end = settings["steady_epochs"]
    last = settings["epochs"]
    axis.set_xlim(0.5, last + 0.5)
    for before, after in ((0, first), (end, last)):
        axis.axvspan(
            before + 0.5, after + 0.5, color="grey", alpha=0.15, linewidth=0
        )
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
