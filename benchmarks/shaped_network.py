"""What does a training step cost on a slow network, with each exchange?

    sudo python benchmarks/shaped_network.py [--hosts 2 4] [--models "4 M"]
        [--links "10 Mbit/s"] [--family AdamW]

Hosts are network namespaces of this machine (see hosts.py), and share its
cores: "no exchange" is the time in which all hosts compute in parallel, without
messages. The processes of all contenders of a model run at the same time.
Contenders take turns on every link, in rounds. Times are the first host's.
Bytes are the mean of the bytes that the hosts' interfaces send. A large packet,
which the kernel would split before a real wire, counts with one header.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hosts
import keras
import numpy as np
import results
import tables
import tensorflow as tf
import tqdm
from exchange import OURS, STOCK, make_step

import tf_optimizers as tfo
from tf_optimizers.compression import exchanges
from tf_optimizers.compression.exchanges import LEAST_SAVING

# Depth and width of a stack of square layers without biases.
MODELS = {"4 M": (2, 1414), "20 M": (2, 3162)}
RATE, MOMENTUM = 1e-3, 0.9

WARM_UP = 2
ROUNDS = 3
SECONDS_PER_ROUND = 0.7
STEPS_PER_ROUND = 10
SECONDS_TO_SEND = 0.2


class Momentum:
    """SGD with momentum by TensorFlow's fused kernel.

    Args:
        dtype: The dtype in which gradients are summed; None does not sum them.
    """

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype

    def build(self, variables: Sequence) -> None:
        """Create the velocities."""
        self.velocities = [tf.Variable(tf.zeros(v.shape)) for v in variables]

    def apply(
        self, gradients: Sequence[tf.Tensor], variables: Sequence
    ) -> None:
        """Sum gradients over hosts, unless `dtype` is None, and step."""
        context = tf.distribute.get_replica_context()
        if self.dtype:
            gradients = context.all_reduce(
                tf.distribute.ReduceOp.SUM,
                [tf.cast(gradient, self.dtype) for gradient in gradients],
            )
        for gradient, variable, velocity in zip(
            gradients, variables, self.velocities, strict=True
        ):
            weight, accumulator = (
                context.strategy.experimental_local_results(v)[0].handle
                for v in (variable.value, velocity)
            )
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight,
                accum=accumulator,
                lr=RATE,
                grad=tf.cast(gradient, tf.float32),
                momentum=MOMENTUM,
            )


def momentum(dtype: str | None) -> Callable:
    return lambda: Momentum(dtype)


def dgc(by_shards: bool = False, **kwargs: Any) -> Callable:
    """Return a factory of DGCMomentum, which may always sum by shards."""

    def make() -> tfo.DGCMomentum:
        exchanges.LEAST_SAVING = 0 if by_shards else LEAST_SAVING
        return tfo.DGCMomentum(RATE, momentum=MOMENTUM, **kwargs)

    return make


def adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(RATE)


def loco(**kwargs: str) -> Callable:
    """Return a factory of AdamW in SparseLoCo."""
    return lambda: tfo.SparseLoCo(adamw(), **kwargs)


STRATEGIES = {"stock": STOCK, "ours": OURS}
CONTENDERS = {
    "no exchange": ("stock", momentum(None)),
    "dense, float32": ("stock", momentum("float32")),
    "dense, float16": ("stock", momentum("float16")),
    "DGC, stock strategy": ("stock", dgc()),
    "DGC, float32 values": ("ours", dgc()),
    "DGC, float16 values": ("ours", dgc(value_dtype="float16")),
    "DGC, int4 values": ("ours", dgc(value_dtype="int4")),
}
ONE_PERCENT = {
    f"DGC at 1%, {dtype} values": (
        "ours",
        dgc(value_dtype=dtype, sparsity=[0.99]),
    )
    for dtype in ("float32", "float16", "int4", "int2")
}
STAGES = {
    f"DGC at {100 * (1 - sparsity):g}%, int4 values": (
        "ours",
        dgc(value_dtype="int4", sparsity=[sparsity]),
    )
    for sparsity in (0.75, 0.9375, 0.984375, 0.996, 0.999)
}
MANY_HOSTS = {
    f"DGC, {dtype} values{suffix}": ("ours", dgc(by_shards, value_dtype=dtype))
    for dtype in ("float32", "float16", "int4")
    for by_shards, suffix in ((False, ""), (True, ", reduce-scatter"))
}
ADAMW = {
    "AdamW, dense": ("stock", adamw),
    **{
        f"AdamW in SparseLoCo, {dtype} values": (
            "ours",
            loco(value_dtype=dtype),
        )
        for dtype in ("float32", "float16", "int4")
    },
}
FAMILIES = {
    "momentum": CONTENDERS,
    "1%": ONE_PERCENT,
    "stages": STAGES,
    "many hosts": MANY_HOSTS,
    "AdamW": ADAMW,
}
ALL = {k: v for family in FAMILIES.values() for k, v in family.items()}


class HostSteps:
    """One host's steps, with every contender of a strategy."""

    def __init__(self, strategy: str, model: str) -> None:
        self.strategy = STRATEGIES[strategy]()
        self.model = model
        self.steps: dict[str, Callable] = {}

    def prepare(self, contender: str) -> None:
        """Trace the step and run it a few times."""
        _, make_optimizer = ALL[contender]
        step = make_step(self.strategy, make_optimizer, *MODELS[self.model])
        self.steps[contender] = step
        for _ in range(WARM_UP):
            step()

    def measure(self, contender: str, steps: int) -> dict:
        """Return the time of each step, and the bytes of all steps."""
        before, times = hosts.sent(), []
        for _ in range(steps):
            start = time.perf_counter()
            self.steps[contender]()
            times.append(1e3 * (time.perf_counter() - start))
        # Bytes of a step may still be in flight when it ends.
        time.sleep(SECONDS_TO_SEND)
        return {"step_ms": times, "bytes": hosts.sent() - before}


