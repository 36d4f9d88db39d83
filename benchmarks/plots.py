"""Draws the JSON of benchmarks as the plots of docs/benchmarks.md.

python benchmarks/plots.py
"""

import functools
import statistics
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
import results
import tables
from panels import bars, finish, panels, plain_log
from training_plots import (
    accuracy,
    local_schedule,
    run_bytes,
    time_to_accuracy,
)

from tf_optimizers.demo.plots import COLORS, STYLE, line_style

WORKER_MODEL = "4 M"
# The quantities that sharding changes, and their names in the results.
SHARDED = {
    "bytes of state": "state_bytes",
    "time of a step": "step_ms",
    "bytes sent": "bytes_per_step",
}
# The models and the contenders of plots of relative step times.
RELATIVE = {
    "step_time": (
        ("20M", "small", "bert-base"),
        (
            *("tfo.Lamb", "keras Lamb, graph", "keras Lamb, XLA"),
            *("tfo.AdamOffload", "keras Adam, graph", "keras Adam, XLA"),
        ),
    ),
    "local_work": (
        ("20 M in 1", "4 M in 1", "4 M in 100"),
        ("DGC at 0.1%", "keras AdamW", "AdamW in SparseLoCo at 0.1%"),
    ),
}


def median_step(result: dict, link: str, contender: str) -> float:
    return statistics.median(result["links"][link][contender]["step_ms"])


def relative_step_time(document: dict, name: str) -> None:
    """Draw step times relative to TensorFlow's Adam, by model."""
    (models, contenders), rows = RELATIVE[name], {}
    for model in models:
        times = document["models"][model]["step_ms"]
        unit = statistics.median(times[tables.YARDSTICK])
        rows[model] = {
            contender: statistics.median(times[contender]) / unit
            for contender in contenders
        }
    bars(name, f"step time, relative to {tables.YARDSTICK}", rows)


def sharded_state(document: dict) -> None:
    """Draw the state, time and bytes of four workers, relative to unsharded."""
    found = document["models"]["bert-base"]["layouts"]["4 workers"]
    rows = {
        label: {
            optimizer: statistics.median(found[f"{optimizer}, sharded"][key])
            / statistics.median(found[f"{optimizer}, whole"][key])
            for optimizer in ("AdamW", "Lamb")
        }
        for label, key in SHARDED.items()
    }
    bars("sharded_state", "relative to the unsharded optimizer", rows)


def fit(document: dict) -> None:
    """Draw step times of a custom loop and of `fit`."""
    rows = {
        name.replace(", ", ",\n"): {
            loop: statistics.median(result["step_ms"][loop])
            for loop in ("custom loop", "fit")
        }
        for name, result in document["models"].items()
    }
    bars("fit", "ms a step", rows)


def shaped_network(document: dict, name: str = "shaped_network") -> None:
    """Draw step time by link, a panel per model and number of hosts."""
    models = {
        model: result
        for model, result in document["models"].items()
        if result["hosts"] in (2, 4)
    }
    figure, axes = panels(len(models), sharey=True)
    for axis, (model, result) in zip(axes, models.items(), strict=True):
        links = list(result["links"])
        for number, contender in enumerate(result["links"][links[0]]):
            times = [median_step(result, link, contender) for link in links]
            axis.plot(links, times, **line_style(number, contender))
        axis.set_title(model)
        axis.set_ylabel("ms a step")
        plain_log(axis)
    finish(figure, name)


def workers(document: dict, name: str = "workers") -> None:
    """Draw step time by number of hosts, a panel per link."""
    models = sorted(
        (
            result
            for model, result in document["models"].items()
            if model.startswith(f"{WORKER_MODEL},")
        ),
        key=lambda result: result["hosts"],
    )
    links = models[0]["links"]
    figure, axes = panels(len(links), sharey=True)
    for axis, link in zip(axes, links, strict=True):
        for number, contender in enumerate(links[link]):
            axis.plot(
                [result["hosts"] for result in models],
                [median_step(result, link, contender) for result in models],
                **line_style(number, contender),
            )
        axis.set_title(f"{WORKER_MODEL}, {link}")
        axis.set_xlabel("hosts, all on two cores")
        axis.set_xticks([result["hosts"] for result in models])
        axis.set_ylabel("ms a step")
        plain_log(axis)
    finish(figure, name)


def cost_model(document: dict) -> None:
    """Draw predictions for many workers: a column per model, a row per link."""
    predictions = document["predictions"]
    figure, axes = panels(sum(map(len, predictions.values())), sharey=True)
    for column, (model, links) in enumerate(predictions.items()):
        for axis, (link, contenders) in zip(
            axes[column :: len(predictions)], links.items(), strict=True
        ):
            for number, (name, times) in enumerate(contenders.items()):
                style = line_style(number, name)
                axis.plot(document["workers"], times, **style)
            axis.set_title(f"{model.split(',')[0]}, {link}")
            axis.set_xscale("log", base=2)
            axis.set_xlabel("workers")
            axis.set_ylabel("ms a step, predicted")
            plain_log(axis)
    finish(figure, "cost_model")


