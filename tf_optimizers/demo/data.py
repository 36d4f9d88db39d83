"""Scikit-learn's digits for TensorFlow Datasets, without a download."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SPLIT_SIZES = {"train": 1024, "validation": 386, "test": 387}
MAX_PIXEL = 16
_SPLIT_SEED = 0


class SklearnDigits(tfds.core.GeneratorBasedBuilder):
    """The 1,797 digits that come with scikit-learn, in three splits."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=(
                "Handwritten digits of 8 x 8 pixels. A pixel is the number of "
                f"inked points in a 4 x 4 block: 0 to {MAX_PIXEL}, not 255."
            ),
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # The images come with scikit-learn.
        rows = split_rows(load_digits().target)
        return {name: self._generate_examples(rows[name]) for name in rows}

    def _generate_examples(
        self, rows: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        digits = load_digits()
        images = digits.images.astype(np.uint8)[..., np.newaxis]
        for row in rows:
            # The row is the key, so that keys are unique over all splits.
            yield (
                int(row),
                {"image": images[row], "label": int(digits.target[row])},
            )


def split_rows(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Assign rows to splits; all splits have about the same mix of classes."""
    train, rest = train_test_split(
        np.arange(len(labels)),
        train_size=SPLIT_SIZES["train"],
        stratify=labels,
        random_state=_SPLIT_SEED,
    )
    validation, test = train_test_split(
        rest,
        train_size=SPLIT_SIZES["validation"],
        stratify=labels[rest],
        random_state=_SPLIT_SEED,
    )
    return {"train": train, "validation": validation, "test": test}


def prepare(data_dir: Path) -> SklearnDigits:
    """Write the dataset below `data_dir` if missing; return its builder."""
    tfds.disable_progress_bar()
    builder = SklearnDigits(data_dir=data_dir)
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    # Hide a message of tfds about a download, since nothing is downloaded.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            builder.download_and_prepare(download_config=config)
        except OSError:
            # Another process may have written the complete folder already.
            if not builder.data_path.exists():
                raise
    # Create another builder, since a builder reads the folder only in its
    # constructor.
    return SklearnDigits(data_dir=data_dir)


def load_splits(data_dir: Path) -> dict[str, tf.data.Dataset]:
    """Return the splits as pairs (image in [0, 1], label), cached in memory."""
    parts = {name: name for name in SPLIT_SIZES}
    return read_splits(prepare(data_dir), parts, MAX_PIXEL)


def read_splits(
    builder: tfds.core.DatasetBuilder, parts: dict[str, str], max_pixel: int
) -> dict[str, tf.data.Dataset]:
    """Return parts of a dataset in the format of `load_splits`.

    Args:
        builder: The dataset's builder.
        parts: The part of the dataset for each split, such as "train[:100]".
        max_pixel: The pixel value that becomes 1.
    """

    def scale(
        image: tf.Tensor, label: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(image, tf.float32) / max_pixel, label

    return {
        name: builder.as_dataset(
            split=part, as_supervised=True, shuffle_files=False
        )
        .map(scale)
        .cache()
        for name, part in parts.items()
    }


def whole(data: tf.data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return all images and all labels of a split."""
    return next(iter(tfds.as_numpy(data.batch(data.cardinality()))))


def shuffled_batches(
    data: tf.data.Dataset, batch_size: int, seed: int
) -> tf.data.Dataset:
    """Return endless batches, shuffled by `seed` and TensorFlow's seed."""
    # At its end, a run would wait for the thread that tunes tf.data. This
    # thread sleeps for longer and longer, which could double the time of the
    # run.
    options = tf.data.Options()
    options.autotune.enabled = False
    return (
        data.shuffle(data.cardinality(), seed=seed)
        .repeat()
        .batch(batch_size)
        .prefetch(2)
        .with_options(options)
    )
