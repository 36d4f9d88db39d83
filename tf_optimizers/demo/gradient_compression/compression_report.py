"""Reports on the gradient compression study: a table and a section."""

from pathlib import Path
from typing import Any

from rich.table import Table

from tf_optimizers.demo.gradient_compression.clock import (
    behind,
    clock,
    seconds_to,
)
from tf_optimizers.demo.gradient_compression.compression_plots import draw
from tf_optimizers.demo.link import NONE, Link, parse_link
from tf_optimizers.demo.tables import markdown_table, terminal_table

LEVELS = (0.9, 0.95, 0.97)
FINDING_LEVEL = 0.95
RATES = (1e9, 1e8, 1e7)  # Bits per second of the modeled links.
_NOT_COUNTED = "not counted"
_NEVER = "never"


def table(result: dict[str, Any]) -> Table:
    """Return the rows as a table for the terminal."""
    return terminal_table(
        f"Seconds to a test accuracy, {place(result)}", rows(result)
    )


def section(result: dict[str, Any], folder: Path) -> str:
    """Draw the plot into `folder` and return the section's Markdown."""
    ((caption, name),) = draw(result, folder).items()
    return "\n\n".join(
        [
            "## Gradient compression",
            f"How long does training take {place(result)}, with dense and with "
            "compressed exchanges?",
            "\n".join(f"- {finding(*pair)}" for pair in _pairs(result)),
            f"![{caption}]({name})",
            f"*{caption}.*",
            f"Seconds of training to each test accuracy, {place(result)}:",
            markdown_table(rows(result)),
            _columns(result),
            *_other_links(result),
            _set_up(result),
            _links(result),
            _limits(result),
        ]
    )


