"""The data of notebooks, and their format."""

import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("tensorflow_datasets")

import tensorflow_datasets as tfds

from tf_optimizers.demo import images
from tf_optimizers.demo.data import SPLIT_SIZES


@pytest.mark.parametrize(
    ("download", "expected"),
    [
        ("", "mnist"),
        ("raise SystemExit(1)", "digits"),
        ("import time; time.sleep(600)", "digits"),
    ],
    ids=["succeeds", "fails", "hangs"],
)
def test_fetch_when_the_download(download, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_DOWNLOAD", download)
    start = time.monotonic()
    assert images.fetch(tmp_path, limit=5) == expected
    assert time.monotonic() - start < 60
    assert (tmp_path / "sklearn_digits").exists() is (expected == "digits")


def test_download_is_of_mnist_below_the_folder(tmp_path):
    program = f"""
import io
import urllib.request
import tensorflow_datasets as tfds
calls = []
urllib.request.urlopen = lambda url, timeout: io.BytesIO()
class Builder:
    def __init__(self, *args, **kwargs): calls.append((args, kwargs))
    def download_and_prepare(self): calls.append("downloaded")
tfds.builder = Builder
{images._DOWNLOAD}
wanted = [(("mnist",), {{"data_dir": {str(tmp_path)!r}}}), "downloaded"]
raise SystemExit(calls != wanted)
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120
    )


def test_digits_have_their_splits(tmp_path):
    data = images.load("digits", tmp_path)
    for split, size in SPLIT_SIZES.items():
        pixels, labels = data[split]
        assert pixels.shape == (size, 8, 8, 1) and labels.shape == (size,)
        assert pixels.dtype == np.float32
        assert (pixels.min(), pixels.max()) == (0.0, 1.0)


def test_mnist_is_scaled_like_the_digits(tmp_path):
    with tfds.testing.mock_data(num_examples=20):
        pixels, labels = images.load("mnist", tmp_path)["train"]
    assert pixels.shape == (20, 28, 28, 1) and labels.shape == (20,)
    assert pixels.min() == 0.0 and 0.98 < pixels.max() <= 1.0
    np.testing.assert_allclose(255 * pixels, np.rint(255 * pixels), atol=1e-4)


def test_parts_of_mnist_do_not_overlap():
    sizes = {"train": 60_000, "test": 10_000}
    splits = {
        name: tfds.core.SplitInfo(name=name, shard_lengths=[size], num_bytes=0)
        for name, size in sizes.items()
    }
    rows = []
    for part in images.MNIST_PARTS.values():
        instruction = tfds.core.ReadInstruction.from_spec(part)
        for chosen in instruction.to_absolute(splits):
            stop = sizes[chosen.splitname] if chosen.to is None else chosen.to
            rows += [
                (chosen.splitname, row)
                for row in range(chosen.from_ or 0, stop)
            ]
    assert len(rows) == len(set(rows)) == 10_240 + 10_000 + 10_000
