"""The strategy: `MultiWorkerMirroredStrategy` for Keras 3 and sparse values."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_optimizers._compat.hooks import (
    agree_on_overflow,
    build_from_specs,
    sharing_seeds,
)
from tf_optimizers._compat.patches import STRATEGY, check_names
from tf_optimizers._compat.strategies import adopt_optimizers_of_keras
from tf_optimizers.workers._compat.step_functions import (
    asks_for_xla,
    mark_steps,
    traced_by,
    unmarked,
)
from tf_optimizers.workers.agreement.cluster import (
    check_cluster,
    check_hashes,
    check_in_time,
    check_options,
    restore_sigterm,
    text_hash,
    versions,
    wait_for_first,
)
from tf_optimizers.workers.agreement.statements import (
    START_THE_SAME,
    check_equal,
    gather_statements,
)
from tf_optimizers.workers.agreement.watchdog import watch
from tf_optimizers.workers.collectives.runs import (
    after_its_arguments,
    run_tracked,
)
from tf_optimizers.workers.data.data_distribution import (
    distribute_dataset,
    distribute_from_function,
    report_failure,
)
from tf_optimizers.workers.data.generators import watch_generators
from tf_optimizers.workers.data.local_rounds import with_rounds
from tf_optimizers.workers.data.order import adopt_seeds, propose_seeds
from tf_optimizers.workers.extended import SparseExtended
from tf_optimizers.workers.steps.common_state import CommonState, watch_state
from tf_optimizers.workers.steps.metric_reads import MetricReader
from tf_optimizers.workers.steps.model_steps import Steps
from tf_optimizers.workers.steps.replica_state import replica
from tf_optimizers.workers.steps.run_outputs import (
    ScalarsOfRun,
    gather_any,
    gather_rows,
)
from tf_optimizers.workers.steps.share import without_padding
from tf_optimizers.workers.steps.step_hooks import check_made_inside
from tf_optimizers.workers.steps.uneven_batches import weight_uneven_batches
from tf_optimizers.workers.worker_replicas import is_ours


class SparseMultiWorkerMirroredStrategy(
    tf.distribute.MultiWorkerMirroredStrategy
):
    """Synchronous training on several workers, for Keras 3 and sparse values.

    A `tf.distribute.MultiWorkerMirroredStrategy` under which `fit`, `evaluate`
    and `predict` of Keras 3 work. An `all_reduce` exchanges all
    `tf.IndexedSlices` in two all-gathers, instead of three per variable. The
    second all-gather also contains the dense values of a dtype if their total
    size is small. In a `tf.function`, other dense values of a dtype are sent in
    packs of about `communication_options.bytes_per_pack` bytes, or in one pack
    if this option is 0, the default.

    On CPUs, with at most ten replicas per worker, a gather takes one round
    trip, and a sum of large values takes two. With 64 or more replicas, gathers
    and sums each take one more round trip, unless the number of replicas is
    prime.

    Create the strategy before any tensor or variable, and the model in its
    `scope()`:

        strategy = tfo.SparseMultiWorkerMirroredStrategy()
        with strategy.scope():
            model = ...
            model.compile(optimizer=tfo.DGCMomentum(0.1), loss=...)
        model.fit(dataset_of_global_batches)

    Start the script on every worker, with `TF_CONFIG` set. On one machine,
    `python -m tf_optimizers.launch --workers 2 script.py` does both. Without a
    cluster, this process is the only worker. A process may create more
    strategies at any time, if they have the same cluster, and if every worker
    creates them in the same order.

    Differs from `MultiWorkerMirroredStrategy`:

    - Without GPUs, every logical CPU device of a worker is a replica, not only
      the first.
    - Collectives may be inside a `tf.cond`, or in a function called there, so
      that `gradient_accumulation_steps` and `steps_per_execution` work.
    - If every worker iterates over the whole dataset, shuffles without a seed
      have the same order on all workers.
    - If workers were started with different settings, have different numbers
      of batches, or exchange values of different sizes, they raise an error
      instead of waiting for each other forever.

    TensorFlow itself notices a worker that has died or cannot be reached, after
    1 to 25 seconds.

    Args:
        cluster_resolver: None or a
            `tf.distribute.cluster_resolver.ClusterResolver`. None reads the
            environment variable `TF_CONFIG`. Defaults to `None`.
        communication_options: None or a
            `tf.distribute.experimental.CommunicationOptions`. If its
            `timeout_seconds` is set, a collective that waits longer raises an
            error, after a few more seconds. Defaults to `None`: no timeout.

    Attributes:
        agreement_seconds: float > 0. The seconds that a worker waits for a
            slower worker outside of collectives, for example while the slower
            worker prepares its data. After this time, the waiting worker raises
            an error. Defaults to `1800.0`, half an hour.
        compares_data: bool. Whether workers check that their batches have the
            same rows, and otherwise raise an error. They check this if every
            worker iterates over the whole dataset, and in calls such as
            `train_on_batch`. Set this attribute before `fit`. Defaults to
            `True`.

    Raises:
        TypeError: If an argument or a part of the cluster has the wrong type.
        ValueError: If the cluster is malformed.
        RuntimeError: If TensorFlow was used before the first strategy of a
            cluster; if a later strategy has another cluster or task; if only
            some workers create the strategy; if workers differ in the number of
            devices or strategies, or in versions of Python or packages; or if
            Keras or TensorFlow lacks a function that the strategy must replace.
    """

    agreement_seconds: float = 1800.0
    compares_data: bool = True

    def __init__(
        self, cluster_resolver: Any = None, communication_options: Any = None
    ) -> None:
        check_names(STRATEGY)
        cluster_resolver = check_cluster(cluster_resolver)
        options = check_options(communication_options)
        check_in_time(cluster_resolver)
        wait_for_first(cluster_resolver)
        # Skip the parent's constructor, which would create its own `extended`.
        tf.distribute.Strategy.__init__(
            self, SparseExtended(self, cluster_resolver, options)
        )
        restore_sigterm()
        agree_on_overflow(self)
        weight_uneven_batches()
        adopt_optimizers_of_keras(is_ours, check_made_inside)
        build_from_specs(is_ours, report_failure)
        mark_steps(is_ours, with_rounds)
        watch_generators()
        watch_state()
        self.common_state = CommonState(self)
        # Optimizers already compared across workers.
        self.compared_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._metrics = MetricReader(self)
        self._steps = Steps(self, self._metrics.watch)
        self._scalars = ScalarsOfRun(self, [])
        self._functions: weakref.WeakKeyDictionary[Any, Callable] = (
            weakref.WeakKeyDictionary()
        )
        self._agree()

    def _agree(self) -> None:
        """Compare workers' setups, agree on seeds, and start the watchdog."""
        if self.extended.workers == 1:
            return
        statement = {
            **versions(),
            "devices": len(self.extended.worker_devices),
            "number of strategies": self.extended.number,
        }
        subject = "the strategy"
        received = gather_statements(
            self, subject, [statement, propose_seeds(), text_hash()]
        )
        statements, proposals, hashes = zip(*received, strict=True)
        hint = "Install the same versions of packages on every machine. "
        check_equal(subject, statements, hint + START_THE_SAME)
        check_hashes(hashes, self.extended.worker_index == 0)
        adopt_seeds(proposals)
        watch(self.extended)

    def experimental_distribute_dataset(
        self, dataset: Any, options: Any = None
    ) -> Any:
        """Distribute a dataset of global batches to all replicas.

        Every worker must call this method. `fit`, `evaluate` and `predict` call
        it themselves.

        Raises:
            RuntimeError: In eager mode, if only some workers call this method,
                if their datasets differ in cardinality, or if workers shuffle
                the same data with different seeds.
        """
        return distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable, options: Any = None
    ) -> Any:
        """Distribute the dataset that `dataset_fn` creates on each worker.

        Every worker must call this method.

        Raises:
            RuntimeError: In eager mode, if only some workers call this method,
                or if their datasets do not give each worker the same number of
                batches per replica.
        """
        return distribute_from_function(self, dataset_fn, options)

    def run(
        self,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` on each replica of this worker; return the results.

        In a `tf.function`, the first `reduce` of a returned float32 scalar
        reduces all returned float32 scalars, in at most one exchange. In
        `train_step` and `test_step` of a Keras model, Keras does not divide
        losses by the number of replicas. Instead, each replica's gradients are
        weighted by the replica's fraction of the rows of the global batch.
        """
        self.common_state.note_run()
        with self._steps.reporting_failures():
            step, args = self._steps.of(fn, args, kwargs)
            run = functools.partial(super().run, options=options)
            identical: list[Any] = []
            if step is None:
                fn = unmarked(fn)
                traced = traced_by(fn)
                if traced is not None and tf.executing_eagerly():
                    return self._as_function(fn)(args, kwargs, options)
                fn = without_padding(traced or fn, (args, kwargs or {}))
                outputs = self._run(run, fn, args, kwargs)
            else:
                run_step = functools.partial(self._run, run, kwargs=kwargs)
                with step.noting_results():
                    outputs = run_step(step, args)
                    of_rows = step.arrays_of_rows(run_step, args)
                outputs, identical = step.finish(self, outputs, of_rows)
        self._scalars = ScalarsOfRun(self, outputs, identical)
        return outputs

    def _as_function(self, fn: Any) -> Callable:
        """Return a `tf.function` that runs another `tf.function` on replicas.

        A `tf.function` that a replica calls cannot apply an optimizer. So the
        returned `tf.function` calls `strategy.run` with the Python function, as
        TensorFlow's strategies do.
        """
        if fn not in self._functions:
            given = weakref.ref(fn)  # Do not keep `fn`, the key, alive.

            def run(*args: Any) -> Any:
                traced: Any = traced_by(given())
                return self.run(traced, *args)

            self._functions[fn] = tf.function(run, jit_compile=asks_for_xla(fn))
        return self._functions[fn]

    def _run(self, run: Callable, fn: Callable, args: Any, kwargs: Any) -> Any:
        with sharing_seeds(self, fn) as fn:
            if not tf.executing_eagerly():
                fn = after_its_arguments(fn)
            return run_tracked(
                self, functools.partial(run, fn, args, kwargs), (args, kwargs)
            )

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate all replicas' values, of any dtype, along `axis`.

        With several workers, `predict` uses this method to concatenate
        predictions.
        """
        gather = super().gather
        return tf.nest.map_structure(
            lambda value: gather_any(self, gather, value, axis), value
        )

    @functools.cached_property
    def gather_rows_in_function(self) -> Callable:
        """`gather_rows` as a `tf.function`, for eager mode.

        In eager mode, TensorFlow traces its own gather at every call.
        """
        gather = functools.partial(gather_rows, self)
        return tf.function(gather, autograph=False)

    def reduce(
        self, reduce_op: Any, value: Any, axis: int | None = None
    ) -> Any:
        """Reduce the values of a nest over replicas, and along `axis` if given.

        Unlike TensorFlow's method, this method accepts all values that Keras 3
        passes: nests, and scalars together with an axis. The axis is ignored
        for scalars. If a model's step has already reduced a value, such as a
        metric's result, the mean of this value is the value itself.

        TensorFlow also calls this method to read a variable whose value may
        differ between replicas, such as `DGCMomentum`'s state.

        Raises:
            RuntimeError: If workers do not read a variable together, or have
                trained differently.
        """
        is_read = isinstance(value, tf.Variable) and tf.executing_eagerly()
        if is_read and self.extended.workers > 1:
            if replica.is_assigning:  # Keras drops the result.
                self._metrics.on_assign()
                return self.experimental_local_results(value)[0].value()
            total = self._metrics.read(value)
            if total is not None and reduce_op == tf.distribute.ReduceOp.SUM:
                return total
        return tf.nest.map_structure(
            lambda value: self._reduce(reduce_op, value, axis), value
        )

    def _reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        # Do not reduce a metric's result along the axis: it may be an array.
        reduced = self._scalars.reduce(reduce_op, value)
        if reduced is not None:
            return reduced
        local = self.experimental_local_results(value)[0]
        if tf.convert_to_tensor(local).shape.rank == 0:
            axis = None  # Keras passes an axis even with scalars.
        return super().reduce(reduce_op, value, axis)
