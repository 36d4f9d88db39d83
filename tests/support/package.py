"""Installs the wheel, then the sdist, in an empty environment and tries them.

python -m build && python tests/support/package.py dist
"""

import pathlib
import subprocess
import sys
import tempfile
import venv
import zipfile

TRAIN = """
import keras
import numpy as np
import tf_optimizers as tfo

strategy = tfo.SparseMultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(100)])
    model.compile(tfo.DGCMomentum(0.1), loss="mse")
model.fit(np.ones((8, 200)), np.ones((8, 100)), batch_size=4, verbose=0)
assert strategy.num_replicas_in_sync == 2
model.save("model.keras")
model.load_weights("model.keras")
"""
ALONE = """
import importlib.metadata
import pathlib
import keras
import tf_optimizers as tfo

assert importlib.metadata.version("tf_optimizers") == tfo.__version__
assert (pathlib.Path(tfo.__file__).parent / "py.typed").exists()
for optimizer in (tfo.Lamb(), tfo.LANS(), tfo.AdamOffload()):
    weight = keras.Variable([1.0])
    optimizer.apply([[1.0]], [weight])
    assert 0.9 < weight.numpy()[0] < 1.0
"""


def main(folder):
    (wheel,) = pathlib.Path(folder).glob("*.whl")
    (sdist,) = pathlib.Path(folder).glob("*.tar.gz")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as place:
        venv.create(f"{place}/env", with_pip=True)
        python = f"{place}/env/bin/python"
        pathlib.Path(place, "train.py").write_text(TRAIN)
        # Both have the same dependencies.
        for archive, options in [
            (wheel, []),
            (sdist, ["--no-deps", "--force-reinstall"]),
        ]:
            run(place, python, "-m", "pip", "install", "-q", *options, archive)
            run(place, python, "-c", ALONE)
            launch = ("-m", "tf_optimizers.launch", "--workers", "2")
            run(place, python, *launch, "train.py")
            sys.stdout.write(f"{archive.name}: installed and tried\n")


def check_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    others = [n for n in names if not n.startswith("tf_optimizers")]
    assert not others, f"The wheel contains {others}."
    assert any(name.endswith("licenses/LICENSE") for name in names)


def run(place, *command):
    command = [str(part) for part in command]
    subprocess.run(command, cwd=place, check=True, timeout=600)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
