"""Turns the JSON of benchmarks into the tables of README and docs.

    python benchmarks/tables.py

A table stands below a comment that names benchmark and model, as in
`<!-- step_time: bert-base -->`; a new comment gets its table, too.
"""

import json
import pathlib
import re
import statistics

import numpy as np
from scipy import stats

RESULTS = pathlib.Path(__file__).parent / "results"
ROOT = RESULTS.parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")

# The comment, and the table that may stand below it: title and rows.
MARKED_TABLE = re.compile(
    r"<!-- (\w+): (.+?) -->\n(?:\n[^\n|<#]+\n\n(?:\|[^\n]*\n)+)?"
)
YARDSTICK = "ResourceApplyAdam"


def heading(title: str, header: str) -> list[str]:
    """Return the lines above a table's rows.

    Columns without a name hold names, on the left; the others hold figures.
    """
    names = header.strip("|").split("|")
    rule = " | ".join("---:" if name.strip() else "---" for name in names)
    return [title, "", header, f"| {rule} |"]


def step_time(name: str, result: dict) -> str:
    """Return medians, quartiles and ratios of one model's contenders."""
    times = result["step_ms"]
    unit = statistics.median(times[YARDSTICK])
    lines = heading(
        f"{name}: {result['variables']:,} variables, "
        f"{result['parameters'] / 1e6:.1f} M parameters",
        "| | median ms | quartiles | x yardstick | first call s |",
    )
    for key, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        lines.append(
            f"| {key} | {median:.1f} | {low:.1f}-{high:.1f} "
            f"| {median / unit:.2f} "
            f"| {result['first_call_ms'][key] / 1e3:.1f} |"
        )
    return "\n".join(lines)


def memory(name: str, result: dict) -> str:
    """Return the temporary memory of each contender's step."""
    largest = result["largest_bytes"] / 2**20
    lines = heading(
        f"{name}: the largest variable has {largest:,.1f} MiB",
        "| | temporary MiB |",
    )
    for key, size in result["temporary_bytes"].items():
        lines.append(f"| {key} | {size / 2**20:,.1f} |")
    return "\n".join(lines)


def exchange(name: str, result: dict) -> str:
    """Return medians, quartiles and bytes of one model's contenders."""
    lines = heading(
        f"{name}, {result['parameters'] / 1e6:.1f} M parameters",
        "| | median ms a step | quartiles | kB a step and worker |",
    )
    for key, contender in result["contenders"].items():
        low, median, high = statistics.quantiles(contender["step_ms"], n=4)
        sent = statistics.median(contender["bytes_per_step"]) / 1e3
        lines.append(
            f"| {key} | {median:.1f} | {low:.1f}-{high:.1f} | {sent:,.1f} |"
        )
    return "\n".join(lines)


def fit(name: str, result: dict) -> str:
    """Return medians, quartiles and the ratio of `fit` to a custom loop."""
    times = result["step_ms"]
    unit = statistics.median(times["custom loop"])
    lines = heading(
        name,
        "| | median ms a step | quartiles | x custom loop |",
    )
    for key, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        lines.append(
            f"| {key} | {median:.2f} | {low:.2f}-{high:.2f} "
            f"| {median / unit:.2f} |"
        )
    return "\n".join(lines)


def monitors(name: str, result: dict) -> str:
    """Return what a monitor adds to the time of everything else."""
    lines = heading(
        f"{name} parameters",
        "| | ms a step without | a measurement, ms | share of the time |",
    )
    for key, times in result["contenders"].items():
        spent, total = sum(times["monitor_s"]), sum(times["epoch_s"])
        steps = result["steps"] * len(times["epoch_s"])
        lines.append(
            f"| {key} | {1e3 * (total - spent) / steps:.2f} "
            f"| {1e3 * spent * result['every'] / steps:.2f} "
            f"| {spent / (total - spent):.1%} |"
        )
    return "\n".join(lines)