def place(result: dict[str, Any]) -> str:
    """Return a phrase that names the link between the workers."""
    link = result["settings"]["link"]
    return "without a link" if link == "none" else f"at {link}"


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Return a heading and one row per optimizer."""
    levels = [f"{100 * level:.0f}%" for level in LEVELS]
    heading = ["optimizer", *levels, "end", "MB", "points behind (95%)"]
    shown = []
    gaps = {}
    for dense, sparse in _pairs(result):
        mean, low, high = map(_points, behind(dense, sparse))
        gaps[sparse["optimizer"]] = f"{mean} ({low} to {high})"
    for row in _optimizers(result):
        name, mb = row["optimizer"], _NOT_COUNTED
        if row["bytes"]:
            mb = f"{sum(row['bytes']) / 1e6:,.1f}"
        seconds = _seconds(row, clock(row))
        shown.append([name, *seconds, mb, gaps.get(name, "")])
    return [heading, *shown]


def rows_by_link(result: dict[str, Any]) -> list[list[str]]:
    """Return a heading and one modeled row per link and optimizer."""
    levels = [f"{100 * level:.0f}%" for level in LEVELS]
    return [
        ["link and optimizer", *levels, "end"],
        *(
            [f"{link}: {row['optimizer']}", *_seconds(row, clock(row, link))]
            for link in _modeled(result)
            for row in _optimizers(result)
        ),
    ]


def _seconds(row: dict[str, Any], seconds: Any) -> list[str]:
    reached = [seconds_to(level, row, seconds) for level in LEVELS]
    return [
        _NEVER if each is None else f"{each:.1f}"
        for each in [*reached, float(seconds[-1])]
    ]


def _points(gap: float) -> str:
    return f"{round(gap, 1) + 0.0:+.1f}"  # never "-0.0"


def finding(dense: dict[str, Any], sparse: dict[str, Any]) -> str:
    """Return a summary of the speed, traffic and accuracy of a pair."""
    mean, low, high = behind(dense, sparse)
    known = low > 0 or high < 0
    verdict = "significant" if known else "not significant"
    return (
        f"{_speed(dense, sparse)} {_traffic(dense, sparse)}Final accuracy, "
        f"dense minus compressed: {_points(mean)} points (95% interval: "
        f"{_points(low)} to {_points(high)}), {verdict}."
    )


def _speed(dense: dict[str, Any], sparse: dict[str, Any]) -> str:
    names = [row["optimizer"] for row in (dense, sparse)]
    level = f"{100 * FINDING_LEVEL:.0f}%"
    slow, fast = (
        seconds_to(FINDING_LEVEL, row, clock(row)) for row in (dense, sparse)
    )
    if slow is None or fast is None:
        never = [
            name
            for name, time in zip(names, (slow, fast), strict=True)
            if time is None
        ]
        return f"{' and '.join(never)} never reached {level}."
    times = f"{names[1]} reached {level} in {fast:.1f} s, {names[0]} in"
    if fast > slow:
        return f"{times} {slow:.1f} s: it took {fast / slow:.1f} times as long."
    return f"{times} {slow:.1f} s: {slow / fast:.1f} times as fast."


def _traffic(dense: dict[str, Any], sparse: dict[str, Any]) -> str:
    if not dense["bytes"] or not sparse["bytes"]:
        return ""
    ratio = sum(dense["bytes"]) / sum(sparse["bytes"])
    if ratio < 1:
        return f"{sparse['optimizer']} sent {1 / ratio:.3g} times the bytes. "
    return f"{sparse['optimizer']} sent {ratio:.3g} times fewer bytes. "


def _columns(result: dict[str, Any]) -> str:
    counted = (
        "MB: sent in a run by the first worker's TCP sockets (the kernel's "
        "`TCP_INFO`), mean over the seeds."
    )
    if any(not row["bytes"] for row in _optimizers(result)):
        counted = (
            "MB: not counted, since this kernel does not count the bytes of a "
            "socket (Linux 4.19 and newer do, macOS does not)."
        )
    return (
        "An accuracy is reached when the mean over "
        f"{len(result['settings']['seeds'])} seeds reaches it. Accuracy is "
        f"measured every {result['settings']['measured_every']} steps (with "
        "local steps, after each exchange), while the clock is stopped. "
        f"{counted} Points behind: the dense optimizer's final accuracy minus "
        "the compressed one's, mean over the seeds, with Student's interval."
    )


def _optimizers(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for group in result["groups"] for row in group["optimizers"]]


def _pairs(result: dict[str, Any]) -> list[tuple[dict, dict]]:
    """Return pairs: a dense optimizer, and a compressed counterpart."""
    return [
        (group["optimizers"][0], sparse)
        for group in result["groups"]
        for sparse in group["optimizers"][1:]
    ]


def _modeled(result: dict[str, Any]) -> list[Link]:
    trip = parse_link(result["settings"]["link"]).round_trip
    return [NONE, *(Link(rate, trip) for rate in RATES)]


def _other_links(result: dict[str, Any]) -> list[str]:
    """Return paragraphs with modeled times for other links.

    There are none if a number of round trips could not be fitted.
    """
    every = _optimizers(result)
    if any("round_trips" not in row for row in every):
        return []
    trips = ", ".join(
        f"{row['optimizer']} {row['round_trips']:.1f}" for row in every
    )
    measured = Link(**result["measured"])
    errors = [
        round(100 * (clock(row, measured)[-1] / clock(row)[-1] - 1))
        for row in every
    ]
    return [
        "The same over other links, **calculated, not measured**: the seconds "
        "of a step without a link, plus its bytes divided by the link's rate, "
        "plus its round trips. The number of round trips in a step is fitted "
        f"to this run: {trips}. For the measured link, the calculated total "
        f"seconds are {min(errors):+d} to {max(errors):+d}% off.",
        markdown_table(rows_by_link(result)),
    ]


def _set_up(result: dict[str, Any]) -> str:
    settings = result["settings"]
    sizes = settings["split_sizes"]
    widths = ", ".join(f"{width:,}" for width in settings["hidden_units"])
    shares = [f"{100 * share:g}" for share in settings["sparsity"]]
    return (
        f"{settings['workers']} worker processes train with Keras's `fit` "
        "under `tfo.SparseMultiWorkerMirroredStrategy`, and share the CPU "
        "cores of one machine. Data: "
        f"scikit-learn's digits, {sizes['train']:,} images to train on and "
        f"{sizes['test']} to test. Network: hidden layers of {widths} units, "
        f"{result['parameters']:,} parameters. {settings['steps']} steps of "
        f"{settings['batch_size']} images over all workers; learning rate with "
        f"{100 * settings['warmup_share']:.0f}% linear warm-up, then linear "
        "decay. Dense: `keras.optimizers.SGD`, momentum "
        f"{settings['momentum']}, and `keras.optimizers.AdamW`. Compressed: "
        "`tfo.DGCMomentum` with the same momentum, and `tfo.SparseLoCo` around "
        "AdamW, both with the settings of `for_steps`: "
        f'`value_dtype="{settings["value_dtype"]}"`, a sparsity of '
        f"{', '.join(shares)}%, and a last step that sends everything still "
        "unsent. With local steps: "
        f"`for_steps` with `sync_every={settings['local_steps']}`. Compressed "
        "optimizers use the learning rate of the dense one, without tuning. "
        + " ".join(_rate_note(group, settings) for group in result["groups"])
        + " Rates were compared by mean accuracy on "
        f"{len(settings['tuning_seeds'])} validation splits with different "
        "seeds."
    )


def _rate_note(group: dict[str, Any], settings: dict[str, Any]) -> str:
    rates = settings["rates"][group["tuned"]]
    note = (
        f"{group['tuned']}: {group['learning_rate']:.3g}, the best of "
        f"{len(rates)} rates from {rates[0]:.3g} to {rates[-1]:.3g}."
    )
    if group["at_edge_of_grid"]:
        note += " This rate is at an edge of the grid."
    return note


def _links(result: dict[str, Any]) -> str:
    settings = result["settings"]
    count = len(settings["seeds"])
    if parse_link(settings["link"]) == NONE:
        return (
            "There was no link: both workers share one machine, and loopback "
            "carries dense gradients faster than any network, so compression "
            f"is only extra work. Seconds are medians over {count} seeds."
        )
    measured = Link(**result["measured"])
    return (
        "The link is simulated: forwarders in user space delay everything that "
        f"the workers send each other. Set to: {settings['link']}. Measured "
        f"before the runs: {measured.rate / 1e6:.1f} Mbit/s, "
        f"{1e3 * measured.round_trip:.1f} ms. With the first seed, compressed "
        "runs used the link in all steps, and dense runs in the first "
        f"{settings['timed_steps']}. The table shows the seconds of this seed. "
        "Later dense steps send the same number of bytes, so each counts as "
        f"the median time of the first steps. With the other {count - 1} "
        "seeds, the forwarders delayed nothing, since a link does not change "
        "results; these runs measure steps without the link."
    )


def _limits(result: dict[str, Any]) -> str:
    first = result["settings"]["seeds"][0]
    return (
        f"Consecutive seeds from {first} (`--first-seed`) decide the initial "
        "weights and the order of the data, which are the same for all "
        "optimizers. On another machine, seconds differ, and accuracies may "
        "differ a little, since rounding depends on the processor. With "
        "another network or task, or with more workers, results may differ."
    )
