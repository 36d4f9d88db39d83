"""Does an optimizer reach the same accuracy inside SparseLoCo?

    python benchmarks/loco_accuracy.py [--models "text, AdamW"] [--seeds 5]
        [--variants "for_steps, 2 workers"]

See study.py. Variants with several local steps have neither warm-up nor
cool-down. With H steps per exchange, they send H thousandths of the entries, as
many per step as 99.9% does; plain averaging and DiLoCo send all entries. In
the long run, DiLoCo's outer momentum multiplies pseudo-gradients by
OUTER_RATE / (1 - OUTER_MOMENTUM), so DiLoCo is trained only at fractions of the
learning rate.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import study
import tensorflow as tf
from accuracy import FEW_STEPS, FEW_STEPS_SEEDS, MORE_STEPS, papers_stages
from study import DENSE, Family, Variant

import tf_optimizers as tfo
from tf_optimizers._compat.keras_internals import variable_index
from tf_optimizers.base.components import local_component

TUNING_SEEDS = (10_001,)
SEEDS = 5
FEW_STEPS_RATES = [2.0**k for k in range(-12, -5)]
DECAYS = (1.0, 0.9, 0.7, 0.5, 0.0)
# Learning rates, and residual decays to compare with that of `for_steps`.
SHORT_RUNS = {
    MORE_STEPS: ([2.0**k for k in range(-10, -6)], (1.0, 0.9, 0.8, 0.5)),
    "digits in 256 steps": ([2.0**k for k in range(-11, -6)], (1.0, 0.9)),
    # This task has 640 steps.
    "digits": ([2.0**k for k in range(-11, -6)], (0.95, 0.9, 0.7)),
}
UP_TO_996 = (0.75, 0.9375, 0.984375, 0.996)
ALL = {
    "sparsity": (0.0,),
    "rampup_step": 1,
    "rampdown_begin_step": None,
    "rampdown_step": 1,
}
OUTER_MOMENTUM = 0.9
OUTER_RATE = 0.7
DIVISORS = (2, 4, 8)  # Divisors of the learning rate, for DiLoCo.

Make = Callable[[Any], keras.optimizers.Optimizer]
INNER: dict[str, Make] = {
    "AdamW": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.01),
    "Lamb": lambda rate: tfo.Lamb(rate, weight_decay=0.01),
    "LANS": lambda rate: tfo.LANS(rate, weight_decay=0.01),
}
RATES = {
    "AdamW": [2.0**k for k in range(-9, -5)],
    "Lamb": [2.0**k for k in range(-8, -3)],
    "LANS": [2.0**k for k in range(-8, -3)],
}


class Multiple(keras.optimizers.schedules.LearningRateSchedule):
    """Multiplies another schedule by a factor."""

    def __init__(self, schedule: Callable, factor: float) -> None:
        super().__init__()
        self.schedule, self.factor = schedule, factor

    def __call__(self, step: Any) -> tf.Tensor:
        return self.schedule(step) * self.factor

    def get_config(self) -> dict:
        return {"schedule": self.schedule, "factor": self.factor}


class DiLoCo(tfo.SparseLoCo):
    """Averages pseudo-gradients, and applies Nesterov's momentum to the mean.

    For the mean pseudo-gradient d of a variable w over all workers:

        m <- OUTER_MOMENTUM m + d
        w <- w - OUTER_RATE (OUTER_MOMENTUM m + d)
    """

    def build(self, variables: list) -> None:
        super().build(variables)
        self._outer = [
            self.add_variable_from_reference(variable, "outer_momentum")
            for variable in variables
        ]

    def update_step(
        self, gradient: tf.Tensor, variable: Any, learning_rate: Any
    ) -> None:
        outer = self._outer[variable_index(self, variable)]
        outer = local_component(outer, variable)
        outer.assign(OUTER_MOMENTUM * outer + gradient)
        step = OUTER_RATE * (OUTER_MOMENTUM * outer + gradient)
        super().update_step(step, variable, learning_rate)


def from_75(
    workers: int, make: Make, factor: float = 1.0, **kwargs: Any
) -> Variant:
    """Return a variant with `papers_stages`, at `factor` x learning rate."""
    return Variant(
        workers,
        lambda rate, steps: tfo.SparseLoCo(
            make(Multiple(rate, factor)),
            **papers_stages(steps) | kwargs,
        ),
        SEEDS,
    )


def local_steps(make: Make, sync_every: int, sparsity: float) -> Variant:
    """Return a variant of two workers that exchange after several steps."""
    return Variant(
        2,
        lambda rate, _: tfo.SparseLoCo(
            make(rate), sync_every=sync_every, sparsity=(sparsity,)
        ),
        SEEDS,
    )


def diloco(make: Make, sync_every: int, divisor: int) -> Variant:
    """Return a variant of two workers with outer momentum, at a lower rate."""
    return Variant(
        2,
        lambda rate, _: DiLoCo(
            make(Multiple(rate, 1 / divisor)),
            sync_every=sync_every,
            sparsity=(0.0,),
        ),
        SEEDS,
    )


def variants(make: Make) -> dict[str, Variant]:
    """Return variants without and with compression."""
    return {
        **dense(make),
        **for_steps(make),
        "from 75 to 99.6%, 2 workers": from_75(2, make, sparsity=UP_TO_996),
        "from 75 to 99.9%, 2 workers": from_75(2, make),
        "from 75 to 99.6%, 4 workers": from_75(4, make, sparsity=UP_TO_996),
        "from 75 to 99.9%, 4 workers": from_75(4, make),
        # Shows the part of a difference that is not due to compression.
        "all sent, 4 workers": from_75(4, make, **ALL),
    }


def dense(make: Make) -> dict[str, Variant]:
    """Return the dense variant: the inner optimizer alone."""
    return {DENSE: Variant(1, lambda rate, _: make(rate), SEEDS)}


def for_steps(
    make: Make, name: str = "for_steps", **kwargs: Any
) -> dict[str, Variant]:
    """Return `for_steps` on 2, 4 and 8 workers; `kwargs` override settings."""
    return {
        f"{name}, {workers} workers": Variant(
            workers,
            lambda rate, steps: tfo.SparseLoCo.for_steps(
                steps, make(rate), **kwargs
            ),
            SEEDS,
        )
        for workers in (2, 4, 8)
    }


def with_higher_rates(make: Make) -> dict[str, Variant]:
    """Return `variants`, and variants with higher learning rates.

    The length of a step of a layerwise optimizer does not depend on noise, so
    the mean of the steps of N workers may be shorter by the root of N.
    """
    two, four = 2**0.5, 2.0
    return variants(make) | {
        "from 75 to 99.6%, 2 workers, rate x 1.4": from_75(
            2, make, two, sparsity=UP_TO_996
        ),
        "from 75 to 99.9%, 2 workers, rate x 1.4": from_75(2, make, two),
        "from 75 to 99.6%, 4 workers, rate x 2": from_75(
            4, make, four, sparsity=UP_TO_996
        ),
        "from 75 to 99.9%, 4 workers, rate x 2": from_75(4, make, four),
    }


def with_local_steps(make: Make) -> dict[str, Variant]:
    """Return `variants`, and variants with several steps per exchange."""
    outer = {
        f"DiLoCo every {sync_every} steps, rate / {divisor}": diloco(
            make, sync_every, divisor
        )
        for sync_every in (8, 30)
        for divisor in DIVISORS
    }
    rare = {
        "99.2%, every 8 steps": local_steps(make, 8, 0.992),
        "97%, every 30 steps": local_steps(make, 30, 0.97),
        "averages every 8 steps": local_steps(make, 8, 0.0),
        "averages every 30 steps": local_steps(make, 30, 0.0),
    }
    return variants(make) | rare | outer


def family(task: str, name: str) -> Family:
    """Return the family of an inner optimizer on a task."""
    more = {"AdamW": with_local_steps}.get(name, with_higher_rates)
    tried = (more if task == "text" else variants)(INNER[name])
    return Family(task, RATES[name], TUNING_SEEDS, tried)


def in_few_steps(make: Make) -> dict[str, Variant]:
    """Return variants for a task in which a replica sends each entry rarely."""
    decays = {
        f"from 75%, decay {decay:g}": from_75(2, make, residual_decay=decay)
        for decay in DECAYS
    }
    return dense(make) | for_steps(make) | decays


def with_decays(make: Make, decays: Sequence[float]) -> dict[str, Variant]:
    """Return the variants of `for_steps`, with its decay and other decays."""
    found = dense(make) | for_steps(make)
    for decay in decays:
        found |= for_steps(make, f"decay {decay:g}", residual_decay=decay)
    return found


FAMILIES = {
    f"{task}, {name}": family(task, name)
    for task in ("text", "code")
    for name in INNER
} | {
    f"{FEW_STEPS}, AdamW": Family(
        FEW_STEPS,
        FEW_STEPS_RATES,
        FEW_STEPS_SEEDS,
        in_few_steps(INNER["AdamW"]),
    ),
    **{
        f"{task}, AdamW": Family(
            task, rates, FEW_STEPS_SEEDS, with_decays(INNER["AdamW"], decays)
        )
        for task, (rates, decays) in SHORT_RUNS.items()
    },
}


if __name__ == "__main__":
    study.main(__file__, __doc__, FAMILIES)
