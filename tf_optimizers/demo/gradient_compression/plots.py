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
        add_legend(figure)
        figure.savefig(folder / FILE, dpi=120)
    caption += (
        ": mean (line), lowest and highest seed (band); the grey area is the "
        "warm-up of the sparsity"
    )
    return {caption: FILE}


def is_counted(result: dict[str, Any]) -> bool:
    """Return whether the kernel has counted the bytes of all optimizers."""
    return all(row["bytes_per_step"] for row in result["optimizers"])


def _draw_epochs(axis: Axes, key: str, result: dict[str, Any]) -> None:
    for number, row in enumerate(result["optimizers"]):
        name = row["optimizer"]
        runs = np.array(
            [run[key] for run in result["runs"] if run["optimizer"] == name]
        )
        epochs = np.arange(1, runs.shape[1] + 1)
        draw_runs(axis, epochs, runs, number, name)
    warmup = result["settings"]["warmup_epochs"]
    axis.axvspan(0.5, warmup + 0.5, color="grey", alpha=0.15, linewidth=0)
    axis.set_xlim(left=0.5)
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
