"""Reports on the large-batch study: a terminal table and a section."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from tf_optimizers.demo.large_batch.batch_plots import draw
from tf_optimizers.demo.tables import markdown_table, terminal_table

Cells = list[dict[str, Any]]


def table(result: dict[str, Any]) -> Table:
    """Return the test accuracies as a table for the terminal."""
    title = "Test accuracy in %, mean ± standard deviation"
    return terminal_table(title, accuracy_rows(result))


def section(result: dict[str, Any], folder: Path) -> str:
    """Draw the plots into `folder` and return the section's Markdown."""
    paragraphs = [
        "## Large batches",
        _set_up(result["settings"]),
        "Test accuracy in %, mean ± standard deviation over "
        f"{len(result['settings']['seeds'])} seeds:",
        markdown_table(accuracy_rows(result)),
        "\n".join(f"- {line}" for line in findings(result)),
        "The learning rates with the best validation accuracy:",
        markdown_table(rate_rows(result)),
        edge_note(result["cells"]),
    ]
    for caption, name in draw(result, folder).items():
        paragraphs += [f"![{caption}]({name})", f"*{caption}.*"]
    return "\n\n".join(paragraphs)


def accuracy_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return a heading, and a row of test accuracies per optimizer."""
    return _rows(
        result["cells"],
        lambda cell: f"{100 * cell['mean']:.1f} ± {100 * cell['std']:.1f}",
    )


def rate_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return a heading, and a row of learning rates per optimizer."""
    return _rows(result["cells"], lambda cell: f"{cell['learning_rate']:.3g}")


def findings(result: dict[str, Any]) -> list[str]:
    """Return, for each budget, sentences about the best optimizers."""
    lines = []
    for heading, cells in _budgets(result["cells"]).items():
        best = max(cells, key=lambda cell: cell["mean"])
        close = [
            cell["optimizer"]
            for cell in cells
            if cell is not best
            and best["mean"] - cell["mean"] <= max(best["std"], cell["std"])
        ]
        lines.append(
            f"{heading}: {best['optimizer']} has the best mean, "
            f"{100 * best['mean']:.1f}%. Optimizers within one standard "
            "deviation of it (the larger deviation of the two): "
            f"{', '.join(close) or 'none'}."
        )
    return lines


def edge_note(cells: Cells) -> str:
    """Return a sentence about rates at an edge of the grid."""
    at_edge = [
        f"{cell['optimizer']} at batch {cell['batch_size']:,}, "
        f"{cell['steps']} steps"
        for cell in cells
        if cell["at_edge_of_grid"]
    ]
    if not at_edge:
        return "None of these rates is at an edge of the grid."
    return (
        "At an edge of the grid, so that a better rate may lie outside: "
        f"{'; '.join(at_edge)}."
    )


def _set_up(settings: dict[str, Any]) -> str:
    sizes = settings["split_sizes"]
    rates = settings["rates"]
    widths = " and ".join(str(width) for width in settings["hidden_units"])
    return (
        "How far does each optimizer get with a few large batches? Data: "
        f"scikit-learn's digits, {sizes['train']:,} images to train on, "
        f"{sizes['validation']} to choose the learning rate, {sizes['test']} "
        f"to test. Network: hidden layers of {widths} units (ReLU, He initial "
        "weights, the same for all optimizers). Schedule: "
        f"{100 * settings['warmup_share']:.0f}% linear warm-up, then linear "
        "decay. Learning rate: for each cell of the table, the best of "
        f"{len(rates)} rates from {rates[0]:.3g} to {rates[-1]:.3g} by mean "
        "validation accuracy over "
        f"{len(settings['tuning_seeds'])} tuning seeds; test runs use other "
        "seeds. Weight decay: "
        f"{settings['weight_decay']} (SGD: none). Muon uses AdamW for the last "
        "layer and biases. `tfo` is this package. With another dataset or "
        "network, the optimizers may rank differently."
    )


def _budgets(cells: Cells) -> dict[str, Cells]:
    """Return the cells by heading, which names the batch size and epochs."""
    groups: dict[str, Cells] = {}
    for cell in cells:
        heading = (
            f"batch {cell['batch_size']:,}, {cell['epochs']} epochs "
            f"({cell['steps']} steps)"
        )
        groups.setdefault(heading, []).append(cell)
    return groups


def _rows(
    cells: Cells, show: Callable[[dict[str, Any]], str]
) -> list[list[str]]:
    budgets = _budgets(cells)
    names = dict.fromkeys(cell["optimizer"] for cell in cells)
    return [
        ["optimizer", *budgets],
        *(
            [
                name,
                *(
                    show(cell)
                    for group in budgets.values()
                    for cell in group
                    if cell["optimizer"] == name
                ),
            ]
            for name in names
        ),
    ]
