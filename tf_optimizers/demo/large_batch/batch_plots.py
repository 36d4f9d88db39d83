"""The plots of the large-batch study."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter

from tf_optimizers.demo.plots import STYLE, add_legend, draw_runs, line_style


def draw(result: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write the plots; return {caption: file name}, in reading order."""
    cells = result["cells"]
    steps = max(cell["steps"] for cell in cells if _has_curves(cell))
    images = max(cell["batch_size"] for cell in cells)
    plots: dict[str, tuple[str, Callable[..., None]]] = {
        f"Training loss and test accuracy over {steps} steps at batch "
        f"{images:,}: mean (line), lowest and highest seed (band); "
        "the lowest accuracies lie below the axis": (
            "large_batch_steps.png",
            _draw_curves,
        ),
        f"The learning rate grid at batch {images:,}: mean validation "
        "accuracy over the tuning seeds": (
            "large_batch_rates.png",
            _draw_rates,
        ),
    }
    for name, fill in plots.values():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(11, 4.8), layout="constrained")
            fill(figure.subplots(1, 2), result)
            add_legend(figure)
            figure.savefig(folder / name, dpi=120)
    return {caption: plot[0] for caption, plot in plots.items()}


def _draw_curves(axes: np.ndarray, result: dict[str, Any]) -> None:
    cells = [cell for cell in result["cells"] if _has_curves(cell)]
    for axis, curve in zip(axes, ("loss", "accuracy"), strict=True):
        for number, cell in enumerate(cells):
            runs = np.array(cell["curves"][curve])
            steps = np.arange(1, runs.shape[1] + 1)
            draw_runs(axis, steps, runs, number, cell["optimizer"])
        axis.set_xlabel("optimizer step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("training loss (nats, log scale)")
    _label_accuracy(axes[1], "test accuracy after the step")
    # If the axis began at chance level, all later steps would look flat.
    means = [np.mean(cell["curves"]["accuracy"], axis=0) for cell in cells]
    axes[1].set_ylim(bottom=np.quantile(means, 0.15))


def _draw_rates(axes: np.ndarray, result: dict[str, Any]) -> None:
    largest = max(cell["batch_size"] for cell in result["cells"])
    full = [cell for cell in result["cells"] if cell["batch_size"] == largest]
    all_steps = sorted({cell["steps"] for cell in full})
    for axis, steps in zip(axes, all_steps, strict=True):
        cells = [cell for cell in full if cell["steps"] == steps]
        for number, cell in enumerate(cells):
            axis.plot(
                [trial["learning_rate"] for trial in cell["tuning"]],
                [
                    np.mean(trial["validation_accuracy"])
                    for trial in cell["tuning"]
                ],
                **line_style(number, cell["optimizer"]),
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(LogLocator(base=4))
        axis.xaxis.set_major_formatter(FuncFormatter(_fraction))
        axis.set_xlabel("highest learning rate (log scale)")
        axis.set_title(f"{steps} steps")
        _label_accuracy(axis, "validation accuracy")


def _has_curves(cell: dict[str, Any]) -> bool:
    return bool(cell["curves"]["loss"])


def _label_accuracy(axis: Axes, label: str) -> None:
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=None))
    axis.set_ylabel(f"{label} (%)")


def _fraction(rate: float, position: int) -> str:
    return f"1/{1 / rate:.0f}" if rate < 1 else f"{rate:.0f}"
