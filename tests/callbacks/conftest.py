"""The strategies that a backup may come from and go to."""

import pytest
import tensorflow as tf


@pytest.fixture
def strategies(mirrored):
    return {"one": tf.distribute.get_strategy(), "two": mirrored}