def winners(document: dict) -> None:
    """Draw the fastest exchange by workers and density, a panel per link."""
    names = sorted(set(np.ravel(list(document["winners"].values()))))
    figure, axes = panels(len(document["winners"]), sharey=True)
    for axis, (link, rows) in zip(
        axes, document["winners"].items(), strict=True
    ):
        for number, name in enumerate(names):
            where = [
                (workers, density)
                for density, row in zip(
                    document["densities"], rows, strict=True
                )
                for workers, winner in zip(
                    document["workers"], row, strict=True
                )
                if winner == name
            ]
            style = line_style(number, name) | {"linestyle": ""}
            axis.plot(*np.transpose(where or [(np.nan, np.nan)]), **style)
        axis.set_title(link)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel("workers")
        axis.set_ylabel("share of the entries that is sent")
    finish(figure, "winners")


def latency(document: dict) -> None:
    """Draw step time by round trip, a panel per number of workers."""
    models = document["models"]
    figure, axes = panels(len(models), sharey=True)
    # The legend is that of the first panel, which has all contenders.
    numbers: dict[str, int] = {}
    for axis, (name, result) in zip(axes, models.items(), strict=True):
        drawn = [
            (contender, found["step_ms"])
            for contender, found in result["contenders"].items()
            if contender.startswith("stock") or contender.endswith("fit")
        ]
        for contender, times in drawn:
            number = numbers.setdefault(contender, len(numbers))
            axis.plot(
                [float(milliseconds) for milliseconds in times],
                [statistics.median(each) for each in times.values()],
                **line_style(number, contender),
            )
        axis.set_title(name)
        axis.set_xlabel("ms of a round trip")
        axis.set_ylabel("ms a step")
        plain_log(axis)
    finish(figure, "latency")


def growth(document: dict) -> None:
    """Draw step time by number of variables, and of parameters."""
    figure, axes = panels(2)
    for axis, kind in zip(axes, ("variables", "parameters"), strict=True):
        results = [
            result
            for name, result in document["models"].items()
            if name.startswith(kind)
        ]
        for number, contender in enumerate(results[0]["step_ms"]):
            axis.plot(
                [result[kind] for result in results],
                [
                    statistics.median(result["step_ms"][contender])
                    for result in results
                ],
                **line_style(number, contender),
            )
        axis.set_xscale("log")
        axis.set_xlabel(kind)
        axis.set_ylabel("ms a step")
        plain_log(axis, "{x:g}")
    shared = document["models"]["variables, 1"]["parameters"]
    axes[0].set_title(f"{shared / 1e6:.1f} M parameters")
    axes[1].set_title("one variable")
    finish(figure, "growth")


def offload(document: dict) -> None:
    """Draw step time and GPU memory by batch size, for Adam and AdamOffload."""
    by_batch = {
        int(name.split("batch ")[1].replace(",", "")): result
        for name, result in document["models"].items()
        if name.startswith("396 M, float32")
    }
    batches = sorted(by_batch)
    figure, axes = panels(2)
    for number, contender in enumerate(("keras Adam", "tfo.AdamOffload")):
        style = line_style(number, contender)
        results = [by_batch[batch] for batch in batches]
        times = [statistics.median(r["step_ms"][contender]) for r in results]
        memory = [r["peak_bytes"][contender] / 1e9 for r in results]
        axes[0].plot(batches, times, **style)
        axes[1].plot(batches, memory, **style)
    for axis, label in zip(
        axes, ("ms a step", "peak GPU memory, GB"), strict=True
    ):
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axis.tick_params(axis="x", rotation=45)
        axis.set_xlabel("rows of a batch")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    finish(figure, "offload")


def offload_trace(document: dict) -> None:
    """Draw when the GPU, copies and the host work, a panel per batch size."""
    traces = {
        name: result["spans_ms"]
        for name, result in document["models"].items()
        if "spans_ms" in result
    }
    figure, axes = panels(len(traces))
    figure.set_size_inches(9, 1 + 2 * len(traces))
    for axis, (name, spans) in zip(axes, traces.items(), strict=True):
        for number, kind in enumerate(tables.TRACED):
            axis.broken_barh(
                [(start, end - start) for start, end in spans[kind]],
                (number - 0.4, 0.8),
                color=COLORS[number],
            )
        axis.set_yticks(range(len(tables.TRACED)), list(tables.TRACED.values()))
        axis.invert_yaxis()
        axis.set_title(name.removeprefix("trace, "))
        axis.set_xlabel("ms")
    finish(figure, "offload_trace")


PLOTS: dict[str, Sequence[Callable[[dict], None]]] = {
    "shaped_network": (shaped_network, workers),
    "loco_network": (functools.partial(shaped_network, name="loco_network"),),
    "slow_network": (functools.partial(workers, name="slow_network"),),
    "latency": (latency,),
    "cost_model": (cost_model, winners),
    "accuracy": (accuracy,),
    "loco_accuracy": (functools.partial(accuracy, name="loco_accuracy"),),
    "time_to_accuracy": (time_to_accuracy,),
    "growth": (growth,),
    "sharded_state": (sharded_state,),
    "step_time": (functools.partial(relative_step_time, name="step_time"),),
    "local_work": (functools.partial(relative_step_time, name="local_work"),),
    "fit": (fit,),
    "local_schedule": (local_schedule,),
    "run_bytes": (run_bytes,),
    "gpu": (offload, offload_trace),
}


def main() -> None:
    with matplotlib.rc_context(STYLE):
        for benchmark, draw in PLOTS.items():
            document = results.read(benchmark)
            for plot in draw:
                plot(document)


if __name__ == "__main__":
    main()
