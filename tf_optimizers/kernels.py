"""Compiles functions of tensors, and computes norms, sums and moments.

Norms of float32 tensors do not overflow, underflow or lose digits, because
elements are squared and summed in float64. In float32, the square of 1e-25 is
0, the square of 1e20 is inf, and XLA's sum of 20 million equal squares has a
relative error above 1e-4.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_optimizers._compat.tensorflow_internals import eager_context, in_xla


def compiled(
    function: Callable, like: Any, *constants: Any, xla: bool = True
) -> Callable:
    """Return a function of tensors that calls `function` in a `tf.function`.

    All optimizers share one `tf.function` per signature. Floats are not part of
    the signature, so `function` is not compiled again for each value of a
    hyperparameter. Each shape has a separate `tf.function`: TensorFlow would
    warn about a `tf.function` that is traced for many shapes.

    Instead of variables, pass their handles, which `function` passes to `read`
    and `assign`.

    Args:
        function: Called as `function(*constants, *tensors)`.
        like: A tensor whose shape and dtype are part of the signature.
        *constants: Hashable values. `function` gets a float64 scalar for each
            float, including floats in tuples; see `scalar`. Other constants are
            part of the signature, and compiled in.
        xla: Whether to compile `function` into one XLA kernel.
    """
    places, numbers = _without_numbers(constants)
    # Tests may replace TensorFlow's eager context. A new context cannot call a
    # `tf.function` of the old context.
    signature = eager_context(), function, like.shape, like.dtype
    kernel = _cached_function(*signature, *places, xla=xla)
    if not numbers:
        return kernel
    return lambda *tensors: kernel(tf.constant(numbers, tf.float64), *tensors)


def _without_numbers(constants: tuple) -> tuple[tuple, list[float]]:
    """Return constants with the type `float` for each float, and the floats."""
    leaves = tf.nest.flatten(constants)
    numbers = [leaf for leaf in leaves if isinstance(leaf, float)]
    places = [float if isinstance(leaf, float) else leaf for leaf in leaves]
    return tf.nest.pack_sequence_as(constants, places), numbers


@functools.lru_cache(maxsize=4096)
def _cached_function(
    context: Any,
    function: Callable,
    shape: tf.TensorShape,
    dtype: tf.DType,
    *constants: Any,
    xla: bool,
) -> Callable:
    """Return a `tf.function` that calls `function` with `constants`.

    The type `float` in `constants` is a placeholder for a number. If it occurs,
    the first argument of the `tf.function` is a vector of these numbers.
    """
    # TensorFlow warns if one Python function has many traces. All functions
    # from the same nested `def` would count as one function, but each `partial`
    # counts separately.
    call = functools.partial(function, *constants)
    if any(leaf is float for leaf in tf.nest.flatten(constants)):
        call = functools.partial(_with_numbers, function, constants)
    return tf.function(call, jit_compile=True if xla else None, autograph=False)


def _with_numbers(
    function: Callable, places: tuple, numbers: tf.Tensor, *tensors: Any
) -> Any:
    """Call `function` with a number in place of each type `float`."""
    rest = iter(tf.unstack(numbers))
    leaves = tf.nest.flatten(places)
    leaves = [next(rest) if leaf is float else leaf for leaf in leaves]
    return function(*tf.nest.pack_sequence_as(places, leaves), *tensors)


def scalar(number: float | tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Cast a number or a float64 scalar to the dtype of `like`."""
    return tf.cast(tf.convert_to_tensor(number, tf.float64), like.dtype)


def on_gpu() -> bool:
    """Return whether operations created here run on a GPU."""
    device = tf.DeviceSpec.from_string(tf.constant(0.0).device)
    if device.device_type is None:
        # In a graph, operations without a device run on a GPU if there is one.
        return bool(tf.config.list_logical_devices("GPU"))
    return device.device_type == "GPU"


def read(handle: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return a variable's value; `like` has the variable's dtype and shape."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=like.dtype)
    value.set_shape(like.shape)
    return value


def assign(handle: tf.Tensor, value: tf.Tensor) -> None:
    """Assign a value to the variable of a handle."""
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)


# The largest number of elements in a block of `norms`. The sums of a block fit
# into the cache, and a block is enough work for all threads.
_BLOCK = 1 << 20
# XLA adds _ROWS vectors of _LANES elements with vector instructions, in an
# unrolled loop.
_LANES = 16
_ROWS = 8
# For shorter tensors, a loop costs more than vector instructions save.
_SMALL = 4096
# `scaling` splits a scalar below _TINY into _TINY and a second factor, because
# the scalar may underflow in float32. Multiplying by a power of two is exact,
# unless the product underflows.
_TINY = 2.0**-100


