"""The strategies under which backups are made and restored."""

import pytest
import tensorflow as tf


@pytest.fixture
def strategies(mirrored):
    return {"one": tf.distribute.get_strategy(), "two": mirrored}