def shaped_network(name: str, result: dict) -> str:
    """Return medians and quartiles by link, and bytes."""
    links = result["links"]
    lines = heading(
        f"{name}, {result['parameters'] / 1e6:.1f} M parameters; median ms a "
        "step (quartiles)",
        f"| | {' | '.join(links)} | kB a step and host |",
    )
    for key, contender in next(iter(links.values())).items():
        cells = []
        for link in links.values():
            low, median, high = statistics.quantiles(
                link[key]["step_ms"], n=4, method="inclusive"
            )
            cells.append(f"{median:,.0f} ({low:,.0f}-{high:,.0f})")
        sent = statistics.median(contender["bytes_per_step"]) / 1e3
        lines.append(f"| {key} | {' | '.join(cells)} | {sent:,.1f} |")
    return "\n".join(lines)


def cost_model(name: str, compared: list[dict]) -> str:
    """Return how far the predictions are from what was measured."""
    lines = heading(
        f"{name}: measured, and predicted ms a step",
        "| | | | measured | predicted | error |",
    )
    for one in compared:
        measured, predicted = one["measured_ms"], one["predicted_ms"]
        lines.append(
            f"| {one['model']} | {one['link']} | {one['contender']} "
            f"| {measured:,.0f} | {predicted:,.0f} "
            f"| {predicted / measured - 1:+.0%} |"
        )
    return "\n".join(lines)


def time_to_accuracy(name: str, result: dict) -> str:
    """Return when each contender has first reached each accuracy."""
    targets = (0.9, 0.95, 0.97, 0.98)
    lines = heading(
        f"{name}: seconds of training until a validation accuracy",
        f"| | {' | '.join(f'{100 * t:.0f} %' for t in targets)} "
        "| end of the run | in the end | MB sent by a host |",
    )
    for key, run in result.items():
        cells = []
        for target in targets:
            times = [t for _, t, reached in run["curve"] if reached >= target]
            cells.append(f"{times[0]:.1f}" if times else "not reached")
        _, seconds, last = run["curve"][-1]
        cells += [f"{seconds:.1f}", f"{100 * last:.1f} %"]
        cells.append(f"{run['bytes'] / 1e6:,.0f}")
        lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy(name: str, result: dict) -> str:
    """Return what each variant reached on the test split, against dense."""
    lines = heading(
        f"{name}, {result['parameters'] / 1e3:,.0f} k parameters, "
        f"{result['steps']:,} steps of {result['batch_size']}",
        "| | seeds | accuracy % | minus dense (95 %) "
        "| loss, bits | minus dense (95 %) |",
    )
    for key, runs in result["runs"].items():
        cells = [str(len(runs))]
        for metric, scale, digits in (("accuracy", 100, 2), ("bits", 1, 3)):
            values = [scale * run["test"][metric] for run in runs]
            dense = {
                run["seed"]: scale * run["test"][metric]
                for run in result["runs"]["dense"]
            }
            spread = f"{np.std(values, ddof=1):.{digits}f}"
            cells.append(f"{np.mean(values):.{digits}f} ± {spread}")
            gains = [
                value - dense[run["seed"]]
                for value, run in zip(values, runs, strict=True)
            ]
            cells.append("" if key == "dense" else interval(gains, digits))
        lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(differences: list[float], digits: int) -> str:
    """Return the mean and its 95 % confidence interval (Student's t)."""
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    mean = np.mean(differences)
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


TABLES = {
    "step_time": step_time,
    "local_work": step_time,
    "memory": memory,
    "exchange": exchange,
    "fit": fit,
    "monitors": monitors,
    "shaped_network": shaped_network,
    "many_hosts": shaped_network,
    "cost_model": cost_model,
    "accuracy": accuracy,
    "time_to_accuracy": time_to_accuracy,
}


def fill_in(page: str) -> str:
    """Return a page whose tables, below comments that name them, are new."""

    def table(found: re.Match) -> str:
        benchmark, name = found.groups()
        document = json.loads((RESULTS / f"{benchmark}.json").read_text())
        new = TABLES[benchmark](name, document["models"][name])
        return f"<!-- {benchmark}: {name} -->\n\n{new}\n"

    return MARKED_TABLE.sub(table, page)


def main() -> None:
    for path in PAGES:
        path.write_text(fill_in(path.read_text()))


if __name__ == "__main__":
    main()
