"""The time that training steps take: measured, or modeled for other links.

A step is modeled as

    seconds <- alone + round_trips x round trip + 8 bytes / rate

`alone` (the seconds without a link) and `bytes` are measured. `round_trips` is
fitted to the run over the link.
"""

import math
from typing import Any

import numpy as np
from scipy import stats

from tf_optimizers.demo.link import NONE, Link

Row = dict[str, Any]


def summary(runs: list[Row], measured: Link) -> Row:
    """Return an optimizer's measurements, as lists with an entry per mark.

    A mark is a step after which the accuracy is measured. Seconds and bytes
    count from the previous mark. There is a list of accuracies for each seed.
    If a run uses the link only in its first steps, each later step is assumed
    to take the median time of the first steps.

    Args:
        runs: The first worker's report of each seed.
        measured: The measured rate and round trip of the link, or `NONE`.
    """
    alone = [run["seconds"] for run in runs if not run["over_link"]]
    linked = [run for run in runs if run["over_link"]]
    sent = [run["bytes"] for run in runs]
    row: Row = {
        "steps": runs[0]["steps"],
        "seconds_alone": np.median(alone, axis=0).tolist(),
        "bytes": None if None in sent else np.mean(sent, axis=0).tolist(),
        "accuracy": [run["accuracy"] for run in runs],
    }
    row["seconds"] = row["seconds_alone"]
    if linked:
        seconds, steps = np.array(linked[0]["seconds"]), np.array(row["steps"])
        later = np.cumsum(steps) > linked[0]["over_link"]
        seconds[later] = steps[later] * np.median((seconds / steps)[~later])
        row["seconds"] = seconds.tolist()
    if measured != NONE and row["bytes"]:
        row["round_trips"] = _round_trips(row, measured)
    return row


def _round_trips(row: Row, measured: Link) -> float:
    """Return the number of round trips in a step: the median over the marks."""
    rest = np.subtract(row["seconds"], row["seconds_alone"])
    rest -= 8 * np.array(row["bytes"]) / measured.rate
    each = rest / (np.array(row["steps"]) * measured.round_trip)
    return max(0.0, float(np.median(each)))


def clock(row: Row, link: Link | None = None) -> np.ndarray:
    """Return the seconds until each mark: measured, or modeled for `link`."""
    if link is None:
        return np.cumsum(row["seconds"])
    trips = row["round_trips"] * link.round_trip
    on_link = trips * np.array(row["steps"])
    on_link += 8 * np.array(row["bytes"]) / link.rate
    return np.cumsum(row["seconds_alone"] + on_link)


def seconds_to(level: float, row: Row, seconds: np.ndarray) -> float | None:
    """Return the seconds until the mean accuracy reaches a level, or None."""
    # If all accuracies equal the level, rounding may put their mean below it.
    reached = np.mean(row["accuracy"], axis=0) > level - 1e-9
    return float(seconds[np.argmax(reached)]) if reached.any() else None


def behind(dense: Row, sparse: Row) -> tuple[float, float, float]:
    """Return the mean gap of final accuracies, and its 95% interval.

    The gap is the accuracy of `dense` minus that of `sparse`, in points, seed
    by seed. The interval is Student's t-interval over the seeds.
    """
    ends = [np.array(row["accuracy"])[:, -1] for row in (dense, sparse)]
    gaps = 100 * (ends[0] - ends[1])
    mean, count = float(np.mean(gaps)), len(gaps)
    deviation = float(np.std(gaps, ddof=1))
    half = float(stats.t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)
    return mean, mean - half, mean + half
