"""Turns the JSON of benchmarks into the tables of docs/benchmarks.md.

    python benchmarks/tables.py

Each table follows a comment that names the benchmark and the model, such as
`<!-- step_time: bert-base -->`. A new comment gets its table as well.
"""

import re
from collections.abc import Iterable
from statistics import median, quantiles

import results
from seeds import against_dense

ROOT = results.FOLDER.parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"

# The comment, and a table below it, if any: title and rows.
MARKED_TABLE = re.compile(
    r"<!-- (\w+): (.+?) -->\n(?:\n[^\n|<#]+\n\n(?:\|[^\n]*\n)+)?"
)
YARDSTICK = "ResourceApplyAdam"
# The kinds of work in a trace of `AdamOffload`, and their descriptions.
TRACED = {
    "GPU": "GPU: the model, weights",
    "MemcpyD2H": "gradients to the host",
    "host": "host: Adam",
    "MemcpyH2D": "updates to the GPU",
}


def table(
    title: str, header: str, rows: Iterable[Iterable[str]], texts: int = 1
) -> str:
    """Return a title, and a table of rows of cells.

    The first `texts` columns are aligned to the left, and other columns to the
    right.
    """
    numbers = len(header.strip("|").split("|")) - texts
    rule = ["---"] * texts + ["---:"] * numbers
    lines = [f"| {' | '.join(row)} |" for row in [rule, *rows]]
    return "\n".join([title, "", header, *lines])


def spread(values: list[float], digits: int = 1) -> tuple[str, str]:
    """Return two cells: the median and the quartiles."""
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.{digits}f}", f"{low:.{digits}f}-{high:.{digits}f}"


def millions(result: dict) -> str:
    return f"{result['parameters'] / 1e6:.1f} M parameters"


def described(name: str, result: dict) -> str:
    count = result["variables"]
    variables = f"{count:,} variable{'s' if count > 1 else ''}"
    return f"{name}: {variables}, {millions(result)}"


def step_time(name: str, result: dict) -> str:
    """Return medians, quartiles and ratios of one model's contenders."""
    unit = median(result["step_ms"][YARDSTICK])
    steps = len(result["step_ms"][YARDSTICK])
    return table(
        f"{described(name, result)}; {steps} steps of each optimizer",
        "| | median ms per step | quartiles, ms "
        f"| time relative to {YARDSTICK} | first call, s |",
        (
            [
                key,
                *spread(times),
                f"{median(times) / unit:.2f}",
                f"{result['first_call_ms'][key] / 1e3:.1f}",
            ]
            for key, times in result["step_ms"].items()
        ),
    )


def memory(name: str, result: dict) -> str:
    """Return the temporary memory of each contender's step."""
    largest = result["largest_bytes"] / 2**20
    return table(
        f"{name}: temporary memory of a step; the largest variable takes "
        f"{largest:,.1f} MiB",
        "| | MiB |",
        (
            [key, f"{size / 2**20:,.1f}"]
            for key, size in result["temporary_bytes"].items()
        ),
    )


def exchange(name: str, result: dict) -> str:
    """Return medians, quartiles and bytes of one model's contenders."""
    contenders = result["contenders"]
    steps = counted([len(each["step_ms"]) for each in contenders.values()])
    return table(
        f"{name}: {steps} training steps of {result['workers']} workers on "
        "loopback",
        "| | median ms per step | quartiles, ms "
        "| kB sent per step and worker |",
        (
            [key, *spread(contender["step_ms"]), kilobytes(contender)]
            for key, contender in contenders.items()
        ),
    )


