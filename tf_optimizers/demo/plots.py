"""What the plots of all parts look like."""

from typing import Any

# Okabe and Ito's colours, told apart with every kind of colour vision; marker
# and line style tell the lines apart in grey.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7")
MARKERS = "osD^vP"
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
STYLE: Any = {"font.size": 12, "axes.grid": True, "grid.alpha": 0.3}


def line_style(number: int, name: str) -> dict[str, Any]:
    """Return how to draw the line of the optimizer with this number."""
    return {
        "label": name,
        "color": COLOURS[number],
        "marker": MARKERS[number],
        "linestyle": LINES[number],
        "markersize": 6,
        "linewidth": 1.8,
    }