def norms(
    function: Callable[..., Sequence[tf.Tensor]],
    *tensors: tf.Tensor,
    gpu: bool,
    pair: bool = True,
) -> list[tf.Tensor]:
    """Return the L2 norms of vectors without writing the vectors to memory.

    Call this function inside an XLA kernel. On a CPU, XLA would write vectors
    to memory if they are also used elsewhere. So a loop computes them block by
    block, and sums their squares. On a GPU, a loop would run one block at a
    time, so no loop is used.

    Args:
        function: An elementwise function that computes the vectors from
            `tensors`, or from blocks of `tensors`.
        *tensors: Tensors of the same shape and dtype.
        gpu: Whether the kernel runs on a GPU.
        pair: Whether `function` returns two vectors, not one.

    Returns:
        A float64 scalar for each vector.
    """
    if gpu:
        return [
            tf.sqrt(tf.reduce_sum(_squares([vector])))
            for vector in function(*tensors)
        ]
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    length = flat[0].shape[0]
    count = max(2, -(-length // _BLOCK))
    unit = _ROWS * _LANES
    size = length // (count * unit) * unit if length >= _SMALL else 0
    totals = []
    if size:
        dtype = tf.complex128 if pair else tf.float64
        sums = tf.zeros([size // unit, _LANES], dtype)
        sums = _add_blocks(function, flat, count, sums)
        totals.append(tf.reduce_sum(sums))
    # Skip an empty rest: operations take time to trace and to compile.
    if not size or count * size < length:
        rest = (tensor[count * size :] for tensor in flat)
        totals.append(tf.reduce_sum(_squares(function(*rest))))
    total = tf.add_n(totals)
    parts = [tf.math.real(total), tf.math.imag(total)] if pair else [total]
    return [tf.sqrt(part) for part in parts]


def norm(tensor: tf.Tensor) -> tf.Tensor:
    """Return the L2 norm of all elements, a float64 scalar."""
    return compiled(norm_of, tensor, on_gpu())(tensor)


def norm_of(gpu: bool, tensor: tf.Tensor) -> tf.Tensor:
    """Return the L2 norm of a tensor, inside an XLA kernel; see `norms`."""
    return norms(lambda block: [block], tensor, gpu=gpu, pair=False)[0]


def scaled(tensor: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return a tensor times a float64 scalar; see `scaling`."""
    return scaling(factor)(tensor)


def scaling(factor: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that multiplies tensors by a float64 scalar.

    The scalar must be 0 or at least 1e-60. It may be too small for float32, for
    example if it is the inverse of a norm. So the function multiplies by two
    factors. Inside an XLA kernel, both multiplications take one pass over
    memory.
    """
    one = tf.ones_like(factor)
    first = tf.where(factor < _TINY, _TINY * one, one)
    parts = first, factor / first

    def scale(tensor: tf.Tensor) -> tf.Tensor:
        for part in parts:
            tensor *= tf.cast(part, tensor.dtype)
        return tensor

    return scale


def sum_rows(
    values: tf.Tensor, rows: tf.Tensor, count: int | tf.Tensor
) -> tf.Tensor:
    """Return the sum of each row's values, [count, ...].

    For the same arguments, all replicas get the same sums, bit for bit,
    because the order of the additions depends only on `rows`. On a GPU,
    scatters, `tf.math.segment_sum` and `unsorted_segment_sum` add the values of
    a row in any order, so replicas would diverge.

    Args:
        values: [n, ...].
        rows: int [n], the row of each value, in [0, count).
        count: The number of rows.
    """
    if in_xla():
        # XLA cannot compile the sum below. Under XLA, replicas cannot exchange
        # rows, so the order of additions does not matter.
        return tf.math.unsorted_segment_sum(values, rows, count)
    order = tf.argsort(rows, stable=True)
    return tf.sparse.segment_sum(
        values, order, tf.gather(rows, order), num_segments=count
    )


def _add_blocks(
    function: Callable,
    tensors: Sequence[tf.Tensor],
    count: int,
    sums: tf.Tensor,
) -> tf.Tensor:
    """Add the squares of the first `count` blocks to `sums`."""
    size = sums.shape.num_elements() * _ROWS

    def add(index: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start = tf.stack([index * size])
        squares = _squares(
            function(*(tf.slice(tensor, start, [size]) for tensor in tensors))
        )
        rows = tf.reshape(squares, [-1, _ROWS, _LANES])
        return index + 1, sums + tf.reduce_sum(rows, axis=1)

    first = tf.constant(0, tf.int64)
    sums = tf.while_loop(lambda i, _: i < count, add, (first, sums))[1]
    # Without `stop_gradient`, TensorFlow would differentiate the loop if a tape
    # records the optimizer's step. XLA cannot compile the gradient of this
    # loop.
    return tf.stop_gradient(sums)


def _squares(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Square the elements in float64; pack two vectors into a complex one.

    Summing a complex vector takes one pass over memory. Summing two real
    vectors would take two.
    """
    squares = [tf.square(tf.cast(vector, tf.float64)) for vector in vectors]
    return tf.complex(*squares) if len(squares) == 2 else squares[0]


class Betas(NamedTuple):
    """The decay rates of Adam's moments, and numbers derived from them.

    The derived numbers are computed in float64: in float32, 1 - 0.999 has a
    relative error of 1.3e-5.
    """

    of_m: float
    of_v: float
    new_m: float  # 1 - of_m
    root_of_new_v: float  # sqrt(1 - of_v)
    log_of_m: float
    log_of_v: float


def betas(beta_1: float, beta_2: float) -> Betas:
    """Return Adam's decay rates with the numbers derived from them."""
    logs = (math.log(beta) if beta else -math.inf for beta in (beta_1, beta_2))
    return Betas(beta_1, beta_2, 1 - beta_1, math.sqrt(1 - beta_2), *logs)


def update_moments(
    betas: Betas, gradient: tf.Tensor, m: tf.Tensor, v: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return Adam's moments m and v, updated with the gradient."""
    numbers = (scalar(number, m) for number in betas[:4])
    of_m, of_v, new_m, root_of_new_v = numbers
    m = of_m * m + new_m * gradient
    # Scale before squaring: the square of 1e20 alone overflows float32.
    v = of_v * v + tf.square(root_of_new_v * gradient)
    # The sum can still overflow. XLA vectorizes `where`, but not `minimum`.
    limit = tf.constant(v.dtype.max, v.dtype)
    return m, tf.where(v > limit, limit, v)


def bias_correction(log_beta: float | tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Return 1 - beta^step, to the full precision of `step`'s dtype."""
    return -tf.math.expm1(step * scalar(log_beta, step))
