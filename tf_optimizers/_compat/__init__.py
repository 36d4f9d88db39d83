"""Private names of TensorFlow and Keras that the package depends on.

Those that only the strategy needs stand apart in modules beside this one.

Tried with TensorFlow 2.16 and 2.21 and Keras 3.10, 3.12 and 3.15.
tests/test_compat.py names the one that is gone when a new version no longer
has it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import context
from tensorflow.python.ops import control_flow_util, resource_variable_ops

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tf_optimizers needs Keras's TensorFlow backend. Received: "
        f"{keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow before keras is imported."
    )

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class OptimizerHooks(keras.optimizers.Optimizer):
    """`keras.optimizers.Optimizer` with its private steps under public names.

    Subclasses implement `apply_in_replica` and `overwrite_with_averages`.
    """

    def _backend_apply_gradients(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[Any]
    ) -> None:
        # Keras clips, decays, accumulates and averages in here, before the
        # replicas' gradients are summed; there is no public place between
        # `apply`, which unscales them, and `update_step`.
        self.apply_in_replica(list(grads), list(trainable_variables))

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables: Sequence[Any]
    ) -> None:
        # `finalize_variable_values` calls this; Keras's own assigns without a
        # cast, which fails for averages of another dtype than the variable.
        self.overwrite_with_averages(list(trainable_variables))

    def _get_current_learning_rate(self) -> Any:
        # Keras calls any schedule with the number of micro-batches, and gives
        # what this returns to all who ask for `learning_rate`.
        if getattr(self._learning_rate, "counts_updates", False):
            return self._learning_rate(self.iterations)
        return super()._get_current_learning_rate()

    def apply_in_replica(
        self, gradients: list[Gradient], variables: list[Any]
    ) -> None:
        """Update `variables` from this replica's unscaled `gradients`."""
        raise NotImplementedError

    def overwrite_with_averages(self, variables: list[Any]) -> None:
        """Assign the moving averages to `variables`."""
        raise NotImplementedError

    def variable_index(self, variable: Any) -> int:
        """Return the position of `variable` in the list given to `build`."""
        # Keras documents this for subclasses, but under a private name.
        return self._get_variable_index(variable)

    def variable_key(self, variable: Any) -> str:
        """Return what identifies `variable` and its replicas' components."""
        # Under a strategy `update_step` is handed components; Keras resolves
        # them to the variable they belong to in here only.
        return self._var_key(variable)

    @property
    def built_variables(self) -> list[Any]:
        """The variables given to `build`."""
        # Keras keeps them for `apply(grads)` and has no public accessor.
        return self._trainable_variables

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy under whose scope the optimizer was created."""
        # Keras keeps it to find the variables' devices after training.
        return self._distribution_strategy

    @property
    def micro_steps(self) -> tf.Tensor:
        """Calls of `apply` so far; `iterations` counts the updates."""
        # `iterations` is divided by `gradient_accumulation_steps`.
        return tf.convert_to_tensor(self._iterations)

    def accumulator(self, variable: Any) -> tf.Variable:
        """Return the sum of gradients that `gradient_accumulation_steps` keeps.

        Keras creates them in `build` and has no public accessor.
        """
        return self._accumulated_gradients[self.variable_index(variable)].value

    def average(self, variable: Any) -> tf.Variable | None:
        """Return the moving average that `use_ema` keeps of `variable`.

        Keras creates them in `build` and has no public accessor. None for
        variables that are overwritten by their gradients (float8 scales).
        """
        index = self.variable_index(variable)
        average = self._model_variables_moving_average[index]
        return None if average is None else average.value

    def add_replica_variable(
        self, reference: Any, name: str, dtype: str
    ) -> keras.Variable:
        """Add a variable of zeros of which every replica has its own.

        Read outside of a replica, it is the sum over replicas; what is
        assigned there is divided among them. Keras's `add_variable` has no
        argument for this, and tracks its variables in private.
        """
        path = getattr(reference, "path", reference.name.removesuffix(":0"))
        value = getattr(reference, "value", reference)
        if callable(value):  # The method of a `tf.Variable`.
            value = reference
        with (
            self.strategy.extended.colocate_vars_with(value),
            keras.name_scope(self.name, caller=self),
        ):
            variable = keras.Variable(
                "zeros",
                shape=reference.shape,
                dtype=dtype,
                trainable=False,
                synchronization="on_read",
                aggregation="sum",
                name=f"{path.replace('/', '_')}_{name}",
            )
        self._track_variable(variable)
        return variable

    def is_overwritten(self, variable: Any) -> bool:
        """Tell a variable that its gradient replaces (a float8 scale)."""
        # Keras gives these no slots, and hands no gradients of them on.
        return self._overwrite_variable_with_gradient(variable)


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Let the `fit` that is about to start do so at an epoch."""
    # Keras reads it after `on_train_begin`, for its own BackupAndRestore; the
    # argument `initial_epoch` has been given by then.
    model._initial_epoch = epoch