def compare(
    net: hosts.Network, model: str, contenders: list[str], links: list[str]
) -> dict:
    """Return the step times of contenders, by link."""
    strategies = sorted({ALL[name][0] for name in contenders})
    commands = [
        [__file__, "--work", strategy, "--models", model]
        for strategy in strategies
    ]
    with hosts.groups(net, commands) as groups:
        group = dict(zip(strategies, groups, strict=True))
        asked = {name: group[ALL[name][0]] for name in contenders}
        for name, workers in asked.items():
            workers.ask(function="prepare", contender=name)
        return {
            link: compare_on(net, link, asked, f"{model}, {link}")
            for link in links
        }


def compare_on(
    net: hosts.Network, link: str, asked: dict[str, hosts.Group], title: str
) -> dict:
    """Let all contenders take turns on one link; return their results."""
    net.shape(link)
    results = {}
    for name, workers in asked.items():
        start = time.perf_counter()
        workers.ask(function="measure", contender=name, steps=1)
        fitting = int(SECONDS_PER_ROUND / (time.perf_counter() - start))
        steps = min(max(fitting, 1), STEPS_PER_ROUND)
        results[name] = {"steps": steps, "step_ms": [], "bytes_per_step": []}
    turns = [name for _ in range(ROUNDS) for name in asked]
    for name in tqdm.tqdm(turns, title):
        result = results[name]
        answers = asked[name].ask(
            function="measure", contender=name, steps=result["steps"]
        )
        result["step_ms"] += answers[0]["step_ms"]
        result["bytes_per_step"].append(
            float(np.mean([a["bytes"] for a in answers])) / result["steps"]
        )
    return results


def main() -> None:
    parser = results.options(__file__, __doc__, MODELS)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--family", choices=FAMILIES, default="momentum")
    parser.add_argument(
        "--contenders", nargs="+", choices=ALL, help="default: the family"
    )
    parser.add_argument(
        "--links", nargs="+", choices=hosts.LINKS, default=list(hosts.LINKS)
    )
    parser.add_argument("--work", choices=STRATEGIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        steps = HostSteps(arguments.work, arguments.models[0])
        hosts.answer({"prepare": steps.prepare, "measure": steps.measure})
        return
    hosts.end_on_signals()
    contenders = arguments.contenders or list(FAMILIES[arguments.family])
    for count in arguments.hosts:
        for model in arguments.models:
            with hosts.network(count) as net:
                links = compare(net, model, contenders, arguments.links)
            depth, width = MODELS[model]
            name = f"{model}, {count} host{'s' * (count > 1)}"
            result = {
                "parameters": depth * width**2,
                "hosts": count,
                "links": links,
            }
            results.record(
                arguments.output, name, result, tables.shaped_network
            )


if __name__ == "__main__":
    main()
