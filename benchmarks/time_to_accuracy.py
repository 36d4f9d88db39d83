"""How long does training on a slow network take to reach an accuracy?

    sudo python benchmarks/time_to_accuracy.py [--links "100 Mbit/s"]

Two hosts train the digits of accuracy.py, with dense momentum SGD under
TensorFlow's strategy and with DGC under ours. Both use the learning rate that
accuracy.py has found. Hosts are those of shaped_network.py or, with a round
trip, of far_hosts.py. Only training steps are timed; accuracy is measured on
the validation split after every epoch.
"""

import argparse
import os
import time
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import accuracy
import hosts
import keras
import results
import tables
import tqdm
from exchange import OURS, STOCK
from far_hosts import far_groups
from study import DENSE
from tasks import TASKS, TaskTrainer

from tf_optimizers.demo.results import write_json

TASK = "digits"
SEED = 0


class Link(NamedTuple):
    """A key of `hosts.LINKS`, and the milliseconds of a round trip."""

    rate: str
    round_trip: float = 0.0


LINKS = {
    "100 Mbit/s": Link("100 Mbit/s"),
    "1 Gbit/s": Link("1 Gbit/s"),
    "20 ms": Link("10 Gbit/s", 20.0),
}
CONTENDERS = {
    "dense, float32": (STOCK, DENSE),
    "DGC": (OURS, "DGC, 2 workers"),
}


class HostTraining:
    """The training of one host."""

    def __init__(self, contender: str) -> None:
        strategy, variant = CONTENDERS[contender]
        optimizer = accuracy.VARIANTS[variant].make_optimizer
        self.task = TASKS[TASK]
        self.trainer = TaskTrainer(self.task, strategy(), optimizer)
        keras.utils.set_random_seed(SEED)
        self.weights = self.task.make_model().get_weights()

    def train_first_step(self, rate: float) -> None:
        """Trace the step, before anything is measured."""
        self.trainer.reset(self.weights, rate, self.task.steps)
        self.trainer.train_step(*next(self.task.batches(SEED)))

    def train(self, rate: float) -> dict:
        """Train from the start; return seconds and accuracy by epoch."""
        trainer, curve, seconds = self.trainer, [], 0.0
        trainer.reset(self.weights, rate, self.task.steps)
        before = hosts.sent()
        for step, batch in enumerate(self.task.batches(SEED), 1):
            start = time.perf_counter()
            trainer.train_step(*batch)
            seconds += time.perf_counter() - start
            if step % self.task.steps_per_epoch == 0:
                reached = trainer.evaluate("validation")["accuracy"]
                curve.append((step, seconds, reached))
        return {"curve": curve, "bytes": hosts.sent() - before}


def learning_rate() -> float:
    return results.read("accuracy")["models"][TASK]["learning_rate"]


def train_over(link: Link, rate: float) -> dict[str, dict]:
    """Train with one contender after another; return their results."""
    commands = [[__file__, "--work", name] for name in CONTENDERS]
    join = far_groups if link.round_trip else hosts.groups
    with hosts.network(2) as net, join(net, commands) as groups:
        for group in groups:
            group.ask(function="train_first_step", rate=rate)
        net.shape(link.rate)
        for group in groups if link.round_trip else ():
            group.set_round_trip(link.round_trip)
        runs = zip(CONTENDERS, tqdm.tqdm(groups), strict=True)
        return {
            name: group.ask(function="train", rate=rate)[0]
            for name, group in runs
        }


def main() -> None:
    parser = results.options(__file__, __doc__)
    parser.add_argument(
        "--links", nargs="+", choices=LINKS, default=list(LINKS)
    )
    parser.add_argument("--work", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        training = HostTraining(arguments.work)
        hosts.answer(
            {
                "train": training.train,
                "train_first_step": training.train_first_step,
            }
        )
        return
    hosts.end_on_signals()
    path, rate = arguments.output, learning_rate()
    document = results.load(path)
    for link in arguments.links:
        name = f"{TASK}, {link}"
        result = document["models"][name] = train_over(LINKS[link], rate)
        write_json(document, path)
        print(tables.time_to_accuracy(name, result))


if __name__ == "__main__":
    main()
