"""Which exchange is the fastest, from 2 to 1,024 workers?

    python benchmarks/cost_model.py [--round-trip 20]

The time of a step is that of its computation, as measured without an exchange,
plus

    message x messages + (round + round trip) x rounds
        + bytes / (share of the link's speed) + handling x bytes
        + selection x parameters (DGC only) + fixed

`messages` and `bytes` are those that one worker sends. All messages of a round
leave at the same time. The round trip is that of the link, and 0 in the
measurements. The time of a message was measured by messages.py. Messages,
handling, selection and the fixed part take processor time: hosts that share
cores wait for each other. The other five coefficients are fitted to
results/shaped_network.json by non-negative least squares of relative errors,
and validated on the models in HELD_OUT, which the fit leaves out. Predictions
assume separate cores for every worker.
"""

import json
import pathlib
import statistics
from typing import NamedTuple

import numpy as np
import results
import tables
from scipy.optimize import nnls
from traffic import Exchange, all_gather, dense, reduce_scatter

from tf_optimizers.demo.results import write_json

HELD_OUT = ("4 M, 3 hosts", "4 M, 8 hosts")
CORES = 2

SPEEDS = {
    "10 Mbit/s": 1.25e6,
    "100 Mbit/s": 1.25e7,
    "1 Gbit/s": 1.25e8,
    "10 Gbit/s": 1.25e9,
}
FAR = "1 Gbit/s"
BASE = "no exchange"
DENSITY = 0.001
DENSITIES = [2.0**-k for k in range(14, 1, -1)]
LARGEST = "20 M, 2 hosts"
WORKERS = [2**k for k in range(1, 11)]
COEFFICIENTS = ("message", "round", "link", "handling", "selection", "fixed")

MEASURED = {
    "dense, float32": dense(4),
    "dense, float16": dense(2),
    "DGC, float32 values": all_gather("float32"),
    "DGC, float16 values": all_gather("float16"),
    "DGC, int4 values": all_gather("int4"),
}
SHARDS = "DGC, float16 values, reduce-scatter"
DENSE_AT_ONCE = "dense, float32, at once"
BUILT = MEASURED | {
    SHARDS: reduce_scatter("float16"),
    "DGC, int4 values, reduce-scatter": reduce_scatter("int4"),
    DENSE_AT_ONCE: dense(4, at_once=True),
}
DRAWN = (
    *("dense, float32", DENSE_AT_ONCE),
    *("DGC, float16 values", "DGC, int4 values", SHARDS),
)
PREDICTED = {name: BUILT[name] for name in DRAWN} | {
    "DGC, float16 values, one level": all_gather("float16", one_level=True),
}


class Observation(NamedTuple):
    """A measured step; times in seconds."""

    model: str
    link: str
    contender: str
    computation: float
    step: float
    features: np.ndarray


def features(
    exchange: Exchange, n: int, density: float, workers: int, speed: float
) -> np.ndarray:
    """Return the factors of the coefficients, if each worker has a core."""
    messages, count, rounds = exchange.traffic(n, density, workers)
    selection = n if exchange.selects else 0
    return np.array([messages, rounds, count / speed, count, selection, 1.0])


def crowded(row: np.ndarray, workers: int) -> np.ndarray:
    """Return the features of workers that share the cores of one machine."""
    shared = max(1.0, workers / CORES)
    return row * np.array([shared, 1, 1, shared, shared, shared])


def observations(models: dict) -> list[Observation]:
    """Return the median step time of each link, host count and contender."""
    return [
        Observation(
            model,
            link,
            name,
            *(
                statistics.median(contenders[key]["step_ms"]) / 1e3
                for key in (BASE, name)
            ),
            crowded(
                features(
                    exchange,
                    result["parameters"],
                    DENSITY,
                    result["hosts"],
                    SPEEDS[link],
                ),
                result["hosts"],
            ),
        )
        for model, result in models.items()
        for link, contenders in result["links"].items()
        for name, exchange in MEASURED.items()
    ]


