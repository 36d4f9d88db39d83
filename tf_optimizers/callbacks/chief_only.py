"""Calls a callback on worker 0 only."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tf_optimizers.replicas import replicas_of

# A callback stops `fit`, `evaluate` or `predict` by setting one of these
# attributes of the model.
_STOPS = {
    "stop_training": "stop training",
    "stop_evaluating": "stop evaluating",
    "stop_predicting": "stop predicting",
}
_HOOKS = [name for name in dir(keras.callbacks.Callback) if name[:3] == "on_"]


class ChiefOnly(keras.callbacks.Callback):
    """Calls a callback on the chief (worker 0) only.

    Without `ChiefOnly`, every worker would start its own run of an experiment
    tracker, and show its own progress bar. So wrap loggers and progress bars:

        model.fit(..., verbose=0, callbacks=[
            tfo.callbacks.ChiefOnly(keras.callbacks.TensorBoard("logs")),
            tfo.callbacks.ChiefOnly(keras.callbacks.ProgbarLogger()),
        ])

    The callback gets logs that cover all workers, and may read weights. With
    several workers, actions that need all workers raise an error: evaluating,
    predicting, stopping the training, or reading state that differs between
    replicas. For example, a wrapped `ModelCheckpoint` cannot save u and v of
    `DGCMomentum`.

    If the callback's constructor starts a run, pass a function that returns the
    callback:

        def make_logger():
            wandb.init(project="demo")
            return WandbMetricsLogger()  # From `wandb.integration.keras`.

        tfo.callbacks.ChiefOnly(make_logger)

    With `fit(verbose=0)`, Keras adds no progress bar on any worker, but a
    `keras.callbacks.ProgbarLogger` in `ChiefOnly` still shows its bar.

    Args:
        callback: `keras.callbacks.Callback`, or a function that returns a
            callback. The function is called once, on the chief, when the first
            `fit`, `evaluate` or `predict` begins.

    Raises:
        TypeError: If `callback` is neither of these, or returns no callback.
        RuntimeError: In `fit`, `evaluate` or `predict`, if the callback needs
            other workers.

    Example:
        >>> import keras
        >>> import tf_optimizers as tfo
        >>> logger = tfo.callbacks.ChiefOnly(keras.callbacks.CSVLogger("a.csv"))
    """

    def __init__(
        self,
        callback: keras.callbacks.Callback | Callable[[], Any],
    ) -> None:
        super().__init__()
        self.callback: Any = None
        self._make = callback
        is_one = isinstance(callback, keras.callbacks.Callback)
        if is_one or not callable(callback):
            self.callback = _checked(callback)
        for name in _HOOKS:
            method = getattr(self.callback, name, None)
            default = getattr(keras.callbacks.Callback, name)
            # Set only the hooks that the callback overrides, or all hooks if
            # the callback does not exist yet. An unneeded `on_train_batch_end`
            # would prevent Keras from calling this hook in a thread.
            if getattr(method, "__func__", method) is not default:
                call: Callable = functools.partial(self._call, name)
                if name == "on_train_begin":
                    call = _keeping_generators()(call)
                setattr(self, name, call)

    def set_model(self, model: keras.Model) -> None:
        """On the chief, create the callback if needed; pass it the model."""
        super().set_model(model)
        self._group = replicas_of(model.distribute_strategy)
        with _keeping_generators():
            if self.callback is None and self._group.worker == 0:
                self.callback = _checked(
                    self._make(), "a function that returned "
                )
            self._call("set_model", model)

    def set_params(self, params: dict[str, Any]) -> None:
        """On the chief, pass Keras's parameters to the callback."""
        super().set_params(params)
        logger = keras.callbacks.ProgbarLogger
        if isinstance(self.callback, logger) and not params.get("verbose"):
            params = {**params, "verbose": 1}
        self._call("set_params", params)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._group.worker != 0:
            return
        before = self._stops()
        kind = type(self.callback).__name__
        with self._group.alone(f"`{kind}` in `ChiefOnly`"):
            getattr(self.callback, name)(*args, **kwargs)
        new = [stop for stop in self._stops() if stop not in before]
        if new and self._group.workers > 1:
            raise RuntimeError(
                f"All workers must {_STOPS[new[0]]} together. Received: "
                f"`{new[0]}` from `{kind}` on the chief alone. Pass `{kind}` "
                "to Keras on every worker, without `ChiefOnly`."
            )

    def _stops(self) -> list[str]:
        """Return the names in `_STOPS` of attributes that are true."""
        # An attribute may be missing before `fit`, `evaluate` or `predict`.
        return [name for name in _STOPS if getattr(self.model, name, False)]


@contextlib.contextmanager
def _keeping_generators() -> Iterator[None]:
    """Restore the random states of Python and NumPy when the context ends.

    A callback may draw random numbers on the chief. For example, MLflow draws
    the name of a run. The other workers do not draw these numbers, so data
    shuffled later would have a different order on the chief.

    Use this context only before `fit` reads the first batch. Later, threads
    that load data may also draw random numbers, and after the context they
    would draw the same numbers again.
    """
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _checked(
    callback: Any, received: str = "callback="
) -> keras.callbacks.Callback:
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(
            "`callback` must be a `keras.callbacks.Callback`, or a function "
            f"that returns a callback. Received: {received}{callback!r}. In a "
            "list of callbacks, wrap each callback separately."
        )
    return callback
