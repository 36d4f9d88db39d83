"""Loading runs no code: a config with code is rejected."""

import base64
import marshal

import keras
import pytest

import tf_optimizers as tfo


def attacks(mark):
    """Return configs whose code would create the file `mark`."""
    code = compile(f"lambda *_: open({str(mark)!r}, 'w')", "", "eval")
    function = eval(code).__code__
    return {
        "lambda": {
            "class_name": "__lambda__",
            "config": {
                "value": {
                    "code": base64.b64encode(marshal.dumps(function)).decode(),
                    "defaults": None,
                    "closure": None,
                }
            },
        },
        "function": {
            "module": "builtins",
            "class_name": "function",
            "config": "os.system",
            "registered_name": "function",
        },
        "class": {
            "module": "subprocess",
            "class_name": "Popen",
            "config": {"args": ["touch", str(mark)]},
            "registered_name": None,
        },
        "module": {
            "module": "os",
            "class_name": "system",
            "config": f"touch {mark}",
            "registered_name": None,
        },
    }


@pytest.mark.parametrize("kind", attacks(""))
@pytest.mark.parametrize(
    ("optimizer", "argument"),
    [
        *((cls, "learning_rate") for cls in (tfo.Lamb, tfo.AdamOffload)),
        *((tfo.DGCMomentum, name) for name in ("learning_rate", "regularizer")),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("way", ["from_config", "deserialize"])
def test_config_that_asks_for_code_is_rejected(
    tmp_path, optimizer, argument, kind, way
):
    mark = tmp_path / "mark"
    config = optimizer(0.1).get_config() | {argument: attacks(mark)[kind]}
    name = optimizer.__name__
    with pytest.raises((TypeError, ValueError)):
        if way == "from_config":
            optimizer.from_config(config)
        else:
            keras.optimizers.deserialize(
                {
                    "module": None,
                    "class_name": name,
                    "config": config,
                    "registered_name": f"tf_optimizers>{name}",
                }
            )
    assert not mark.exists()
