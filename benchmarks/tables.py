"""Turns the JSON of benchmarks into the Markdown tables of the README.

python benchmarks/tables.py
"""

import json
import pathlib
import statistics

RESULTS = pathlib.Path(__file__).parent / "results"
YARDSTICK = "ResourceApplyAdam"


def step_time(name: str, result: dict) -> str:
    """Return medians, quartiles and ratios of one model's contenders."""
    times = result["step_ms"]
    unit = statistics.median(times[YARDSTICK])
    lines = [
        f"{name}: {result['variables']:,} variables, "
        f"{result['parameters'] / 1e6:.1f} M parameters",
        "",
        "| | median ms | quartiles | x yardstick | first call s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for key, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        lines.append(
            f"| {key} | {median:.1f} | {low:.1f}-{high:.1f} "
            f"| {median / unit:.2f} "
            f"| {result['first_call_ms'][key] / 1e3:.1f} |"
        )
    return "\n".join(lines)


def exchange(name: str, result: dict) -> str:
    """Return medians, quartiles and bytes of one model's contenders."""
    lines = [
        f"{name}, {result['parameters'] / 1e6:.1f} M parameters",
        "",
        "| | median ms a step | quartiles | kB a step and worker |",
        "| --- | ---: | ---: | ---: |",
    ]
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
    lines = [
        name,
        "",
        "| | median ms a step | quartiles | x custom loop |",
        "| --- | ---: | ---: | ---: |",
    ]
    for key, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        lines.append(
            f"| {key} | {median:.2f} | {low:.2f}-{high:.2f} "
            f"| {median / unit:.2f} |"
        )
    return "\n".join(lines)


TABLES = {
    "step_time": step_time,
    "local_work": step_time,
    "exchange": exchange,
    "fit": fit,
}


def main() -> None:
    for benchmark, table in TABLES.items():
        document = json.loads((RESULTS / f"{benchmark}.json").read_text())
        for name, result in document["models"].items():
            print(table(name, result), end="\n\n")


if __name__ == "__main__":
    main()