def sharded_state(name: str, result: dict) -> str:
    """Return step times, state and bytes by layout and contender."""
    steps = [
        len(found["step_ms"])
        for contenders in result["layouts"].values()
        for found in contenders.values()
    ]
    return table(
        f"{described(name, result)}; {counted(steps)} steps of each optimizer",
        "| | state | median ms per step "
        "| state of the fullest replica, bytes per parameter "
        "| memory added to a process by build, bytes per parameter "
        "| memory added by build and two steps, bytes per parameter "
        "| MB sent per step and worker |",
        (
            [
                f"{layout}, {optimizer}",
                {"whole": "unsharded"}.get(kind, kind),
                f"{median(found['step_ms']):,.0f}",
                *(
                    f"{median(found[what]) / result['parameters']:.2f}"
                    if what in found  # PyTorch creates state in a step.
                    else ""
                    for what in ("state_bytes", "built_bytes", "resident_bytes")
                ),
                f"{median(found['bytes_per_step']) / 1e6:,.1f}",
            ]
            for layout, contenders in result["layouts"].items()
            for key, found in contenders.items()
            for optimizer, kind in [key.split(", ")]
        ),
        texts=2,
    )


def counted(numbers: list[int]) -> str:
    """Return the only number, or the range of numbers."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def kilobytes(contender: dict) -> str:
    return f"{median(contender['bytes_per_step']) / 1e3:,.1f}"


def fit(name: str, result: dict) -> str:
    """Return medians, quartiles and the ratio of `fit` to a custom loop."""
    unit = median(result["step_ms"]["custom loop"])
    steps = len(result["step_ms"]["fit"])
    return table(
        f"{name}: {steps} training steps of {result['workers']} workers",
        "| | median ms per step | quartiles, ms "
        "| time relative to the custom loop |",
        (
            [key, *spread(times, 2), f"{median(times) / unit:.2f}"]
            for key, times in result["step_ms"].items()
        ),
    )


def gpu(name: str, result: dict) -> str:
    """Return step times and memory, the largest models, or working times."""
    if "spans_ms" in result:
        return working_times(name, result["spans_ms"])
    if "parameters" in result:
        return table(
            f"{name}: the largest model that trains",
            "| | M parameters |",
            (
                [key, f"{count / 1e6:,.0f}"]
                for key, count in result["parameters"].items()
            ),
        )
    peaks = result.get("peak_bytes", {})
    steps = len(next(iter(result["step_ms"].values())))
    kind = "training steps with each optimizer"
    if "batch" not in name:
        kind = "steps of each optimizer"
    return table(
        f"{name.replace('4 x', '4 variables of')}: {steps} {kind} on an "
        f"{result['gpu']}",
        "| | median ms per step | quartiles, ms | first call, s |"
        + (" peak GPU memory, GB |" if peaks else ""),
        (
            [
                key,
                *spread(times),
                f"{result['first_call_ms'][key] / 1e3:.1f}",
                *([f"{peaks[key] / 1e9:.2f}"] if peaks else []),
            ]
            for key, times in result["step_ms"].items()
        ),
    )


def working_times(name: str, spans_of: dict) -> str:
    """Return when each kind of work begins and ends, and its duration."""
    return table(
        f"{name.removeprefix('trace, ')}: a training step of AdamOffload",
        "| | busy, ms | begins at, ms | ends at, ms |",
        (
            [
                label,
                f"{sum(end - start for start, end in spans_of[kind]):.1f}",
                f"{spans_of[kind][0][0]:.1f}",
                f"{spans_of[kind][-1][1]:.1f}",
            ]
            for kind, label in TRACED.items()
        ),
    )


def monitors(name: str, result: dict) -> str:
    """Return the time of monitors, relative to that of everything else."""
    rows = []
    for key, times in result["contenders"].items():
        spent, total = sum(times["monitor_s"]), sum(times["epoch_s"])
        steps = result["steps"] * len(times["epoch_s"])
        measurement = 1e3 * spent * result["every"] / steps
        share = f"{spent / (total - spent):.1%}"
        without = f"{1e3 * (total - spent) / steps:.2f}"
        rows.append([key, without, f"{measurement:.2f}", share])
    header = (
        "| | ms per step without monitor | ms per measurement | added time |"
    )
    title = f"{name} parameters, one measurement in {result['every']} steps"
    return table(title, header, rows)


def shaped_network(name: str, result: dict) -> str:
    """Return medians and quartiles by link, and bytes."""
    links = result["links"]
    rows = []
    for key, contender in next(iter(links.values())).items():
        cells = [key]
        for link in links.values():
            low, middle, high = quantiles(
                link[key]["step_ms"], n=4, method="inclusive"
            )
            cells.append(f"{middle:,.0f} ({low:,.0f}-{high:,.0f})")
        rows.append([*cells, kilobytes(contender)])
    _, hosts = name.split(", ")
    steps = [
        len(contender["step_ms"])
        for link in links.values()
        for contender in link.values()
    ]
    return table(
        f"{millions(result)}, {hosts}: median ms per step (quartiles) of "
        f"{counted(steps)} training steps, by link",
        f"| | {' | '.join(links)} | kB sent per step and host |",
        rows,
    )


def cost_model(name: str, compared: list[dict]) -> str:
    """Return measured and predicted steps, and their relative errors."""
    rows = []
    for one in compared:
        measured, predicted = one["measured_ms"], one["predicted_ms"]
        numbers = [f"{measured:,.0f}", f"{predicted:,.0f}"]
        numbers.append(f"{predicted / measured - 1:+.0%}")
        rows.append([one["model"], one["link"], one["contender"], *numbers])
    return table(
        f"{name}: measured and predicted time of a training step",
        "| parameters and hosts | link | exchange "
        "| measured ms | predicted ms | error |",
        rows,
        texts=3,
    )


def latency(name: str, result: dict) -> str:
    """Return median step times, and the number of round trips per step."""
    contenders = result["contenders"]
    keys = list(next(iter(contenders.values()))["step_ms"])
    heads = [f"{key} ms" for key in keys]
    heads += [f"round trips per step, at {key} ms" for key in keys[1:]]
    place = name.split(", width")[0]
    times = [found["step_ms"].values() for found in contenders.values()]
    steps = counted([len(each) for row in times for each in row])
    kind = (
        "steps or rounds" if "local steps" in " ".join(contenders) else "steps"
    )
    rows = [
        [
            contender.replace("an epoch a step", "fit, one step per epoch"),
            *(f"{median(t):.1f}" for t in found["step_ms"].values()),
            *(f"{trips:.1f}" for trips in found["round_trips"].values()),
        ]
        for contender, found in contenders.items()
    ]
    return table(
        f"{place}, {2 * result['width'] ** 2 / 1e6:.1f} M parameters: median "
        f"ms per step, over {steps} training {kind}, by the time of a round "
        "trip",
        f"| | {' | '.join(heads)} |",
        rows,
    )


def overlap(name: str, result: dict) -> str:
    """Return the times of a round, and the part of an exchange it hides."""
    each, link = result["hidden"], result["link"]
    share = f"{median(each):.0%} ({min(each):.0%} to {max(each):.0%})"
    return table(
        f"{result['local_steps']} local steps, "
        f"{2 * result['width'] ** 2 / 1e6:.1f} M parameters: median ms per "
        f"round, over {len(result['hidden'])} runs, by link and round trip",
        f"| overlap | 10 Gbit/s, 0 ms | {link}, 4 ms "
        f"| {link}, {result['round_trip_ms']:g} ms "
        "| hidden part of an exchange, median (range) |",
        (
            [
                str(kind == "overlaps"),
                *(f"{median(each):,.0f}" for each in times.values()),
                share if kind == "overlaps" else "",
            ]
            for kind, times in result["ms"].items()
        ),
    )


def messages(name: str, result: dict) -> str:
    """Return the times of a gather, by levels, workers and round trip."""
    return table(
        f"{name} parameters: gathers of the entries that DGC sends in a step; "
        f"a message takes {result['message_ms']:.2f} ms of CPU time",
        "| | workers | round trip, ms | median ms per gather | quartiles, ms "
        "| CPU ms per gather and worker |",
        (
            [
                *(levels, workers, key, *spread(each["ms"])),
                f"{each['processor_ms']:.2f}",
            ]
            for levels in ("one level", "two levels")
            for workers, found in result[levels].items()
            for key, each in found.items()
        ),
    )


def time_to_accuracy(name: str, result: dict) -> str:
    """Return the seconds in which each contender reached each accuracy."""
    targets = (0.9, 0.95, 0.97, 0.98)
    rows = []
    for key, run in result.items():
        cells = [key]
        for target in targets:
            times = [t for _, t, reached in run["curve"] if reached >= target]
            cells.append(f"{times[0]:.1f}" if times else "not reached")
        _, seconds, last = run["curve"][-1]
        cells += [f"{seconds:.1f}", f"{100 * last:.1f}%"]
        rows.append([*cells, f"{run['bytes'] / 1e6:,.0f}"])
    return table(
        f"{name}: seconds of training until each validation accuracy",
        f"| | {' | '.join(f'{100 * t:.0f}%' for t in targets)} "
        "| end of the run | final validation accuracy | MB sent per host |",
        rows,
    )


def accuracy(name: str, result: dict) -> str:
    """Return the test results of each variant, compared with dense."""
    rows = []
    for key, runs in result["runs"].items():
        cells = [key, str(len(runs))]
        cells += against_dense(runs, result["runs"]["dense"])
        rows.append(cells)
    return table(
        f"{name}, {result['parameters'] / 1e3:,.0f} k parameters, "
        f"{result['steps']:,} steps, batch size {result['batch_size']}",
        "| | seeds "
        "| test accuracy, % | accuracy minus dense, points (95% interval) "
        "| test loss, bits | loss minus dense, bits (95% interval) |",
        rows,
    )


def local_schedule(name: str, result: dict) -> str:
    """Return each schedule's results on the test split, next to dense."""
    rows = []
    for steps, schedules in result["runs"].items():
        for key, found in schedules.items():
            cells = [key, f"{int(steps):,}", str(len(found["runs"]))]
            cells.append(f"{found['fewer']:,.0f}")
            cells += against_dense(found["runs"], schedules["dense"]["runs"])
            rows.append(cells)
    place = name.replace(", long", "")
    if "Muon" not in place:
        place += ", AdamW"
    return table(
        f"{place}, {result['parameters'] / 1e3:,.0f} k parameters, batch size "
        f"{result['batch_size']}",
        "| | steps | seeds | times fewer bytes than dense, on two workers "
        "| test accuracy, % | accuracy minus dense, points (95% interval) "
        "| test loss, bits | loss minus dense, bits (95% interval) |",
        rows,
    )


