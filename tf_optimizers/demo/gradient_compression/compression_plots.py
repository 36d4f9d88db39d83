"""The plot of the gradient compression study."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    NullFormatter,
    PercentFormatter,
)

from tf_optimizers.demo.gradient_compression.clock import clock
from tf_optimizers.demo.plots import STYLE, draw_runs

FILE = "gradient_compression.png"
LOWEST = 0.75  # The lowest accuracy that is shown.


def draw(result: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write the plot; return {caption: file name}."""
    link = result["settings"]["link"]
    where = "without a link" if link == "none" else f"over {link}"
    with matplotlib.rc_context(STYLE):
        groups = len(result["groups"])
        # The panels are in one column, so that a phone shows readable labels.
        figure = Figure(figsize=(5.4, 2.8 * groups), layout="constrained")
        axes = figure.subplots(
            groups, 1, sharex=True, sharey=True, squeeze=False
        ).ravel()
        number = 0
        for axis, group in zip(axes, result["groups"], strict=True):
            _draw_group(axis, group["optimizers"], number)
            number += len(group["optimizers"])
        axes[-1].set_xlabel("seconds of training (log scale)")
        figure.savefig(folder / FILE, dpi=100)
    caption = (
        f"Test accuracy by seconds of training {where}: mean (line), lowest "
        "and highest seed (band); the lowest accuracies lie below the axis"
    )
    return {caption: FILE}


def _draw_group(axis: Axes, rows: list[dict[str, Any]], first: int) -> None:
    for number, row in enumerate(rows, first):
        runs = np.array(row["accuracy"])
        draw_runs(axis, clock(row), runs, number, row["optimizer"])
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(PercentFormatter(1, 0, symbol=None))
    axis.set_ylabel("test accuracy (%)")
    axis.set_ylim(LOWEST, 1)
    axis.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=len(rows),
        fontsize="small",
        columnspacing=1,
        frameon=False,
    )
