"""The patches of Keras and TensorFlow, and errors if a name is missing."""

import pathlib
import re

import cases
import pytest
from real_workers import output_of

from tf_optimizers._compat import patches
from tf_optimizers._compat.patches import PATCHES

ROOT = pathlib.Path(__file__).parents[1]
NAMES = [name for patch in PATCHES for name in patch.names]
HOOKING = "setattr(self, name, call)"
SETTING = "setattr(owner, attribute, make(getattr(owner, attribute)))"
# Keras's own optimizers need these.
NEEDED = {
    "keras.Variable.assign",
    "keras.optimizers.Optimizer.apply",
    "keras.optimizers.Optimizer.build",
}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.names[0])
def test_effect_of_every_patch_is_tested(patch):
    """Such a test runs by default, unlike those marked `long`."""
    path, _, name = patch.test.partition("::")
    before, found, _ = (ROOT / path).read_text().partition(f"\ndef {name}(")
    assert found
    assert "@pytest.mark.long\n" not in before.rpartition("\n\n\n")[2] + "\n"


def test_nothing_else_is_replaced():
    """Only `tf.random.shuffle` is, for a moment, under Keras before 3.16.

    Attributes of `cls` are ours, `ChiefOnly` sets its own attributes, and
    `Wrapper` sets public settings of its inner optimizer.
    """
    setting = re.compile(
        r"^\s*(?:setattr\((?!sys,|cls,)|(?:keras|tf|\w+_op)[\w.]*\.\w+ = )"
    )
    found = [
        (path.name, line.strip())
        for path in (ROOT.parent / "tf_optimizers").rglob("*.py")
        for line in path.read_text().splitlines()
        if setting.match(line)
    ]
    assert sorted(found) == [
        ("chief_only.py", HOOKING),
        ("inner.py", "setattr(optimizer.inner_optimizer, name, value)"),
        ("patches.py", SETTING),
        ("shuffles.py", "tf.random.shuffle = original"),
        ("shuffles.py", "tf.random.shuffle = shuffle"),
    ]
    assert len(set(NAMES)) == len(NAMES) <= 26
    assert list(patches.NAMES.values()) == NAMES  # Keys are unique.


@pytest.mark.parametrize("which", cases.with_long(["all", "each"], ["each"]))
def test_one_replica_does_without_them(which):
    """Delete all or each of them: only features that need a name may raise."""
    output_of(WITHOUT, which, *sorted({*NAMES} - NEEDED))


WITHOUT = """
import contextlib
import pkgutil
import sys

import keras
import numpy as np

which, *names = sys.argv[1:]


@contextlib.contextmanager
def without(names):
    with contextlib.ExitStack() as undo:
        for name in names:
            owner, _, name = name.rpartition(".")
            owner = pkgutil.resolve_name(owner)
            classes = getattr(owner, "__mro__", [owner])
            owner = next(part for part in classes if name in vars(part))
            undo.callback(setattr, owner, name, vars(owner)[name])
            delattr(owner, name)
        yield


def reimport():
    for name in [n for n in sys.modules if n.startswith("tf_optimizers")]:
        del sys.modules[name]
    import tf_optimizers

    return tf_optimizers


def train():
    tfo = reimport()
    found = []
    for make in (
        lambda: tfo.Lamb(0.1),
        lambda: tfo.LANS(0.1),
        lambda: tfo.AdamOffload(0.1),
        lambda: tfo.DGCMomentum(0.1, sparsity=(0.5,), min_compress_size=1),
    ):
        variable = keras.Variable(np.linspace(-1, 1, 8, dtype="float32"))
        optimizer = make()
        for i in range(2):
            optimizer.apply([np.float32(i) - variable.value], [variable])
        found.append(variable.numpy())
    return found


def refusal(make):
    try:
        make(reimport())
    except RuntimeError as error:
        return str(error)


expected = train()
assert not np.array_equal(expected[0], np.linspace(-1, 1, 8, dtype="float32"))
for gone in [names] if which == "all" else [[name] for name in names]:
    with without(gone):
        np.testing.assert_array_equal(train(), expected)
with without(names):
    text = refusal(lambda tfo: tfo.SparseMultiWorkerMirroredStrategy())
    assert "_maybe_symbolic_build" in text, text
    assert "_moments" in text, text
    text = refusal(lambda tfo: tfo.SparseLoCo(keras.optimizers.SGD(0.1)))
    assert "keras.Model.save_weights" in text, text
"""
