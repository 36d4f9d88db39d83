"""Does DGC reach the accuracy of dense momentum SGD?

    python benchmarks/accuracy.py [--models digits text] [--seeds 8]
        [--variants "DGC, 2 workers"]

See study.py.
"""

from typing import Any

import keras
import study
from study import DENSE, Family, Variant

import tf_optimizers as tfo
from tf_optimizers.compression.sparsity_schedule import (
    WARM_UP,
    recommended_schedule,
)

MOMENTUM = 0.9
RATES = {
    "digits": [2.0**k for k in range(-7, 0)],
    "text": [2.0**k for k in range(-5, -1)],
    "code": [2.0**k for k in range(-4, -1)],
}
TUNING_SEEDS = {
    "digits": (10_001, 10_002),
    "text": (10_001,),
    "code": (10_001,),
}

FEW_STEPS = "digits in 96 steps"
MORE_STEPS = "digits in 128 steps"
FEW_STEPS_RATES = [2.0**k for k in range(-6, 0)]
FEW_STEPS_SEEDS = (10_001, 10_002, 10_003)

# A stage of the paper's warm-up is 1 / STAGES of the run.
STAGES = 40
ABLATION_SEEDS = 3


def dgc(workers: int, **kwargs: int) -> Variant:
    """Return DGC with the recommended settings; `kwargs` change its stages."""
    return Variant(
        workers,
        lambda rate, steps: tfo.DGCMomentum.for_steps(
            steps,
            rate,
            momentum=MOMENTUM,
            **recommended_schedule(steps, **kwargs),
        ),
    )


def papers_stages(steps: int) -> dict[str, Any]:
    """Return the paper's stages, but none that needs a longer run."""
    return recommended_schedule(steps, sparsities=WARM_UP, stages=STAGES)


def from_75(workers: int, **kwargs: Any) -> Variant:
    """Return DGC with `papers_stages`; `kwargs` override settings."""
    return Variant(
        workers,
        lambda rate, steps: tfo.DGCMomentum(
            rate, momentum=MOMENTUM, **papers_stages(steps) | kwargs
        ),
    )


def longer_cool_down(workers: int, share: int) -> Variant:
    """Return `from_75` with a cool-down of 1 / `share` of the run."""
    return Variant(
        workers,
        lambda rate, steps: tfo.DGCMomentum(
            rate,
            momentum=MOMENTUM,
            **papers_stages(steps)
            | {
                "rampdown_begin_step": steps - steps // share,
                "rampdown_step": steps // share,
            },
        ),
    )


def up_to_the_last_stage(workers: int, **kwargs: bool) -> Variant:
    """Return DGC with all stages, even if the run is too short for the last."""
    return Variant(
        workers,
        lambda rate, steps: tfo.DGCMomentum(
            rate,
            momentum=MOMENTUM,
            sparsity=WARM_UP,
            rampup_step=steps // 8,
            rampdown_begin_step=steps - steps // 10,
            rampdown_step=steps // 10,
            **kwargs,
        ),
    )


def paddles(
    workers: int, sparsity: tuple[float, ...] = WARM_UP, **kwargs: bool | str
) -> Variant:
    """Return DGC by Paddle's rule, without a cool-down."""
    return Variant(
        workers,
        lambda rate, steps: tfo.DGCMomentum(
            rate,
            momentum=MOMENTUM,
            rampup_step=len(sparsity) * steps // STAGES,
            sparsity=sparsity,
            rate_in_momentum=False,
            **kwargs,
        ),
    )


NO_COOL_DOWN = {"rampdown_begin_step": None, "rampdown_step": 1}
MAIN = {
    DENSE: Variant(
        1, lambda rate, _: keras.optimizers.SGD(rate, momentum=MOMENTUM)
    ),
    "DGC, 2 workers": dgc(2),
    "DGC, 4 workers": dgc(4),
    "DGC, 8 workers": dgc(8),
    "from 75%, 2 workers": from_75(2),
    "from 75%, 4 workers": from_75(4),
    "from 75%, 8 workers": from_75(8),
    "from 75%, 2 workers, float16 values": from_75(2, value_dtype="float16"),
    "from 75%, 4 workers, float16 values": from_75(4, value_dtype="float16"),
    "from 75%, 8 workers, float16 values": from_75(8, value_dtype="float16"),
    "Paddle's rule, 2 workers": paddles(2),
    "Paddle's rule, 4 workers": paddles(4),
}
ABLATIONS = {
    "from 75%, 2 workers, no cool-down": from_75(2, **NO_COOL_DOWN),
    "from 75%, 2 workers, rate_in_momentum=False": from_75(
        2, rate_in_momentum=False
    ),
    "from 75%, 2 workers, no momentum masking": from_75(
        2, momentum_masking=False
    ),
    "from 75%, 4 workers, no momentum masking": from_75(
        4, momentum_masking=False
    ),
    "from 75%, 4 workers, cool-down of a fifth": longer_cool_down(4, 5),
    "from 75%, 4 workers, cool-down of a third": longer_cool_down(4, 3),
    "Paddle's rule, 2 workers, float16 values": paddles(
        2, value_dtype="float16"
    ),
    "Paddle's rule, 2 workers, no warm-up": paddles(2, WARM_UP[-1:]),
    "Paddle's rule, 2 workers, no momentum masking": paddles(
        2, momentum_masking=False
    ),
    "Paddle's rule, 2 workers, 99.99%": paddles(2, (*WARM_UP, 0.9999)),
}
VARIANTS = MAIN | {
    name: variant._replace(seeds=ABLATION_SEEDS)
    for name, variant in ABLATIONS.items()
}
# By default, the last stage of a run of 640 steps is 99.6%.
TO_999 = "from 75 to 99.9%"
ONLY_DIGITS = {
    f"{TO_999}, 2 workers": up_to_the_last_stage(2),
    f"{TO_999}, 4 workers": up_to_the_last_stage(4),
    f"{TO_999}, 2 workers, rate_in_momentum=False": up_to_the_last_stage(
        2, rate_in_momentum=False
    )._replace(seeds=ABLATION_SEEDS),
}
RECOMMENDED = {
    name: MAIN[name]
    for name in (DENSE, *(f"DGC, {workers} workers" for workers in (2, 4, 8)))
}
IN_FEW_STEPS = RECOMMENDED | {
    f"up to {100 * last:g}%, 2 workers": from_75(2, sparsity=WARM_UP[: i + 1])
    for i, last in enumerate(WARM_UP[:3])
}
ONLY_TEXT = {
    f"DGC, {workers} workers, stages of 1/20": dgc(workers, stages=20)
    for workers in (2, 8)
}
ONLY = {"digits": ONLY_DIGITS, "text": ONLY_TEXT}
FAMILIES = {
    task: Family(
        task, RATES[task], TUNING_SEEDS[task], VARIANTS | ONLY.get(task, {})
    )
    for task in RATES
} | {
    task: Family(task, FEW_STEPS_RATES, FEW_STEPS_SEEDS, variants)
    for task, variants in (
        (FEW_STEPS, IN_FEW_STEPS),
        (MORE_STEPS, RECOMMENDED),
    )
}


if __name__ == "__main__":
    study.main(__file__, __doc__, FAMILIES)
