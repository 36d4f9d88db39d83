"""How much of an exchange is hidden by the local steps of the next round?

    sudo python benchmarks/overlap.py [--local-steps 8] [--rounds 24]
        [--turns 3] [--width 1414] [--round-trip 200] [--link "100 Mbit/s"]

Two workers train with `fit`, with and without `overlap`: without a link, over
the link with a short round trip, and over the link. These six cases take turns.
A turn is one call to `fit`. Its result is the median time of a round on the
first worker, over `--rounds` rounds after the first round. The time does not
include the exchange at the end of an epoch.

    exchange = time over the link - time without, both without `overlap`
    hidden   = 1 - (time over the link - time without) / exchange,
               both with `overlap`

At most the time of a round without a link can be hidden. A slow link also takes
CPU time from workers: more and smaller packets arrive, and the forwarders run
on the same cores. The share of the delay that is hidden does not include this
CPU time. For this share, the short round trip takes the place of "without".

Each worker has its own cores. If workers shared cores, a worker would compute
faster while another worker waits for the link, so that a wait would seem to
cost less than it takes.

Links, round trips and the model are those of latency.py. The optimizer is
`SparseLoCo.for_steps(3000, AdamW)`.
"""

import json
import os
import statistics
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hosts
import keras
import latency
import numpy as np
import results
import tables
import tqdm
from far_hosts import far_groups
from fit import Clock, make_model

import tf_optimizers as tfo

WORKERS = 2
FASTEST = "10 Gbit/s"
SHORT = 4.0  # ms. Without any delay, the forwarders would do less work.
KINDS = ("waits", "overlaps")


class Training(latency.Training):
    """One worker's rounds."""

    def __init__(self, width: int, local_steps: int) -> None:
        place = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        cores = sorted(os.sched_getaffinity(0))
        # TensorFlow has not started yet, so it makes a thread for each core.
        os.sched_setaffinity(0, cores[place::WORKERS])
        super().__init__("ours", width)
        self.local_steps, self.data = local_steps, self.data.repeat()

    def prepare(self, kind: str) -> None:
        """Build a model, and trace its step and its exchange."""
        with self.strategy.scope():
            optimizer = tfo.SparseLoCo.for_steps(
                *(3000, keras.optimizers.AdamW(1e-3)),
                sync_every=self.local_steps,
                overlap=kind == "overlaps",
            )
            self.models[kind] = make_model(self.width, optimizer)
        self.measure(kind, 2)

    def measure(self, kind: str, rounds: int) -> float:
        """Return the median time of a round, in ms, without the first round."""
        clock, steps = Clock(), self.local_steps
        data = self.data.take(steps * (rounds + 1))
        self.models[kind].fit(data, shuffle=False, verbose=0, callbacks=[clock])
        # The first time is that of the second step.
        times = np.reshape(clock.times[steps - 1 :], [rounds, steps])
        return float(np.median(times.sum(1)))


def measure(options: Any) -> dict[str, Any]:
    """Return the times of each turn, by kind and link."""
    command = [__file__, "--work", "--width", str(options.width)]
    command += ["--local-steps", str(options.local_steps)]
    places = {
        "none": (FASTEST, 0.0),
        "near": (options.link, SHORT),
        "link": (options.link, options.round_trip),
    }
    times: dict[str, dict[str, list[float]]] = {
        kind: {place: [] for place in places} for kind in KINDS
    }
    with (
        hosts.network(WORKERS) as net,
        far_groups(net, [command]) as (group,),
    ):
        for kind in KINDS:
            group.ask(function="prepare", kind=kind)
        for _ in tqdm.tqdm(range(options.turns)):
            for place, (rate, round_trip) in places.items():
                net.shape(rate)
                group.set_round_trip(round_trip)
                for kind in KINDS:
                    first, *_ = group.ask(
                        function="measure", kind=kind, rounds=options.rounds
                    )
                    times[kind][place].append(first)
    return {
        "link": options.link,
        "round_trip_ms": options.round_trip,
        "local_steps": options.local_steps,
        "rounds": options.rounds,
        "width": options.width,
        "ms": times,
        "hidden": hidden(times, "none"),
        "hidden_delay": hidden(times, "near"),
    }


def hidden(ms: dict[str, dict[str, list[float]]], place: str) -> list[float]:
    """Return the share of the time added to `place` that is hidden, by turn."""
    added = {
        kind: [
            far - near
            for far, near in zip(times["link"], times[place], strict=True)
        ]
        for kind, times in ms.items()
    }
    exchange = statistics.median(added["waits"])
    return [1 - more / exchange for more in added["overlaps"]]


def main() -> None:
    parser = results.options(__file__, __doc__, rounds=24, turns=3, width=1414)
    parser.add_argument("--local-steps", type=int, default=8)
    parser.add_argument("--round-trip", type=float, default=200.0)
    parser.add_argument("--link", choices=hosts.LINKS, default="100 Mbit/s")
    parser.add_argument("--work", action="store_true")
    options = parser.parse_args()
    if options.work:
        training = Training(options.width, options.local_steps)
        hosts.answer({"prepare": training.prepare, "measure": training.measure})
        return
    hosts.end_on_signals()
    name = f"{options.local_steps} local steps, {options.link}, "
    name += f"{options.round_trip:g} ms, width {options.width:,}"
    results.record(options.output, name, measure(options), tables.overlap)


if __name__ == "__main__":
    main()
