"""Compiles pure functions of tensors, once per shape; norms, sums and moments.

Norms do not overflow, underflow, or lose digits: squares are taken and summed
in float64, so a norm is finite and has float32's accuracy, whatever the size of
the elements. In float32, the square of 1e-25 is 0, that of 1e20 is inf, and
XLA's sum of 20 million equal squares is off by more than 1e-4.
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
    """Return `function` of `constants` and tensors as a `tf.function`.

    There is one per signature, shared by all optimizers, whatever their numbers
    are, as in a sweep. It is traced once, since TensorFlow warns of a single
    one that is traced for each shape in a model.
    Variables are passed as handles, to `read` and `assign`: a `tf.function`
    that was called with a variable refuses to run once that variable is gone,
    even when it is called with another.

    Args:
        function: Called as `function(*constants, *tensors)`.
        like: A tensor whose shape and dtype are part of the signature.
        *constants: Hashable. Of a float, also within tuples, `function` gets a
            float64 scalar; see `scalar`. All else is compiled in.
        xla: Whether to compile it into one XLA kernel.
    """
    places, numbers = _without_numbers(constants)
    # A function of one context does not exist in another.
    signature = eager_context(), function, like.shape, like.dtype
    kernel = _cached_function(*signature, *places, xla=xla)
    if not numbers:
        return kernel
    return lambda *tensors: kernel(tf.constant(numbers, tf.float64), *tensors)


def _without_numbers(constants: tuple) -> tuple[tuple, list[float]]:
    """Return constants with `float` in the place of each number, and these."""
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
    """Return a `tf.function`; its first argument has the numbers, if any."""
    del context, shape, dtype
    # A function within this one would count as the same for all signatures,
    # when TensorFlow warns of one that is traced too often.
    call = functools.partial(function, *constants)
    if any(leaf is float for leaf in tf.nest.flatten(constants)):
        call = functools.partial(_with_numbers, function, constants)
    return tf.function(call, jit_compile=True if xla else None, autograph=False)


def _with_numbers(
    function: Callable, places: tuple, numbers: tf.Tensor, *tensors: Any
) -> Any:
    """Call `function` with numbers in their places among its constants."""
    rest = iter(tf.unstack(numbers))
    leaves = tf.nest.flatten(places)
    leaves = [next(rest) if leaf is float else leaf for leaf in leaves]
    return function(*tf.nest.pack_sequence_as(places, leaves), *tensors)


def scalar(number: float | tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return a number, or a float64 scalar, in the dtype of a tensor."""
    return tf.cast(tf.convert_to_tensor(number, tf.float64), like.dtype)


def on_gpu() -> bool:
    """Return whether operations that are created here run on a GPU."""
    device = tf.DeviceSpec.from_string(tf.constant(0.0).device)
    if device.device_type is None:  # A graph without a device: the default.
        return bool(tf.config.list_logical_devices("GPU"))
    return device.device_type == "GPU"


def read(handle: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return the value of a variable of the shape and dtype of `like`."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=like.dtype)
    value.set_shape(like.shape)
    return value


def assign(handle: tf.Tensor, value: tf.Tensor) -> None:
    """Assign to a variable."""
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)


# The most elements in a block. A block's sums stay in the cache, and it is
# enough work for all threads.
_BLOCK = 1 << 20
# XLA uses vector instructions to add _ROWS vectors of _LANES elements: few
# enough that it unrolls the sum.
_LANES = 16
_ROWS = 8
# Below this length, a loop costs more than the vector instructions save.
_SMALL = 4096
# A power of two well above float32's smallest: multiplying by it is exact.
_TINY = 2.0**-100


