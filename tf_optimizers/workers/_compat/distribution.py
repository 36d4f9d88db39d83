"""Imports private names of TensorFlow for `tf_optimizers.workers`.

This module is separate from `tf_optimizers._compat`, so that optimizers do not
import these names.
"""

# ruff: noqa: F401

# Implements `MultiWorkerMirroredStrategy`. `VariablesExtended` is a subclass.
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)

# Collectives that our classes extend, and the keys of collectives.
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.cross_device_utils import (
    CollectiveKeys,
    CollectiveReplicaLauncher,
)

# Convert one nest per replica into a nest of per-replica values, and back.
from tensorflow.python.distribute.distribute_utils import (
    regroup,
    select_replica,
)

# Distributed datasets, their iterators, and the types of both; our subclasses
# look one batch ahead.
from tensorflow.python.distribute.input_lib import (
    DistributedDatasetsFromFunction,
    DistributedDatasetsFromFunctionSpec,
    DistributedIterator,
    DistributedIteratorSpec,
)

# Per-replica values of a batch; our subclasses add numbers of rows.
from tensorflow.python.distribute.values import PerReplica, PerReplicaSpec

# `async_wait` waits for asynchronous operations. `tensorflow_seed` returns the
# seed that `tf.random.set_seed` has set, or None.
from tensorflow.python.eager.context import async_wait
from tensorflow.python.eager.context import global_seed as tensorflow_seed
