"""Schedules the sparsity: the fraction of entries that are not sent."""

import bisect
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from tf_optimizers.checks import check_decay_rate, check_integer

# The warm-up of arXiv:1712.01887.
WARM_UP = (0.75, 0.9375, 0.984375, 0.996, 0.999)
# The settings of `DGCMomentum.for_steps`, found by benchmarks/accuracy.py. The
# stage 0.75 is left out, because it would send most of a run's bytes.
RECOMMENDED, STAGES, VALUE_DTYPE = WARM_UP[1:], 16, "int4"
# In runs with `sync_every=1` that do not reach the stage `NO_DECAY_FROM`, the
# recommended `residual_decay` of `SparseLoCo` is `SHORT_RUNS_DECAY`.
# benchmarks/loco_accuracy.py found both numbers in runs of 96 to 256 steps.
# Longer runs need the updates that a decay would lose.
NO_DECAY_FROM, SHORT_RUNS_DECAY = WARM_UP[3], 0.7
# The settings of `recommended_updates` with local steps. The first three
# determine the sparsity; see `recommended_rounds`. benchmarks/local_schedule.py
# found the other three.
TIMES_FEWER_BYTES, SENT_AT_LEAST, LARGEST_SHARE = 1000, 10, 0.5
OUTER_LEARNING_RATE, ROUNDS_VALUE_DTYPE, STEP_AHEAD = 1.4, "int2", 0.25