def norms(
    function: Callable[..., Sequence[tf.Tensor]],
    *tensors: tf.Tensor,
    gpu: bool,
    pair: bool = True,
) -> list[tf.Tensor]:
    """Return the L2 norms of vectors without writing these to memory.

    Call it inside an XLA kernel. On a CPU, XLA would store vectors that are
    used again, but it leaves a loop over blocks as it is. On a GPU, where a
    loop would run one block after another, it adds all of them at once.

    Args:
        function: Elementwise; returns vectors, computed from `tensors` or
            blocks of them.
        *tensors: All of one shape and dtype.
        gpu: Whether the kernel runs on a GPU.
        pair: Whether `function` returns two vectors; otherwise one.

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
    # Every operation takes time to trace and to compile.
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
    """Return what `norm` returns, inside an XLA kernel; see `norms`."""
    return norms(lambda block: [block], tensor, gpu=gpu, pair=False)[0]


def scaled(tensor: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return the tensor times a float64 scalar; see `scaling`."""
    return scaling(factor)(tensor)


def scaling(factor: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return what multiplies by a float64 scalar that is >= 1e-60 or 0.

    The inverse of some finite gradients' norm does not fit float32. Call it
    inside an XLA kernel, which makes it one pass over memory.
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
    """Return [count, ...], the sums of values by their row.

    Every replica gets the same bits: values are added in an order that depends
    on nothing but `rows`. On a GPU, scatters and `unsorted_segment_sum` add
    values of one row in any order, so replicas that sum the same values would
    diverge.

    Args:
        values: [n, ...].
        rows: int [n], in [0, count). They may repeat.
        count: The number of rows.
    """
    if in_xla():  # Cannot compile the sums below, and compiles one replica.
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
    """Return `sums` with the squares of the first `count` blocks added."""
    size = sums.shape.num_elements() * _ROWS

    def add(index: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start = tf.stack([index * size])  # Once, not for each slice.
        squares = _squares(
            function(*(tf.slice(tensor, start, [size]) for tensor in tensors))
        )
        rows = tf.reshape(squares, [-1, _ROWS, _LANES])
        return index + 1, sums + tf.reduce_sum(rows, axis=1)

    first = tf.constant(0, tf.int64)
    sums = tf.while_loop(lambda i, _: i < count, add, (first, sums))[1]
    # A tape that records an optimizer's step asks for a gradient, and XLA
    # cannot compile that of a loop.
    return tf.stop_gradient(sums)


def _squares(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return float64 squares, those of two vectors as one vector of pairs.

    The sum of pairs takes one pass over memory, two sums take two.
    """
    squares = [tf.square(tf.cast(vector, tf.float64)) for vector in vectors]
    return tf.complex(*squares) if len(squares) == 2 else squares[0]


class Betas(NamedTuple):
    """The decay rates of Adam's moments, and the weights of what is new.

    These are computed in float64: in float32, 1 - 0.999 is wrong by 1.3e-5.
    """

    of_m: float
    of_v: float
    new_m: float  # 1 - of_m
    root_of_new_v: float  # sqrt(1 - of_v)


def betas(beta_1: float, beta_2: float) -> Betas:
    """Return Adam's decay rates with the weights that go with them."""
    return Betas(beta_1, beta_2, 1 - beta_1, math.sqrt(1 - beta_2))


def update_moments(
    betas: Betas, gradient: tf.Tensor, m: tf.Tensor, v: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return Adam's moments of the gradient and of its square."""
    of_m, of_v, new_m, root_of_new_v = (scalar(number, m) for number in betas)
    m = of_m * m + new_m * gradient
    # Scaled before squaring: the square of 1e20 alone overflows float32.
    v = of_v * v + tf.square(root_of_new_v * gradient)
    # The sum can still overflow. XLA vectorizes a select, but not a minimum.
    limit = tf.constant(v.dtype.max, v.dtype)
    return m, tf.where(v > limit, limit, v)


def logarithm(beta: float) -> float:
    """Return log(beta), for `bias_correction`."""
    return math.log(beta) if beta else -math.inf


def bias_correction(log_beta: float | tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Return 1 - beta^step to all digits of the dtype of `step`.

    In float32, 1 - 0.999 itself is wrong by 1.3e-5.
    """
    return -tf.math.expm1(step * scalar(log_beta, step))