def build_metrics(model: keras.Model, batch: Any) -> None:
    """Create the variables of a model's metrics, whatever their values."""
    # Keras does so when it traces the first step, if there is no strategy.
    model._symbolic_build(data_batch=batch)


def global_seed() -> list[int] | None:
    """Return the state of the generator behind unseeded `keras.random` ops.

    None if there is none yet: Keras creates it for the first of them.
    """
    # Keras keeps it under this name, for every thread its own.
    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state.numpy().tolist()


def set_global_seed(state: list[int]) -> None:
    """Let unseeded `keras.random` ops go on from a state."""
    generator = global_state.get_global_attribute("global_seed_generator")
    if generator is None:
        # Given a seed, it draws none from Python's generator.
        generator = keras.random.SeedGenerator(seed=0)
        global_state.set_global_attribute("global_seed_generator", generator)
    generator.state.assign(state)


def in_xla() -> bool:
    """Tell whether what is being traced will be compiled by XLA."""
    # `tf.function(jit_compile=True)` opens a context that ops ask for in here
    # only; it has no public name.
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def eager_context() -> Any:
    """Return what TensorFlow keeps devices and functions in.

    Keras's tests of strategies replace it, to start with other devices. It
    has no public name.
    """
    return context.context()


def plain_variable(initial_value: Any, **kwargs: Any) -> tf.Variable:
    """Create one variable that no strategy in scope captures."""
    # `tf.Variable` asks the strategy, which makes one per replica. The class
    # behind it, which has no public name, does not.
    return resource_variable_ops.ResourceVariable(initial_value, **kwargs)


def call_across_replicas(function: Callable, *args: Any) -> Any:
    """Call `function(strategy, *args)` where variables can be updated.

    That is cross-replica context for strategies that merge their replicas
    (`MirroredStrategy`), and the replica itself for those that do not. Which
    of the two a strategy is has no public name.
    """
    return tf.__internal__.distribute.interim.maybe_merge_call(
        function, tf.distribute.get_strategy(), *args
    )


def switch_across_replicas(
    index: Any, functions: Sequence[Callable], gradients: list[Gradient]
) -> None:
    """Run one of several functions of a replica's gradients.

    Each may reduce over replicas and update variables. A strategy that merges
    its replicas refuses both inside a `tf.switch_case` that a replica enters,
    so there it is entered once and each replica runs inside it.
    """

    def switch(index: tf.Tensor, call: Callable) -> None:
        def branch(function: Callable) -> Callable:
            # Branches must return something, and the same.
            return lambda: (call(function), tf.constant(0))[1]

        tf.switch_case(tf.cast(index, tf.int32), list(map(branch, functions)))

    if len(functions) == 1:
        functions[0](gradients)
        return
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        switch(index, lambda function: function(gradients))
        return

    def merged(strategy: Any, index: Any, gradients: Any) -> None:
        def call(function: Callable) -> Any:
            # A copy has the replica's device, by which values are reduced;
            # what a branch is handed has none.
            return strategy.extended.call_for_each_replica(
                lambda gradients: function(list(map(tf.identity, gradients))),
                args=(gradients,),
            )

        switch(strategy.experimental_local_results(index)[0], call)

    tf.distribute.get_replica_context().merge_call(
        merged, args=(index, gradients)
    )


def has_tensorflow_started() -> bool:
    """Tell whether it is too late to configure collectives.

    TensorFlow itself raises, but with a word of its own inside.
    """
    return context.context()._context_handle is not None


def joined_cluster() -> tuple[dict[str, Any], str, int] | None:
    """Return the cluster that a strategy has started, and this task's place.

    TensorFlow keeps it in private. None if there is none yet.
    """
    server = context.context()._collective_ops_server_def
    if server is None:
        return None
    cluster = tf.train.ClusterSpec(server.cluster).as_dict()
    return cluster, server.job_name, server.task_index


class Coordination:
    """TensorFlow's key-value store between the processes of a cluster.

    It has no public name. Unlike a collective, it is not part of a graph, and
    has a timeout.
    """

    def write(self, key: str, text: str) -> None:
        """Set what every process can read, once per key."""
        context.context().set_config_key_value(key, text)

    def read(self, key: str, timeout: float) -> str | None:
        """Return what was written, or None after `timeout` seconds."""
        try:
            return context.context().get_config_key_value(
                key, int(1000 * timeout)
            )
        except tf.errors.DeadlineExceededError:
            return None

    def delete(self, key: str) -> None:
        """Forget what was written."""
        context.context().delete_config_key_value(key)

    def check_alive(self, task: str, timeout: float) -> None:
        """Raise TensorFlow's error unless a process answers in time."""
        context.context().check_collective_ops_peer_health(
            task, int(1000 * timeout)
        )

    def meet(self, key: str, timeout: float) -> None:
        """Wait until every process of the cluster has come here."""
        context.context().wait_at_barrier(key, int(1000 * timeout))
