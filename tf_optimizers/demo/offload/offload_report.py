"""Reports on the offload study: the memory in each place, and the losses."""

from pathlib import Path
from typing import Any

from rich.table import Table

from tf_optimizers.demo.tables import markdown_table, terminal_table

PLACES = {"device": "on the device", "host": "on the host"}
KINDS = {
    "weights": "weights",
    "state": "state",
    "master_weights": "master weights",
}


def table(result: dict[str, Any]) -> Table:
    """Return the memory table for the terminal."""
    title = f"Memory in kB, model on {result['device']}; {agreement(result)}"
    return terminal_table(title, memory_rows(result["memory"]))


def section(result: dict[str, Any], folder: Path) -> str:
    """Return the section's Markdown."""
    del folder  # There is nothing to draw.
    return "\n\n".join(
        [
            "## Offload",
            _set_up(result),
            "Memory during training, in kB:",
            markdown_table(memory_rows(result["memory"])),
            "Training loss:",
            markdown_table(loss_rows(result["losses"])),
            f"Over all steps, {agreement(result)}. It comes from rounding to "
            "float32, and grows during training.",
        ]
    )


def memory_rows(
    memory: dict[str, dict[str, dict[str, int]]],
) -> list[list[str]]:
    """Return a heading and one row per optimizer and place."""
    rows = [["memory of", "where", *KINDS.values(), "sum"]]
    for name, places in reversed(memory.items()):
        for place, heading in PLACES.items():
            sizes = [places[place][kind] for kind in KINDS]
            shown = [f"{size / 1e3:,.1f}" for size in [*sizes, sum(sizes)]]
            rows.append([name, heading, *shown])
    return rows


def loss_rows(losses: dict[str, list[float]]) -> list[list[str]]:
    """Return a heading, and each optimizer's losses at a few of the steps."""
    count = len(next(iter(losses.values())))
    steps = [0, count // 4, count // 2, count - 1]
    return [
        ["loss with", *(f"step {step + 1}" for step in steps)],
        *(
            [name, *(f"{values[step]:.6f}" for step in steps)]
            for name, values in losses.items()
        ),
    ]


def agreement(result: dict[str, Any]) -> str:
    """Return the difference of the losses, as part of a sentence."""
    return (
        "the relative difference of the losses is at most "
        f"{result['largest_difference']:.1e}"
    )


def _set_up(result: dict[str, Any]) -> str:
    settings = result["settings"]
    stand_in = ""
    if result["device"].startswith("CPU"):
        stand_in = (
            " There was no GPU, so a second logical CPU device stands in for "
            "it. A GPU would hold the same bytes. No times are shown, since "
            "they would mean nothing."
        )
    return (
        "This part trains the network of the large-batch study twice, from the "
        "same weights on the same batches: with `keras.optimizers.Adam`, and "
        "with `tfo.AdamOffload`, whose state and step are on the host. A run "
        f"has {settings['steps']} steps of batch {settings['batch_size']} at "
        f"learning rate {settings['rate']:g}. The model is on "
        f"{result['device']}.{stand_in}"
    )