def run_bytes(name: str, result: dict) -> str:
    """Return the ratio of dense bytes to those that a run sends."""
    cells: dict[tuple[str, str], list[str]] = {}
    lengths = sorted({run["steps"] for run in result["runs"]})
    for run in result["runs"]:
        key = (run["settings"], run["value_dtype"])
        dense = run["steps"] * result["dense_bytes"]
        cells.setdefault(key, []).append(f"{dense / run['bytes']:,.0f}")
    return table(
        f"{name}: bytes of a dense run, divided by those of the compressed run",
        f"| | {' | '.join(f'{steps:,} steps' for steps in lengths)} |",
        ([", ".join(key), *ratios] for key, ratios in cells.items()),
    )


_FUNCTIONS = (
    *(step_time, memory, exchange, sharded_state, fit, gpu, monitors),
    *(shaped_network, latency, overlap, messages, cost_model, accuracy),
    *(local_schedule, time_to_accuracy, run_bytes),
)
# Benchmarks whose results have the form of another benchmark's results.
_LIKE = {
    step_time: ("local_work", "pooled_memory"),
    shaped_network: ("many_hosts", "slow_network", "stages", "loco_network"),
    latency: (
        *("epoch_latency", "keras_latency", "loco_latency", "local_latency"),
    ),
    accuracy: ("loco_accuracy",),
}
# The function that makes a table of a benchmark's results, by benchmark.
TABLES = {function.__name__: function for function in _FUNCTIONS} | {
    name: function for function, names in _LIKE.items() for name in names
}


def fill_in(page: str) -> str:
    """Return a page with new tables below the comments that name them."""

    def new_table(found: re.Match) -> str:
        benchmark, name = found.groups()
        result = results.read(benchmark)["models"][name]
        new = TABLES[benchmark](name, result)
        return f"<!-- {benchmark}: {name} -->\n\n{new}\n"

    return MARKED_TABLE.sub(new_table, page)


def main() -> None:
    PAGE.write_text(fill_in(PAGE.read_text()))


if __name__ == "__main__":
    main()
