"""Any tensors as one, for what takes only one, or always the same."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def close(values: Any) -> tf.Tensor:
    """Return one tensor that holds those of a nest.

    It may be an element of a `Dataset.scan`, which keeps no
    `tf.experimental.Optional` (TensorFlow 2.21), or come from any branch of a
    conditional.
    """
    inside = [
        leaf
        for leaf in tf.nest.flatten(values, expand_composites=True)
        if _is_in(leaf)
    ]
    if not inside:
        return tf.raw_ops.OptionalNone()
    return tf.raw_ops.OptionalFromValue(components=inside)


def open_box(box: tf.Tensor, like: Any) -> Any:
    """Return the nest that was put in a box.

    Args:
        box: What `close` returned.
        like: A nest of such tensors, or of their specifications.
    """
    leaves = tf.nest.flatten(like, expand_composites=True)
    inside = list(filter(_is_in, leaves))
    tensors = iter(_tensors(box, inside) if inside else [])
    values = [
        next(tensors) if _is_in(leaf) else _outside(leaf) for leaf in leaves
    ]
    return tf.nest.pack_sequence_as(like, values, expand_composites=True)


def _tensors(box: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    return tf.raw_ops.OptionalGetValue(
        optional=box,
        output_types=[each.dtype for each in like],
        output_shapes=[each.shape for each in like],
    )


def _is_in(leaf: Any) -> bool:
    return isinstance(leaf, (tf.Tensor, tf.TensorSpec))


def _outside(leaf: Any) -> Any:
    """Return what is no tensor, such as a shape; None of its specification."""
    return None if isinstance(leaf, tf.TypeSpec) else leaf
