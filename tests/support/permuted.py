"""Adds repeated positions in a random order each time, as a GPU does."""

import contextlib
import os

import tensorflow as tf
from tensorflow.python.ops import (
    gen_array_ops,
    gen_math_ops,
    gen_resource_variable_ops,
    gen_state_ops,
)

from tf_optimizers import kernels
from tf_optimizers.compression.residual import _clear

# Modules, the name of a function that adds, and the indices of its arguments
# with positions and values.
ADDING = [
    ((tf, gen_array_ops), "scatter_nd", (0, 1)),
    ((tf,), "tensor_scatter_nd_add", (1, 2)),
    ((tf,), "tensor_scatter_nd_sub", (1, 2)),
    ((gen_array_ops,), "tensor_scatter_add", (1, 2)),
    ((gen_array_ops,), "tensor_scatter_sub", (1, 2)),
    ((tf.math, gen_math_ops), "unsorted_segment_sum", (1, 0)),
    ((gen_resource_variable_ops,), "resource_scatter_add", (1, 2)),
    ((gen_resource_variable_ops,), "resource_scatter_sub", (1, 2)),
    ((gen_state_ops,), "resource_scatter_nd_add", (1, 2)),
    ((gen_state_ops,), "resource_scatter_nd_sub", (1, 2)),
]


def permuted(function, places):
    """Return `function`, called with positions and values in a random order."""

    def call(*args, **kwargs):
        args = list(args)
        names = [name for name in ("indices", "updates") if name in kwargs]
        pair = [args[i] for i in places if i < len(args)]
        pair += [kwargs[name] for name in names]
        positions, values = map(tf.convert_to_tensor, pair)
        if not values.dtype.is_floating or values.shape.rank == 0:
            return function(*args, **kwargs)
        # Every process and run draws a different order, regardless of its seed.
        seed = int.from_bytes(os.urandom(4), "little")
        order = tf.random.shuffle(tf.range(tf.shape(positions)[0]), seed)
        pair = [tf.gather(tensor, order) for tensor in (positions, values)]
        if "tensor_scatter" in function.__name__:
            # XLA drops positions beyond the end, which add nothing.
            pair[0] = tf.minimum(pair[0], tf.size(args[0], pair[0].dtype) - 1)
        for i in places:
            if i < len(args):
                args[i] = pair.pop(0)
        return function(*args, **kwargs | dict(zip(names, pair, strict=True)))

    return call


@contextlib.contextmanager
def permuted_additions():
    """Add in a random order in scatters and segment sums, even in kernels.

    Kernels are traced again, and run without XLA, whose random numbers are the
    same in all processes. `_clear` adds nothing, and needs XLA, which drops
    positions beyond the end.
    """
    originals = [
        (module, name, getattr(module, name))
        for modules, name, _ in ADDING
        for module in modules
    ]
    made_in = kernels._cached_function

    def without_xla(context, function, *args, xla):
        return made_in(context, function, *args, xla=function is _clear)

    places = {name: places for _, name, places in ADDING}
    made_in.cache_clear()
    for module, name, function in originals:
        setattr(module, name, permuted(function, places[name]))
    kernels._cached_function = without_xla
    try:
        yield
    finally:
        kernels._cached_function = made_in
        for module, name, function in originals:
            setattr(module, name, function)
        made_in.cache_clear()
