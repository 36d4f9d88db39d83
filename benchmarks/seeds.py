"""Compares runs of several seeds, and writes the results as cells."""

import numpy as np
from scipy import stats


def against_dense(runs: list[dict], dense: list[dict]) -> list[str]:
    """Return cells of each metric: its mean, and its difference from dense."""
    cells = []
    for metric, scale, digits in (("accuracy", 100, 2), ("bits", 1, 3)):
        values = [scale * run["test"][metric] for run in runs]
        gains = [scale * gain for gain in differences(runs, dense, metric)]
        cells.append(mean_and_deviation(values, digits))
        cells.append("" if runs is dense else interval(gains, digits))
    return cells


def differences(
    runs: list[dict], dense: list[dict], metric: str
) -> list[float]:
    """Return each run's metric, minus that of the dense run of its seed."""
    tests = {run["seed"]: run["test"] for run in dense}
    return [run["test"][metric] - tests[run["seed"]][metric] for run in runs]


def mean_and_deviation(values: list[float], digits: int) -> str:
    """Return a cell with mean and standard deviation, or the only value."""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def interval(values: list[float], digits: int) -> str:
    """Return a cell with mean and 95% interval, or the only value."""
    if len(values) < 2:
        return f"{values[0]:+.{digits}f}"
    mean, low, high = (f"{x:+.{digits}f}" for x in mean_and_interval(values))
    return f"{mean} ({low} to {high})"


def mean_and_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean and its 95% confidence interval (Student's t)."""
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return float(np.mean(values)), low, high
