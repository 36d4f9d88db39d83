"""Images for the notebooks: MNIST or, if its download fails, digits."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from tf_optimizers.demo.data import load_splits, prepare, read_splits, whole

# A part of MNIST, so that a notebook runs within minutes.
MNIST_PARTS = {
    "train": "train[:10240]",
    "validation": "train[50000:]",
    "test": "test",
}
MNIST_MAX_PIXEL = 255

# Without internet access, tfds would retry for minutes, but urlopen fails
# within seconds.
_DOWNLOAD = """
import sys
import urllib.request
host = "https://storage.googleapis.com/cvdf-datasets/mnist/"
urllib.request.urlopen(host + "t10k-labels-idx1-ubyte.gz", timeout=10).close()
import tensorflow_datasets as tfds
tfds.builder("mnist", data_dir=sys.argv[1]).download_and_prepare()
"""


def fetch(data_dir: Path, limit: float = 120.0) -> str:
    """Download MNIST or, if this fails, prepare scikit-learn's digits.

    Args:
        data_dir: Folder of the dataset, written if missing.
        limit: Seconds that the download may take.

    Returns:
        "mnist" or "digits".
    """
    try:
        # A separate process can be killed if the download hangs.
        subprocess.run(
            [sys.executable, "-c", _DOWNLOAD, str(data_dir)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        prepare(data_dir)
        return "digits"
    return "mnist"


def load(name: str, data_dir: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images in [0, 1] and labels of each split.

    Args:
        name: "mnist" or "digits".
        data_dir: Folder of the dataset.

    Returns:
        For "train", "validation" and "test", images [number, height, width, 1]
        and labels [number].
    """
    if name == "digits":
        splits = load_splits(data_dir)
    else:
        builder = tfds.builder("mnist", data_dir=data_dir)
        splits = read_splits(builder, MNIST_PARTS, MNIST_MAX_PIXEL)
    return {split: whole(data) for split, data in splits.items()}
