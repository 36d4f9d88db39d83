"""The parts that plots have in common: panels, bars, and their file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import results
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tf_optimizers.demo.plots import COLORS, add_legend

FOLDER = results.FOLDER.parents[1] / "docs" / "benchmarks"


def panels(count: int, **kwargs: Any) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of panels; four panels or more are in two columns.

    A figure of one column is readable on the screen of a phone.
    """
    columns = 1 if count < 4 else 2
    rows = -(-count // columns)
    figure = Figure(
        figsize=(1 + 4.2 * columns, 1.2 + 3 * rows), layout="constrained"
    )
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs).ravel()
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def finish(figure: Figure, name: str) -> None:
    """Add one legend for all panels, if lines have names; write the file."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        add_legend(figure)
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.png", dpi=100)


def plain_log(axis: Axes, numbers: str = "{x:,.0f}") -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(numbers)
    axis.yaxis.set_minor_formatter(NullFormatter())


def bars(name: str, label: str, rows: dict[str, dict[str, float]]) -> None:
    """Draw a group of bars per row, one bar per contender, with its number."""
    contenders = list(next(iter(rows.values())))
    figure, (axis,) = panels(1)
    figure.set_size_inches(5.2, 2 + 0.33 * len(contenders) * len(rows))
    height = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        drawn = axis.barh(
            np.arange(len(rows)) + height * number,
            [row[contender] for row in rows.values()],
            height,
            color=COLORS[number],
            label=contender,
        )
        axis.bar_label(drawn, fmt="{:.2f}", padding=3)
    axis.set_yticks(np.arange(len(rows)) + 0.4 - height / 2, list(rows))
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_axisbelow(True)
    axis.set_xlabel(label)
    finish(figure, name)