def fit(seen: list[Observation], message: float) -> np.ndarray:
    """Return the coefficients with the smallest relative errors of steps.

    The first coefficient is known: the processor seconds of a message.
    """
    steps = np.array([one.step for one in seen])
    known = np.array([message, *np.zeros(len(COEFFICIENTS) - 1)])
    rows = np.array([one.features for one in seen])
    rest = steps - [one.computation for one in seen] - rows @ known
    rows = rows[:, 1:] / steps[:, np.newaxis]
    return np.array([message, *nnls(rows, rest / steps)[0]])


def compare(seen: list[Observation], coefficients: np.ndarray) -> list[dict]:
    """Return measured step times next to predicted step times."""
    return [
        {
            "model": one.model,
            "link": one.link,
            "contender": one.contender,
            "measured_ms": 1e3 * one.step,
            "predicted_ms": 1e3
            * float(one.computation + one.features @ coefficients),
        }
        for one in seen
    ]


class Link(NamedTuple):
    """A link to predict steps for."""

    speed: float  # Bytes per second.
    round_trip: float  # Seconds.


def links(round_trip: float) -> dict[str, Link]:
    """Return the measured links, and a link with a `round_trip` in ms."""
    near = {name: Link(speed, 0.0) for name, speed in SPEEDS.items()}
    far = Link(SPEEDS[FAR], round_trip / 1e3)
    return near | {f"{FAR}, {round_trip:g} ms": far}


def predict(
    parameters: int,
    computation: float,
    coefficients: np.ndarray,
    density: float,
    links: dict[str, Link],
    exchanges: dict[str, Exchange] = PREDICTED,
) -> dict:
    """Return milliseconds per step, by link, exchange and number of workers."""

    def step(exchange: Exchange, workers: int, link: Link) -> float:
        row = features(exchange, parameters, density, workers, link.speed)
        rounds = exchange.traffic(parameters, density, workers).rounds
        waiting = rounds * link.round_trip
        return 1e3 * float(computation + row @ coefficients + waiting)

    return {
        name: {
            kind: [step(exchange, workers, link) for workers in WORKERS]
            for kind, exchange in exchanges.items()
        }
        for name, link in links.items()
    }


def fastest(steps: dict[str, list[float]], column: int) -> str:
    return min(steps, key=lambda name: steps[name][column])


def winners(
    parameters: int, coefficients: np.ndarray, links: dict[str, Link]
) -> dict:
    """Return the fastest exchange, by link: [densities, workers]."""
    steps = [
        predict(parameters, 0.0, coefficients, density, links, BUILT)
        for density in DENSITIES
    ]
    return {
        link: [
            [fastest(step[link], column) for column in range(len(WORKERS))]
            for step in steps
        ]
        for link in links
    }


def main() -> None:
    parser = results.options(__file__, __doc__)
    parser.add_argument(
        "--round-trip", type=float, default=20, help="ms, of a far link"
    )
    parser.add_argument(
        "--input", type=pathlib.Path, default=results.path_of("shaped_network")
    )
    arguments = parser.parse_args()
    models = json.loads(arguments.input.read_text())["models"]
    seen = observations(models)
    fitted = [one for one in seen if one.model not in HELD_OUT]
    held_out = [one for one in seen if one.model in HELD_OUT]
    message = results.read("messages")["models"]["4 M"]["message_ms"] / 1e3
    coefficients = fit(fitted, message)
    predicted = links(arguments.round_trip)
    document = {
        "coefficients": dict(zip(COEFFICIENTS, coefficients, strict=True)),
        "workers": WORKERS,
        "models": {
            "fitted": compare(fitted, coefficients),
            "held out": compare(held_out, coefficients),
        },
        "densities": DENSITIES,
        "winners": winners(
            models[LARGEST]["parameters"], coefficients, predicted
        ),
        "predictions": {
            model: predict(
                result["parameters"],
                computation_alone(seen, model),
                coefficients,
                DENSITY,
                predicted,
            )
            for model, result in models.items()
            if result["hosts"] == CORES
        },
    }
    write_json(document, arguments.output)
    for name, compared in document["models"].items():
        print(tables.cost_model(name, compared), end="\n\n")


def computation_alone(seen: list[Observation], model: str) -> float:
    """Return a step's seconds without exchange, if each worker has a core."""
    return statistics.median(o.computation for o in seen if o.model == model)


if __name__ == "__main__":
    main()