class SparsitySchedule:
    """The sparsity of each step: the fraction of entries that are not sent.

    The sparsity rises in a warm-up. A dense start before the warm-up and a
    cool-down at the end are optional.

    With n = len(sparsity), b = rampup_begin_step, r = rampup_step, d =
    rampdown_begin_step and e = rampdown_step, at step s, counted from 0:

        s < b                 dense
        b <= s < d            sparsity[min(floor((s - b) n / r), n - 1)]
        d <= s < d + e - 1    sparsity[n - 2 - floor((s - d) (n - 1) / (e - 1))]
        s = d + e - 1         0: all residuals are sent
        s >= d + e            dense

    The cool-down runs all stages but the last in reverse order, each for about
    the same number of steps. Then one more step sends all residuals. If
    `sparsity` has a single stage, that stage lasts until all residuals are
    sent. Without d, there is no cool-down.

    If replicas exchange only every `sync_every` steps, the last sparsity, 0,
    lasts for `sync_every` steps, so that these steps include an exchange.

    Args:
        sparsity: Sequence of floats in [0, 1), not decreasing.
        rampup_begin_step: int >= 0. Dense steps before compression starts.
            Defaults to `0`.
        rampup_step: int >= 1. Steps of the warm-up. Defaults to `1`.
        rampdown_begin_step: None, or int >= rampup_begin_step + rampup_step.
            First step of the cool-down. Defaults to `None`.
        rampdown_step: int >= 1. Steps of the cool-down. Defaults to `1`.
        sync_every: int >= 1. The largest number of steps between exchanges.
            Defaults to `1`.
    """

    def __init__(
        self,
        sparsity: Any,
        rampup_begin_step: Any = 0,
        rampup_step: Any = 1,
        rampdown_begin_step: Any = None,
        rampdown_step: Any = 1,
        sync_every: int = 1,
    ) -> None:
        self.sparsity = _check_sparsity(sparsity)
        self.rampup_begin_step = check_integer(
            "rampup_begin_step", rampup_begin_step, 0
        )
        self.rampup_step = check_integer("rampup_step", rampup_step, 1)
        self.rampdown_step = check_integer("rampdown_step", rampdown_step, 1)
        if rampdown_begin_step is not None:
            rampdown_begin_step = check_integer(
                "rampdown_begin_step", rampdown_begin_step, 0
            )
        self.rampdown_begin_step = rampdown_begin_step
        self._check_rampdown()
        self.sync_every = sync_every
        plan = [*self._warm_up(), *self._cool_down()]
        self.stages = list(dict.fromkeys(sparsity for _, sparsity in plan))
        self._starts = [start for start, _ in plan]
        self._order = [self.stages.index(sparsity) for _, sparsity in plan]

    # The sparsities of all stages, without repetition; None is dense.
    stages: list[float | None]

    def stage(self, step: Any) -> Any:
        """Return the index in `stages` of the sparsity at `step`.

        The index is a tensor if `step` is a tensor, and otherwise an int.
        """
        if not tf.is_tensor(step):
            return self._order[bisect.bisect(self._starts, step) - 1]
        begun = tf.constant(self._starts, tf.int64) <= tf.cast(step, tf.int64)
        return tf.gather(self._order, tf.math.count_nonzero(begun) - 1)

    def is_over(self, step: int) -> bool:
        """Return whether a cool-down has ended before `step`."""
        has_end = self.rampdown_begin_step is not None
        return has_end and step >= self._starts[-1]

    def get_config(self) -> dict[str, Any]:
        """Return the optimizer's arguments that set the schedule."""
        return {
            "sparsity": list(self.sparsity),
            "rampup_begin_step": self.rampup_begin_step,
            "rampup_step": self.rampup_step,
            "rampdown_begin_step": self.rampdown_begin_step,
            "rampdown_step": self.rampdown_step,
        }

    def _warm_up(self) -> Iterator[tuple[int, float | None]]:
        """Yield the start and the sparsity of each stage.

        If several stages have the same start, only the last one counts.
        """
        begin, count = self.rampup_begin_step, len(self.sparsity)
        if begin:
            yield 0, None
        for i, sparsity in enumerate(self.sparsity):
            yield begin + -(-i * self.rampup_step // count), sparsity

    def _cool_down(self) -> Iterator[tuple[int, float | None]]:
        begin, back = self.rampdown_begin_step, self.sparsity[-2::-1]
        if begin is None:
            return
        last = self.rampdown_step - 1
        for i, sparsity in enumerate(back):
            yield begin + -(-i * last // len(back)), sparsity
        yield begin + last, 0.0
        yield begin + last + self.sync_every, None

    def _check_rampdown(self) -> None:
        begin, end = self.rampdown_begin_step, self.rampup_step
        end += self.rampup_begin_step
        if begin is None and self.rampdown_step != 1:
            raise ValueError(
                "`rampdown_step` needs a `rampdown_begin_step`. Received: "
                f"rampdown_step={self.rampdown_step}, "
                "rampdown_begin_step=None. Pass the step at which the "
                "cool-down begins, or `rampdown_step=1` for no cool-down."
            )
        if begin is not None and begin < end:
            raise ValueError(
                "`rampdown_begin_step` must be >= rampup_begin_step + "
                f"rampup_step = {end}. Received: rampdown_begin_step={begin}. "
                "Raise `rampdown_begin_step`, or lower the sum."
            )


def recommended_schedule(
    steps: Any,
    sparsities: Sequence[float] = RECOMMENDED,
    stages: int = STAGES,
) -> dict[str, Any]:
    """Return the arguments of a schedule for a run of `steps` steps.

    Each stage takes 1 / `stages` of the run. Only the last stage is longer: it
    lasts until the cool-down. The schedule omits a sparsity if a whole run at
    this sparsity would send each entry fewer than two times, on average. Such
    rare updates would be stale. If no sparsity remains, the sparsity is 0.75.
    """
    steps = check_integer("steps", steps, 2)
    sparsity = tuple(
        each for each in sparsities if steps * (1 - Fraction(str(each))) >= 2
    )
    sparsity = sparsity or WARM_UP[:1]
    rampdown_step = max(1, (len(sparsity) - 1) * steps // stages)
    return {
        "sparsity": sparsity,
        "rampup_step": max(1, len(sparsity) * steps // stages),
        "rampdown_begin_step": steps - rampdown_step,
        "rampdown_step": rampdown_step,
    }


def recommended(steps: Any) -> dict[str, Any]:
    """Return the recommended arguments of `DGCMomentum`."""
    return recommended_schedule(steps) | {"value_dtype": VALUE_DTYPE}


def recommended_updates(
    steps: Any, sync_every: Any, overlap: Any = False
) -> dict[str, Any]:
    """Return the recommended arguments of `SparseLoCo`."""
    sync_every = check_integer("sync_every", sync_every, 1)
    if sync_every > 1:
        settings = recommended_rounds(steps, sync_every)
        return settings if overlap else settings | {"step_ahead": STEP_AHEAD}
    settings = recommended(steps)
    if settings["sparsity"][-1] < NO_DECAY_FROM:
        settings["residual_decay"] = SHORT_RUNS_DECAY
    return settings


def recommended_rounds(steps: Any, sync_every: int) -> dict[str, Any]:
    """Return the recommended arguments of `SparseLoCo` with local steps.

    Each exchange sends the same fraction of the entries. With this fraction,
    two workers send about `TIMES_FEWER_BYTES` times fewer bytes than with dense
    float32 gradients in every step. In a short run, the fraction is larger, so
    that each entry is sent `SENT_AT_LEAST` times on average. In both cases, the
    fraction is at most `LARGEST_SHARE`.
    """
    steps = check_integer("steps", steps, 2)
    bits = 32 * sync_every / TIMES_FEWER_BYTES
    shares = np.linspace(0, LARGEST_SHARE, 5001)[1:]
    share = max(shares[_bits_of_round(shares) <= bits], default=shares[0])
    share = min(LARGEST_SHARE, max(share, SENT_AT_LEAST * sync_every / steps))
    return {
        "sparsity": (round(1 - float(share), 4),),
        "outer_learning_rate": OUTER_LEARNING_RATE,
        "value_dtype": ROUNDS_VALUE_DTYPE,
    }


def _bits_of_round(shares: np.ndarray) -> np.ndarray:
    """Return an exchange's bits per parameter, for each fraction of entries.

    An int2 value takes 2.5 bits, including its part of the scales. A position
    takes 2 - log2(share) bits. All positions together take at most one bit per
    parameter.
    """
    return 2.5 * shares + np.minimum(1, shares * (2 - np.log2(shares)))


def sent_count(size: int, sparsity: float) -> int:
    """Return how many of `size` entries are sent, at least one.

    The sparsity is read as a decimal number: at 0.9, exactly 100,000 of
    1,000,000 entries are sent, not 99,999.
    """
    return max(1, int(size * (1 - Fraction(str(sparsity)))))


def _check_sparsity(value: Any) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(
            "`sparsity` must be a sequence of numbers in [0, 1), one per stage "
            f"of the warm-up. Received: sparsity={value!r}. For one stage, "
            "write `sparsity=(0.999,)`."
        )
    if not value:
        raise ValueError(
            "`sparsity` must have at least one stage. Received: "
            f"sparsity={value!r}. The usual value is `sparsity=(0.999,)`."
        )
    sparsity = tuple(
        check_decay_rate(f"sparsity[{i}]", each) for i, each in enumerate(value)
    )
    if list(sparsity) != sorted(sparsity):
        raise ValueError(
            "`sparsity` must not decrease from stage to stage. Received: "
            f"sparsity={value!r}. A common warm-up is "
            "`sparsity=(0.75, 0.9375, 0.984375, 0.996, 0.999)`."
        )
    return sparsity
