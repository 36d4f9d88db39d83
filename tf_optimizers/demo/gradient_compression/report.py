"""What the gradient compression study shows: a table and a report section."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from tf_optimizers.demo.gradient_compression.plots import draw, is_counted
from tf_optimizers.demo.tables import markdown_table, terminal_table

_NOT_COUNTED = "not counted"


def table(result: dict[str, Any]) -> Table:
    """Return the rows as a table for the terminal."""
    title = "Two workers: dense gradients, and 0.1 % of them"
    return terminal_table(title, comparison_rows(result))


def section(result: dict[str, Any], folder: Path) -> str:
    """Draw the plot into `folder` and return the section's Markdown."""
    paragraphs = [
        "## Gradient compression",
        _set_up(result),
        _method(result),
        markdown_table(comparison_rows(result)),
        "\n".join(f"- {line}" for line in findings(result)),
        LIMITS,
    ]
    for caption, name in draw(result, folder).items():
        paragraphs += [f"![{caption}]({name})", f"*{caption}.*"]
    return "\n\n".join(paragraphs)


LIMITS = (
    "What this does not show: speed. Both workers share one machine, and "
    "loopback carries dense gradients faster than any network, so compression "
    "is only extra work there. The times were measured while the machine may "
    "have done other work too. Nor does it show what happens with more "
    "workers, or with another network or task."
)


def comparison_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return a heading, a row per optimizer, and the ratio of the two."""
    dense, sparse = result["optimizers"]
    traffic = result["communication"]["total"]
    gradients = (traffic["dense_bytes"], traffic["sent_bytes"])
    return [
        [
            "optimizer",
            "test accuracy (%)",
            "bytes per step",
            "calculated",
            "MB per run",
            "ms per step",
        ],
        *(
            [
                row["optimizer"],
                f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}",
                _count(row["bytes_per_step"]),
                _count(calculated),
                _count(row["bytes_per_run"], 1e6, 1),
                f"{1000 * row['seconds_per_step']:.0f}",
            ]
            for row, calculated in zip((dense, sparse), gradients, strict=True)
        ),
        [
            "ratio",
            "",
            _ratio(dense["bytes_per_step"], sparse["bytes_per_step"]),
            _ratio(*gradients),
            _ratio(dense["bytes_per_run"], sparse["bytes_per_run"]),
            "",
        ],
    ]


def findings(result: dict[str, Any]) -> list[str]:
    """Summarize accuracy, bytes and time."""
    dense, sparse = result["optimizers"]
    lines = [accuracy_finding(result)]
    traffic = result["communication"]["total"]
    if is_counted(result):
        ratio = _ratio(dense["bytes_per_step"], sparse["bytes_per_step"])
        rest = sparse["bytes_per_step"] - traffic["sent_bytes"]
        lines.append(
            f"Bytes: after the warm-up, a step sends {ratio} times fewer. Of "
            f"those that {sparse['optimizer']} still sends, {rest:,.0f} are "
            "not gradients but the metadata of messages, and Keras's own "
            "reduction of loss and metrics. Warm-up included, a run sends "
            f"{_ratio(dense['bytes_per_run'], sparse['bytes_per_run'])} times "
            "fewer."
        )
    else:
        lines.append(
            "Bytes: not counted, since this kernel does not count what a "
            "socket sends (Linux does since 4.19, macOS does not). The "
            "calculated ones come from `communication_summary()`."
        )
    lines.append(
        f"Time: {1000 * sparse['seconds_per_step']:.0f} ms per step, and "
        f"{1000 * dense['seconds_per_step']:.0f} ms with dense gradients, "
        "after the warm-up."
    )
    return lines


def accuracy_finding(result: dict[str, Any]) -> str:
    """Compare the test accuracies seed by seed, and the training losses."""
    dense, sparse = (
        {
            run["seed"]: run["test_accuracy"]
            for run in result["runs"]
            if run["optimizer"] == row["optimizer"]
        }
        for row in result["optimizers"]
    )
    gains = [100 * (sparse[seed] - dense[seed]) for seed in dense]
    names = [row["optimizer"] for row in result["optimizers"]]
    losses = [row["final_loss"] for row in result["optimizers"]]
    return (
        f"Accuracy: {names[1]} minus {names[0]}, seed by seed, is "
        f"{np.mean(gains):+.1f} ± {np.std(gains, ddof=1):.1f} percentage "
        f"points; {names[1]} is behind in {sum(g < 0 for g in gains)} of "
        f"{len(gains)} seeds. Its training loss in the last epoch is "
        f"{losses[1]:.2g}, that of {names[0]} {losses[0]:.2g}."
    )


def _set_up(result: dict[str, Any]) -> str:
    settings = result["settings"]
    sizes = settings["split_sizes"]
    widths = ", ".join(f"{width:,}" for width in settings["hidden_units"])
    steps = settings["epochs"] * settings["steps_per_epoch"]
    *warmup, last = (f"{100 * s:g}" for s in settings["sparsity"])
    return (
        "What does exchanging 0.1 % of the gradient save, and what does it "
        f"cost? {settings['workers']} worker processes, started by `python -m "
        "tf_optimizers.launch`, train with Keras's `fit` under "
        "`tfo.SparseMultiWorkerMirroredStrategy`, on CPUs. Data: "
        f"scikit-learn's digits, {sizes['train']:,} images to train on, "
        f"{sizes['validation']} to choose the learning rate, {sizes['test']} "
        f"to test. Network: hidden layers of {widths} units, "
        f"{result['parameters']:,} parameters. {settings['epochs']} epochs, "
        f"{steps} steps of {settings['batch_size']} images over all workers; "
        f"learning rate with {100 * settings['warmup_share']:.0f} % linear "
        "warm-up, then linear decay. Dense: `keras.optimizers.SGD`, momentum "
        f"{settings['momentum']}. Compressed: `tfo.DGCMomentum`, the same "
        f"momentum, sparsity {', '.join(warmup)} % for an epoch each, "
        f"{last} % from then on. A seed gives both the same initial weights "
        f"and the same batches; {len(settings['seeds'])} seeds. "
        f"{_rate_note(result)}"
    )


def _rate_note(result: dict[str, Any]) -> str:
    rates = result["settings"]["rates"]
    note = (
        f"Learning rate: {result['learning_rate']:.3g}, the best on validation "
        f"for {result['tuned']} among {len(rates)} from {rates[0]:.3g} to "
        f"{rates[-1]:.3g}. As in the paper, DGC uses the same one, untuned."
    )
    if result["at_edge_of_grid"]:
        note += " It is at an edge of the grid."
    return note


def _method(result: dict[str, Any]) -> str:
    return (
        "Test accuracy: mean ± standard deviation over seeds. Bytes: what the "
        "workers' TCP sockets have sent, by the kernel's count (`TCP_INFO`), "
        "between two points that all workers have reached, divided by steps "
        "and workers. Keras's reduction of loss and metrics is included, "
        "packet headers are not. Per step: the median of all epochs after the "
        "warm-up; per run: all of it, warm-up included. Calculated: the "
        "gradients of the last step alone, from `communication_summary("
        f"{result['communication']['step']})`."
    )


def _count(count: float | None, unit: float = 1, digits: int = 0) -> str:
    return _NOT_COUNTED if count is None else f"{count / unit:,.{digits}f}"


def _ratio(dense: float | None, sparse: float | None) -> str:
    if dense is None or sparse is None:
        return _NOT_COUNTED
    return f"{dense / sparse:,.0f}"
