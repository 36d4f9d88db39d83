"""Which share of a gradient is held back at which step."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from tf_optimizers.checks import check_decay_rate, check_integer


class SparsitySchedule:
    """Dense up to a step, then rising sparsity in stages of equal length.

    At step s >= begin_step it is sparsity[min((s - begin_step) * len(sparsity)
    // rampup_step, len(sparsity) - 1)].

    Args:
        begin_step: int >= 0. Steps, from 0, before compression starts.
        rampup_step: int >= 1. Steps from there to the end of the last stage.
        sparsity: Shares in [0, 1) held back, none less than the one before.
    """

    def __init__(
        self, begin_step: Any, rampup_step: Any, sparsity: Any
    ) -> None:
        self.begin_step = check_integer("rampup_begin_step", begin_step, 0)
        self.rampup_step = check_integer("rampup_step", rampup_step, 1)
        self.sparsity = _check_sparsity(sparsity)

    @property
    def stages(self) -> list[float | None]:
        """The sparsity of every stage; None, at first, is dense."""
        dense = [None] if self.begin_step else []
        return [*dense, *self.sparsity]

    def stage(self, step: Any) -> Any:
        """Return the position in `stages` at a step, of either kind of int."""
        least, most = min, max
        if tf.is_tensor(step):
            least, most = tf.minimum, tf.maximum
        count = len(self.sparsity)
        since = step - self.begin_step
        stage = least(since * count // self.rampup_step, count - 1)
        return most(stage + 1, 0) if self.begin_step else stage


def sent_count(size: int, sparsity: float) -> int:
    """Return how many of `size` entries are sent, at least one.

    In decimal: 0.999 of 1,000,000 leaves 1,000, not 999.
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
            f"sparsity={value!r}. The usual one is `sparsity=(0.999,)`."
        )
    shares = tuple(
        check_decay_rate(f"sparsity[{i}]", share)
        for i, share in enumerate(value)
    )
    if list(shares) != sorted(shares):
        raise ValueError(
            "`sparsity` must not decrease from stage to stage. Received: "
            f"sparsity={value!r}. The paper's warm-up is "
            "`sparsity=(0.75, 0.9375, 0.984375, 0.996, 0.999)`."
        )
    return shares
