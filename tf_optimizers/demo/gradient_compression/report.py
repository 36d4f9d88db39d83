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
    title = f"Two workers: dense, and {_share(result)} of all entries"
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
    """Return a heading, and of each pair two rows and their ratio."""
    heading = [
        "optimizer",
        "test accuracy (%)",
        "bytes per step",
        "calculated",
        "MB per run",
        "ms per step",
    ]
    rows = [row for pair in result["pairs"] for row in _pair_rows(pair)]
    return [heading, *rows]


def _pair_rows(pair: dict[str, Any]) -> list[list[str]]:
    dense, sparse = pair["optimizers"]
    traffic = pair["communication"]["total"]
    gradients = (traffic["dense_bytes"], traffic["sent_bytes"])
    return [
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
    counted = is_counted(result)
    lines = [
        line
        for pair in result["pairs"]
        for line in (
            accuracy_finding(pair),
            *([_bytes_finding(pair, _share(result))] if counted else []),
            _time_finding(pair),
        )
    ]
    if not counted:
        lines.append(
            "Bytes: not counted, since this kernel does not count what a "
            "socket sends (Linux does since 4.19, macOS does not). The "
            "calculated ones come from `communication_summary()`."
        )
    return lines


def _bytes_finding(pair: dict[str, Any], share: str) -> str:
    dense, sparse = pair["optimizers"]
    ratio = _ratio(dense["bytes_per_step"], sparse["bytes_per_step"])
    sent = pair["communication"]["total"]["sent_bytes"]
    return (
        f"Bytes: a step that sends {share} of all entries sends {ratio} times "
        f"fewer. Of those that {sparse['optimizer']} still sends, "
        f"{sparse['bytes_per_step'] - sent:,.0f} are not entries but the "
        "metadata of messages, and Keras's own reduction of loss and metrics. "
        "A whole run sends "
        f"{_ratio(dense['bytes_per_run'], sparse['bytes_per_run'])} times "
        "fewer."
    )


def _time_finding(pair: dict[str, Any]) -> str:
    dense, sparse = pair["optimizers"]
    return (
        f"Time: {1000 * sparse['seconds_per_step']:.0f} ms per step, and "
        f"{1000 * dense['seconds_per_step']:.0f} ms with {dense['optimizer']}, "
        "in the same epochs."
    )


def accuracy_finding(pair: dict[str, Any]) -> str:
    """Compare the test accuracies seed by seed, and the training losses."""
    dense, sparse = (
        {
            run["seed"]: run["test_accuracy"]
            for run in pair["runs"]
            if run["optimizer"] == row["optimizer"]
        }
        for row in pair["optimizers"]
    )
    gains = [100 * (sparse[seed] - dense[seed]) for seed in dense]
    names = [row["optimizer"] for row in pair["optimizers"]]
    losses = [row["final_loss"] for row in pair["optimizers"]]
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
        f"What does exchanging {_share(result)} of all entries save, and what "
        f"does it cost? {settings['workers']} worker processes, started by "
        "`python -m tf_optimizers.launch`, train with Keras's `fit` under "
        "`tfo.SparseMultiWorkerMirroredStrategy`, on CPUs. Data: "
        f"scikit-learn's digits, {sizes['train']:,} images to train on, "
        f"{sizes['validation']} to choose the learning rate, {sizes['test']} "
        f"to test. Network: hidden layers of {widths} units, "
        f"{result['parameters']:,} parameters. {settings['epochs']} epochs, "
        f"{steps} steps of {settings['batch_size']} images over all workers; "
        f"learning rate with {100 * settings['warmup_share']:.0f} % linear "
        "warm-up, then linear decay. Dense: `keras.optimizers.SGD`, momentum "
        f"{settings['momentum']}, and `keras.optimizers.AdamW`. Compressed: "
        "`tfo.DGCMomentum`, the same momentum, and `tfo.SparseLoCo` around "
        "AdamW, as `for_steps` recommends: sparsity "
        f"{', '.join(warmup)} % over the first steps, then {last} %, and back; "
        "in the last step all that is left. A seed gives all the same initial "
        f"weights and the same batches; {len(settings['seeds'])} seeds. "
        "As in the paper, the compressed one uses the learning rate of the "
        "dense one, untuned. "
        + " ".join(_rate_note(pair, settings) for pair in result["pairs"])
    )


def _rate_note(pair: dict[str, Any], settings: dict[str, Any]) -> str:
    rates = settings["rates"][pair["tuned"]]
    note = (
        f"{pair['tuned']}: {pair['learning_rate']:.3g}, the best on validation "
        f"among {len(rates)} from {rates[0]:.3g} to {rates[-1]:.3g}."
    )
    if pair["at_edge_of_grid"]:
        note += " It is at an edge of the grid."
    return note


def _method(result: dict[str, Any]) -> str:
    return (
        "Test accuracy: mean ± standard deviation over seeds. Bytes: what the "
        "workers' TCP sockets have sent, by the kernel's count (`TCP_INFO`), "
        "between two points that all workers have reached, divided by steps "
        "and workers. Keras's reduction of loss and metrics is included, "
        "packet headers are not. Per step: the median of all epochs at the "
        "highest sparsity; per run: all of it. Calculated: the entries of "
        "such a step alone, from `communication_summary("
        f"{result['pairs'][0]['communication']['step']})`."
    )


def _share(result: dict[str, Any]) -> str:
    """Return which share of the entries is sent after the warm-up."""
    return f"{100 * (1 - max(result['settings']['sparsity'])):.3g} %"


def _count(count: float | None, unit: float = 1, digits: int = 0) -> str:
    return _NOT_COUNTED if count is None else f"{count / unit:,.{digits}f}"


def _ratio(dense: float | None, sparse: float | None) -> str:
    if dense is None or sparse is None:
        return _NOT_COUNTED
    return f"{dense / sparse:,.0f}"
