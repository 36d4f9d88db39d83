"""Reasons why a program may compute other results on several workers.

Each reason has a condition on programs, and the results that are not compared
then, by the beginnings of their names, or "replicas".
"""

from .rules import (
    LOCAL,
    OWN_METRICS,
    REFITTED,
    SHUFFLED,
    STATEFUL,
    UNKNOWN,
    replicas_of,
    version_of,
)

# The version of nightly builds comes first.
KERAS = version_of("keras-nightly", "keras")


EVERYTHING = (
    *("fit", "weights", "evaluate", "predict", "one row", "test", "train"),
    *("logs", "loaded", "loop", "state", "copied"),
)


def is_uneven(program):
    """Return whether some replica has fewer rows than another."""
    replicas = replicas_of(program)
    return bool(program["batch"] % replicas or program["rest"] % replicas)


REASONS = {
    "Compression defers a part of each gradient.": (
        lambda p: (
            p["optimizer"] == "DGC" or p["wrapper"] in ("SparseLoCo", *LOCAL)
        ),
        EVERYTHING,
    ),
    "Residuals of compression are sent at the end.": (
        lambda p: "to the end" in p["optimizer"] + p["wrapper"],
        ("fit", "logs"),
    ),
    "Between synchronizations replicas have weights of their own.": (
        lambda p: p["wrapper"] in LOCAL and "train_on_batch" in p["actions"],
        ("replicas",),
    ),
    "Keras's own optimizers clip each replica's gradient before the sum.": (
        lambda p: (
            p["clip"] != "none"
            and p["wrapper"] != "ShardedState"
            and p["optimizer"] not in ("Lamb", "LANS", "AdamOffload")
        ),
        EVERYTHING,
    ),
    "BatchNormalization takes statistics of each replica's rows.": (
        lambda p: "BatchNormalization" in p["layers"],
        EVERYTHING,
    ),
    "Statistics of a replica's rows are made common at the end of an epoch.": (
        lambda p: (
            (
                {"BatchNormalization", *STATEFUL} & set(p["layers"])
                or p["held by"] == "the model"
            )
            and (p["script"] == "loop" or "train_on_batch" in p["actions"])
        ),
        ("replicas",),
    ),
    # It also takes masked rows from each replica, even if synchronized.
    "Under TensorFlow's strategy, each replica keeps its own statistics.": (
        lambda p: (
            {"BatchNormalization", "SynchronizedBatchNorm"} & set(p["layers"])
            and p["where"] == "mirrored"
            and p["wrapper"] not in LOCAL
        ),
        ("replicas",),
    ),
    "A layer assigns its state from each replica's rows.": (
        lambda p: (
            {"Centre", "Codebook"} & set(p["layers"])
            or ("CommonCentre" in p["layers"] and is_uneven(p))
        ),
        EVERYTHING,
    ),
    "A loss pulls to the state of a replica.": (
        lambda p: p["loss"] == "by hand: moving",
        EVERYTHING,
    ),
    "A mean over replicas is one over rows only if they have as many.": (
        lambda p: is_uneven(p) or p["validation"] != "none",
        ("goal",),
    ),
    "So is what a step assigns, and a first replica has only its rows.": (
        lambda p: is_uneven(p) or p["aggregation"] == "only_first_replica",
        ("held",),
    ),
    "Weights include what the model holds.": (
        lambda p: (
            p["held by"] == "the model"
            and (is_uneven(p) or p["aggregation"] == "only_first_replica")
        ),
        ("weights", "loaded"),
    ),
    "Each replica draws numbers for its own rows, and each run others.": (
        lambda p: (
            p["drawn"] == "elements"
            or (p["drawn"] == "a number" and not p["seeded"])
        ),
        EVERYTHING,
    ),
    "Sharpness-aware steps go where each replica's rows lead.": (
        lambda p: p["custom"] == "SAM",
        EVERYTHING,
    ),
    "A set has another order in each process.": (
        lambda p: p["vocabulary"] == "set",
        ("weights", "start", "state", "loaded", "copied"),
    ),
    "All replicas draw the same random masks.": (
        lambda p: "Dropout" in p["layers"],
        EVERYTHING,
    ),
    # Keras 3.14 and newer average activities.
    "A sum over rows counts by the replica's share of them.": (
        lambda p: (
            p["custom"] == "add_loss sum"
            or ("ActivityRegularization" in p["layers"] and KERAS < (3, 14))
        ),
        EVERYTHING,
    ),
    "One number is weighed by the mean of its rows' weights.": (
        lambda p: p["loss"] == "by hand: scalar" and p["weights"] != "none",
        EVERYTHING,
    ),
    # The count of the mean needs no batch, so the step without data adds to it.
    "In one process, a mean of numbers counts the step at the end of data.": (
        lambda p: (
            p["custom"] in OWN_METRICS
            and UNKNOWN & {*p["pipeline"], *p["actions"]}
        ),
        ("fit * loss", "logs * loss"),
    ),
    "In one process, a result that is a variable is read after the step.": (
        lambda p: (
            {"by hand: variable", "by hand: sum"} & set(p["metrics"])
            and p["returned"] == "reset"
        ),
        ("fit * counted", "fit * total", "logs * counted", "logs * total"),
    ),
    "A mean by the weights of a batch depends on who is in it.": (
        lambda p: (
            p["loss"] == "mean_with_sample_weight"
            and p["weights"] != "none"
            and p["shuffle"] in SHUFFLED
        ),
        ("fit * loss", "evaluate loss", "logs * loss"),
    ),
    "Dice is no mean over rows.": (
        lambda p: p["loss"] == "Dice",
        EVERYTHING,
    ),
    "The pairs of two random orders are random.": (
        lambda p: p["shuffle"] == "two",
        ("fit * loss", "fit * val_loss", "evaluate loss", "logs * loss"),
    ),
    "Data that repeat are read ahead, so that the next `fit` skips an order.": (
        lambda p: (
            p["shuffle"] == "seeded"
            and p["steps"] == "repeat"
            and REFITTED & set(p["actions"])
        ),
        EVERYTHING,
    ),
    "`evaluate` skips an order, for the same reason.": (
        lambda p: p["shuffle"] == "seeded" and p["steps"] == "repeat",
        ("evaluate", "saved"),
    ),
    "Each validation goes on where one that has read ahead has stopped.": (
        lambda p: p["validation"] == "generator",
        ("fit * val_", "logs * val_"),
    ),
    # In one process, that optimizer runs eagerly: see `grammar.script`.
    "Keras weighs an output's loss by rows, eagerly; 3.16 where it traces.": (
        lambda p: (
            p["style"] == "two outputs"
            and (p["optimizer"] == "ScheduleFreeAdamW" or KERAS >= (3, 16))
        ),
        tuple(
            f"{name} {part}"
            for name in ("fit *", "logs *", "evaluate", "test_on_batch")
            for part in ("*one_loss", "*two_loss")
        ),
    ),
    "Keras alone clips a gradient to 0 whose norm overflows.": (
        lambda p: p["scale"] == "enormous",
        EVERYTHING,
    ),
    "What comes near an overflow may be infinite.": (
        lambda p: p["scale"] in ("huge", "one row", "a scaled row"),
        tuple(
            f"{name} {loss}"
            for name in ("fit *", "logs *", "evaluate", "test_on_batch")
            for loss in ("loss", "val_loss")
        ),
    ),
    # So the number of batches, and of steps, differs.
    "A random filter leaves other rows each time.": (
        lambda p: p["shuffle"] == "random filter",
        ("fit * loss", "evaluate loss", "logs * loss", "state"),
    ),
}
# The tolerance of values, by precision; a step is at least 100 times larger.
TOLERANCE = {
    "float32": 3e-5,
    "float64": 3e-5,
    "mixed_float16": 5e-3,
    "mixed_bfloat16": 3e-2,
    "float16": 5e-3,
    "bfloat16": 3e-2,
}


def known(program):
    """Return the results that are not compared."""
    found = []
    for holds, names in REASONS.values():
        if holds(program):
            found += names
    return tuple(found)


def tolerance(program):
    return TOLERANCE[program["precision"]]
