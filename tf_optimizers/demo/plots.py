"""The style that the plots of all parts share."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colors, which most color-blind readers can distinguish. In
# gray, markers and line styles distinguish the lines.
COLORS = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7"),
    "#0072B2",
)
MARKERS = "osD^vPX"
LINES = (
    *("-", "--", "-.", ":"),
    *((0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3))),
)
INCHES_OF_A_NAME = 3  # The width of one name in a legend.
STYLE: Any = {"font.size": 12, "axes.grid": True, "grid.alpha": 0.3}


def line_style(number: int, name: str) -> dict[str, Any]:
    """Return the line style of the optimizer with this number."""
    return {
        "label": name,
        "color": COLORS[number],
        "marker": MARKERS[number],
        "linestyle": LINES[number],
        "markersize": 6,
        "linewidth": 1.8,
    }


def draw_runs(
    axis: Axes, x: np.ndarray, runs: np.ndarray, number: int, name: str
) -> None:
    """Draw runs [runs, points]: their mean as a line, their range as a band."""
    style = line_style(number, name)
    style["markevery"] = max(1, len(x) // 8)
    axis.plot(x, runs.mean(axis=0), **style)
    low, high = runs.min(axis=0), runs.max(axis=0)
    axis.fill_between(
        x, low, high, color=style["color"], alpha=0.2, linewidth=0
    )


def add_legend(figure: Figure) -> None:
    """Add one legend for all panels, below them."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = min(5, int(figure.get_figwidth() // INCHES_OF_A_NAME))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
