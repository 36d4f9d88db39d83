"""Finds the arrays that have elements for each row, among a step's outputs.

The following lengths identify such an array:

    step                             length of the array
    graph, unknown number of rows    unknown
    graph, known number of rows      k times this number, and k more if the step
                                     is traced with one more row
    eager                            the number of rows on every replica, or
                                     different lengths on different replicas
"""

from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf


def may_be_of_rows(shape: tf.TensorShape, rows: int | None) -> bool:
    """Return whether an array's length is a multiple of the number of rows.

    If neither is known statically, return True. If only one is, return False.
    """
    length = shape[0]
    return length == rows or bool(length and rows and length % rows == 0)


def gains_a_row(
    kind: str,
    rows: int,
    name: Any,
    shape: tf.TensorShape,
    found: tuple[Any, tf.TensorShape] | None,
    problem: Exception | None,
) -> bool:
    """Return whether an array is longer if there is one more row.

    Args:
        kind: The kind of the step, such as "train_step".
        rows: A replica's number of rows, which divides the array's length.
        name: The name of the array, or None.
        shape: The shape of the array.
        found: The name and shape with one more row; None if the step failed or
            returned no such array.
        problem: The error of the step with one more row, or None.

    Raises:
        ValueError: If the array's length is `rows`, and the length for one more
            row is unknown, or is neither `rows` nor `rows + 1`.
    """
    longer = found and found[1]
    length = longer and longer[0]
    other = f"shape {longer}" if found else "an error" if problem else "none"
    if shape[0] == rows and length not in (rows, rows + 1):
        raise ValueError(
            f"An array that `{kind}` returns must have an element for each "
            "row, or the same length for any number of rows. Received: "
            f"{f'`{name}`' if name else 'an array'} of shape {shape} for "
            f"{rows} rows per replica, and "
            f"{other} for {rows + 1} "
            "rows. Return a number or the result of a metric, or use a "
            "different global batch size."
            f"{f' The error was: {problem}' if problem else ''}"
        ) from problem
    return length == shape[0] + shape[0] // max(rows, 1)


def lengths_of(
    rows: Any, arrays: Collection[tuple[Any, tf.TensorShape]]
) -> list[tf.Tensor]:
    """Return a replica's number of rows and the lengths of its arrays.

    `arrays` contains the name and the shape of each array.

    Returns:
        In a graph, or without arrays, an empty list. Otherwise, a list of one
        int32 vector: the number of rows (-1 for None), and the lengths.
    """
    if not arrays or not tf.executing_eagerly():
        return []
    lengths = [shape[0] for _, shape in arrays]
    return [tf.constant([-1 if rows is None else rows, *lengths], tf.int32)]


def of_rows_by_length(
    strategy: Any, lengths: Any, arrays: Iterable[int]
) -> set[int]:
    """Return the indices of the arrays that have an element for each row.

    In eager mode, these are the arrays whose length equals the number of rows
    on every replica, or differs between replicas.

    `lengths` contains the vectors from `lengths_of`, as a per-replica value.
    `arrays` contains the indices of the arrays.
    """
    extended = strategy.extended
    own = strategy.experimental_local_results(lengths)
    rows, *of_arrays = extended.gather_copies(extended.channel, own).numpy().T
    return {
        i
        for i, found in zip(arrays, of_arrays, strict=True)
        if (found == rows).all() or (found != found[0]).any()
    }
