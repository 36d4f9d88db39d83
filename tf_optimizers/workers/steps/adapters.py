"""Raises if LoRA was enabled after an optimizer was built."""

import keras

from tf_optimizers._compat.keras_internals import built_variables, layers_of
from tf_optimizers.wrapped import every_optimizer


def check_adapters(model: keras.Model) -> None:
    """Raise if `enable_lora` was called after an optimizer was built.

    `enable_lora` freezes a weight of a layer, such as the kernel, and adds new
    weights. But a step that has already been traced would train the frozen
    weight, not the new weights.
    """
    known = {
        id(variable)
        for optimizer in every_optimizer(model)
        for variable in built_variables(optimizer)
    }
    late = [
        layer.path
        for layer in layers_of(model)
        if getattr(layer, "lora_enabled", False)
        and any(id(each) in known for each in layer.non_trainable_variables)
        and any(id(each) not in known for each in layer.trainable_variables)
    ]
    if late:
        raise RuntimeError(
            "`enable_lora` must be called before the optimizer is built. "
            f"Received: LoRA enabled later, in {', '.join(late)}. Call "
            "`compile` again, with a new optimizer."
        )
