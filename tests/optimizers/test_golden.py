"""Trajectories recorded from Paddle, MXNet, tensorflow-addons and Keras.

The error of a tensor is max|a - b| / max|b|, at every step.
"""

import contextlib

import cases
import keras
import pytest
from golden import TOLERANCE, load, worst_error

from tf_optimizers import LANS, Lamb

LAMB = [
    "lamb_paddle_default",
    "lamb_paddle_default_v262",
    "lamb_paddle_betas_eps",
    "lamb_paddle_clip_global",
    "lamb_paddle_clip_norm",
    "lamb_paddle_exclude",
    "lamb_paddle_exclude_adapt",
    "lamb_paddle_float64",
    "lamb_paddle_lr_piecewise",
    "lamb_paddle_wd0",
    "lamb_paddle_wd0_always_adapt",
    "lamb_paddle_wd0_v262",
    "lamb_mxnet_default_fused",
    "lamb_tfa_default",
    "lamb_tfa_exclude",
    "lamb_tfa_wd",
]
LANS_FILES = [
    "lans_mxnet_default_fused",
    "lans_mxnet_betas_eps_fused",
    "lans_mxnet_bounds_fused",
    "lans_mxnet_clip_fused",
    "lans_mxnet_rescale_fused",
    "lans_mxnet_wd_fused",
]
# The others need kernels with constants that no other test compiles.
COMPILED = ["lamb_paddle_default", "lamb_paddle_float64"]
COMPILED += ["lans_mxnet_default_fused", "lans_mxnet_clip_fused"]


def arguments(config):
    """Translate a recorded configuration into our arguments."""
    first = {k: config[k] for k in config if config[k] is not None}
    decay = ("lamb_weight_decay", "weight_decay", "wd")
    weight_decay = next((first[k] for k in decay if k in first), 0.0)
    excluded = first.get("exclude_from_weight_decay")
    result = {
        "beta_1": first.get("beta1", first.get("beta_1")),
        "beta_2": first.get("beta2", first.get("beta_2")),
        "epsilon": first["epsilon"],
        "weight_decay": weight_decay,
        "lower_bound": first.get("lower_bound"),
        "upper_bound": first.get("upper_bound"),
        "exclude_from_weight_decay": excluded
        and [f"^{name}$" for name in excluded],
    }
    if "always_adapt" in first:
        # Paddle: an undecayed parameter is not adapted, unless always_adapt.
        patterns = [] if first["always_adapt"] else None
        if weight_decay == 0.0 and not first["always_adapt"]:
            patterns = [""]
        result["exclude_from_layer_adaptation"] = patterns
    if "grad_clip" in first:
        argument = {"global_norm": "global_clipnorm", "norm": "clipnorm"}
        clip = first["grad_clip"]
        result[argument[clip["type"]]] = clip["clip_norm"]
    return result


def run_golden(name, optimizer_class, **changes):
    record = load(name)
    kwargs = arguments(record["config"])
    if optimizer_class is LANS:
        limit = record["config"].get("clip_gradient")
        kwargs["clip_normalized_gradient"] = limit
    optimizer = optimizer_class(record["lr"][0], **kwargs | changes)

    def set_learning_rate(value):
        optimizer.learning_rate = value

    is_own = name.startswith(optimizer_class.__name__.lower())
    is_compiled = name in COMPILED and is_own and not changes
    way = contextlib.nullcontext if is_compiled else cases.without_kernels
    with way():
        return worst_error(record, optimizer, set_learning_rate)


@pytest.mark.parametrize("name", LAMB)
def test_lamb_matches_golden(name):
    assert run_golden(name, Lamb) < TOLERANCE


@pytest.mark.parametrize("name", LANS_FILES)
def test_lans_matches_golden(name):
    assert run_golden(name, LANS) < TOLERANCE


@cases.needs_groups
def test_lamb_groups_match_golden_through_multi_optimizer():
    record = load("lamb_paddle_groups")
    base = record["config"]
    optimizers = {}
    for group in base["groups"]:
        settings = base | group
        # A group's learning rate multiplies the base rate.
        rate = base["learning_rate"] * group.get("learning_rate", 1.0)
        optimizer = Lamb(rate, **arguments(settings))
        optimizers |= {f"^{name}$": optimizer for name in group["params"]}
    by_name = keras.optimizers.OptimizerMap(Lamb(), optimizers)
    optimizer = keras.optimizers.MultiOptimizer(by_name)
    assert worst_error(record, optimizer) < TOLERANCE


def test_lamb_without_decay_is_within_keras_own_error():
    """Keras's early steps are up to 6.4e-6 too small."""
    assert run_golden("lamb_keras_default", Lamb) < TOLERANCE
