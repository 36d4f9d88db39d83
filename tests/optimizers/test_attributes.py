"""Settings of optimizers, in their configs and as attributes.

An attribute that a script assigns after the constructor takes effect in the
next trace, as in Keras, or raises an error.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_optimizers as tfo


def loco():
    return tfo.SparseLoCo(keras.optimizers.SGD(1.0))


def sharded():
    return tfo.ShardedState(keras.optimizers.SGD(1.0))


def dgc():
    return tfo.DGCMomentum(0.1)


COMPRESSION = {
    "sparsity": (0.5,),
    "rampup_begin_step": 3,
    "rampup_step": 3,
    "rampdown_begin_step": 9,
    "rampdown_step": 3,
    "min_compress_size": 1,
    "value_dtype": "int4",
}
FIXED = {
    dgc: COMPRESSION
    | {
        "momentum_masking": False,
        "rate_in_momentum": False,
        "regularizer": keras.regularizers.L2(0.1),
        "clipvalue": 1.0,
        "global_clipnorm": 1.0,
        "weight_decay": 0.1,
    },
    loco: COMPRESSION
    | {
        "sync_every": 4,
        "overlap": True,
        "residual_decay": 0.5,
        "outer_learning_rate": 0.5,
    },
    tfo.Lamb: {"exclude_from_layer_adaptation": ["bias"]},
}

ADAM = {
    "beta_1": 0.8,
    "beta_2": 0.99,
    "epsilon": 1e-5,
    "exclude_from_weight_decay": ["bias"],
    "use_ema": True,
}
RATIOS = {
    "exclude_from_layer_adaptation": [],
    "lower_bound": 0.5,
    "upper_bound": 2.0,
}
SETTINGS = {
    tfo.Lamb: ADAM | RATIOS,
    tfo.LANS: ADAM | RATIOS | {"clip_normalized_gradient": 3.0},
    tfo.AdamOffload: ADAM | {"nesterov": True},
    tfo.DGCMomentum: COMPRESSION
    | {
        "momentum": 0.8,
        "nesterov": True,
        "regularizer": keras.regularizers.L1L2(0.1, 0.2),
        "momentum_masking": False,
        "rate_in_momentum": False,
        "clipnorm": 2.0,
    },
    tfo.SparseLoCo: COMPRESSION
    | {
        "residual_decay": 0.5,
        "outer_learning_rate": 0.75,
        "sync_every": 7,
        "overlap": True,
        "gradient_accumulation_steps": 2,
    },
    tfo.ShardedState: {},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_config_restores_every_setting(kind):
    first = 0.1
    if kind in (tfo.SparseLoCo, tfo.ShardedState):
        first = keras.optimizers.AdamW(0.5, weight_decay=0.25, clipnorm=2.0)
    settings = SETTINGS[kind] | {"name": "mine"}
    optimizer, default = kind(first, **settings), kind(first).get_config()
    config = optimizer.get_config()
    assert all(config[name] != default[name] for name in settings)
    restored = keras.optimizers.deserialize(
        keras.optimizers.serialize(optimizer)
    )
    assert type(restored) is kind
    for each in (restored, kind.from_config(config)):
        assert each.get_config() == config


@pytest.mark.parametrize(
    ("make", "name"),
    [(make, name) for make, names in FIXED.items() for name in names],
)
def test_setting_that_was_copied_cannot_be_assigned(make, name):
    optimizer, value = make(), FIXED[make][name]
    before = getattr(optimizer, name)
    with pytest.raises(
        RuntimeError,
        match=f"`{name}` of an optimizer must not change. Received: ",
    ):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before
    assert optimizer.get_config().get(name) != value


@pytest.mark.filterwarnings("ignore:.* saves traffic")
@pytest.mark.parametrize("wrap", [loco, sharded])
@pytest.mark.parametrize(
    ("name", "value", "weights"),
    [
        ("clipnorm", 0.5, [0.7, 0.6]),
        ("global_clipnorm", 0.5, [0.7, 0.6]),
        ("clipvalue", 0.5, [0.5, 0.5]),
        ("weight_decay", 0.5, [-2.5, -3.5]),
    ],
)
def test_wrapper_passes_settings_to_its_inner_optimizer(
    wrap, name, value, weights
):
    optimizer, weight = wrap(), keras.Variable([1.0, 1.0])
    assert getattr(optimizer, name) is None
    setattr(optimizer, name, value)
    assert getattr(optimizer, name) == value
    optimizer.apply([tf.constant([3.0, 4.0])], [weight])
    np.testing.assert_allclose(weight.numpy(), weights, rtol=1e-6)
    config = optimizer.get_config()
    assert config["inner_optimizer"]["config"][name] == value
