"""Plots of what a run learns, and of what it sends."""

import numpy as np
import seeds
from panels import finish, panels, plain_log

from tf_optimizers.demo.plots import draw_runs, line_style

# Schedules of local steps: their labels, the steps of a run, and their names.
LOCAL = {
    f"{times} times fewer bytes, {steps:,} steps": (
        str(steps),
        f"every 8 steps, {times} times, outer 1.4, int2, ahead 0.25",
    )
    for times, steps in (("1,000", 3240), ("1,000", 32400), ("5,000", 32400))
}
SENT = {
    "DGCMomentum.for_steps": "warm-up and cool-down, int4",
    "99.9% from the first step": "last stage only, int4",
    "from 75%, with a cool-down": "from 75%, stages of 1/40, int4",
    "SparseLoCo.for_steps, sync_every=8": (
        "SparseLoCo.for_steps, every 8 steps, int2"
    ),
}
CURVES = {
    "accuracy": ("dense", "DGC, 2 workers", "DGC, 4 workers"),
    "loco_accuracy": (
        "dense",
        "for_steps, 2 workers",
        "for_steps, 4 workers",
    ),
}


def local_schedule(document: dict) -> None:
    """Draw the loss minus that of dense by workers, a panel per task."""
    figure, axes = panels(3, sharex=True, sharey=True)
    for axis, task in zip(axes, ("text", "code", "digits"), strict=True):
        for number, (label, (steps, schedule)) in enumerate(LOCAL.items()):
            points = [
                (result["workers"], *seeds.mean_and_interval(gains))
                for name, result in document["models"].items()
                if name.startswith(task) and "Muon" not in name
                for runs in [result["runs"].get(steps, {})]
                if schedule in runs
                for gains in [
                    seeds.differences(
                        runs[schedule]["runs"], runs["dense"]["runs"], "bits"
                    )
                ]
            ]
            workers, mean, low, high = np.transpose(points or [4 * [np.nan]])
            axis.errorbar(
                workers * 1.03**number,  # side by side
                mean,
                (mean - low, high - mean),
                capsize=3,
                **line_style(number, label),
            )
        axis.axhline(0, color="gray", linewidth=1)
        axis.set_title(task)
        axis.set_xscale("log", base=2)
        axis.set_xticks((2, 4, 8), ("2", "4", "8"))
    axes[1].set_ylabel("loss minus dense, bits (95% interval)")
    axes[2].set_xlabel("workers")
    finish(figure, "local_schedule")


def run_bytes(document: dict) -> None:
    """Draw how many times fewer bytes a run sends, by number of steps."""
    (result,) = document["models"].values()
    figure, (axis,) = panels(1)
    for number, (label, key) in enumerate(SENT.items()):
        settings, dtype = key.rsplit(", ", 1)
        points = [
            (run["steps"], run["steps"] * result["dense_bytes"] / run["bytes"])
            for run in result["runs"]
            if (run["settings"], run["value_dtype"]) == (settings, dtype)
        ]
        axis.plot(*np.transpose(points), **line_style(number, label))
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("steps of a run")
    axis.set_ylabel("times fewer bytes than dense")
    plain_log(axis)
    finish(figure, "run_bytes")


def accuracy(document: dict, name: str = "accuracy") -> None:
    """Draw validation loss by step, a panel per task or optimizer."""
    models = {
        task: result
        for task, result in document["models"].items()
        if result["runs"].keys() >= set(CURVES[name])
    }
    figure, axes = panels(len(models))
    for axis, (task, result) in zip(axes, models.items(), strict=True):
        for number, variant in enumerate(CURVES[name]):
            curves = [run["curve"] for run in result["runs"][variant]]
            steps = [point["step"] for point in curves[0]]
            bits = np.array([[p["bits"] for p in curve] for curve in curves])
            draw_runs(axis, steps, bits, number, variant)
        axis.set_title(task)
        axis.set_xlabel("step")
        axis.set_ylabel("validation loss, bits")
        plain_log(axis, "{x:g}")
    finish(figure, name)


def time_to_accuracy(document: dict) -> None:
    """Draw validation accuracy by seconds, a panel per link."""
    figure, axes = panels(len(document["models"]), sharey=True)
    for axis, (name, runs) in zip(
        axes, document["models"].items(), strict=True
    ):
        for number, (contender, run) in enumerate(runs.items()):
            _, seconds, reached = np.transpose(run["curve"])
            style = line_style(number, contender)
            axis.plot(seconds, 100 * reached, **(style | {"markersize": 3}))
        axis.set_title(name)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("validation accuracy, %")
        axis.set_ylim(80, 100)
    finish(figure, "time_to_accuracy")
