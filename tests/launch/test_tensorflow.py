"""Workers that load TensorFlow; other tests do not need it."""

import time

import pytest
from launcher import INDEX, LONG, lines_of
from real_workers import quick_python

from tf_optimizers.launch import group


@pytest.mark.long
def test_port_taken_by_force_is_an_error_of_that_worker(launch, write):
    script = write(
        INDEX,
        "import socket, tf_optimizers\n"
        "port = cluster['cluster']['worker'][index].split(':')[1]\n"
        "if index:\n"
        "    taker = socket.socket()\n"
        "    taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "    taker.bind(('', int(port)))\n"
        "    taker.listen()\n"
        "    print(port, flush=True)\n"
        "tf_optimizers.SparseMultiWorkerMirroredStrategy()\n",
    )
    run = launch("--workers", "2", "--grace-period", "0", script)
    assert run.returncode == 1
    assert b"[launcher] Worker 1 failed with exit code 1." in run.stderr
    errors = b"\n".join(lines_of(run.stderr, 1))
    assert b"Could not start gRPC server" in errors
    assert b"0.0.0.0:" + lines_of(run.stdout, 1)[0] in errors


@pytest.mark.long  # test_environment.py checks the variable.
def test_operations_use_the_threads_of_the_variable(launch, write, environment):
    script = write(
        "import os, tensorflow as tf\n"
        "tf.linalg.matmul(tf.ones([512, 512]), tf.ones([512, 512])).numpy()\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    counts = []
    for threads in (1, 5):
        environment.setenv(group.THREADS, str(threads))
        run = launch("--workers", "1", script)
        assert run.returncode == 0, run.stderr
        counts.append(int(lines_of(run.stdout, 0)[-1]))
    assert counts[1] - counts[0] == 4


ASKED = f"""
import multiprocessing, threading
import keras, numpy as np, tensorflow as tf
import tf_optimizers as tfo

forked = multiprocessing.get_context("fork")

def create():
    global strategy
    strategy = tfo.SparseMultiWorkerMirroredStrategy()

def end_a_child():
    child = forked.Process(target=time.sleep, args=({LONG},), daemon=True)
    child.start()
    child.terminate()
    child.join(10)
    print("child", child.exitcode, flush=True)
    child.kill()

if index == 0:
    signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
    create()
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
else:  # Only the main thread can restore the handler, as under Ray.
    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    end_a_child()

class Data(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.ones((4, 1)), np.ones((4, 1))

with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
# Its end is that of processes, which are asked to end, also where `fit` catches
# the signal.
backup = tfo.callbacks.BackupAndRestore("backup")
data = Data(workers=1, use_multiprocessing=True)
model.fit(data, verbose=0, callbacks=[backup])
end_a_child()
if index == 1:
    # Python waits for such a one, which it asks to end.
    forked.Process(target=time.sleep, args=({LONG},), daemon=True).start()
    print(time.monotonic(), flush=True)
    sys.exit(3)

@tf.function
def wait():
    context = tf.distribute.get_replica_context()
    return context.all_reduce("SUM", tf.ones([]))

try:
    strategy.run(wait)
finally:
    time.sleep({LONG})
"""


def test_workers_and_their_children_end_on_request(launch, write, environment):
    """TensorFlow's server handles SIGTERM, and forks inherit the handler."""
    # Otherwise workers would wait for a proxy that cannot reach them.
    environment.setenv("http_proxy", "http://127.0.0.1:9")
    environment.setenv("PYTHONPATH", quick_python()["PYTHONPATH"])
    began = time.monotonic()
    run = launch(
        *("--workers", "2", "--grace-period", "100", write(INDEX, ASKED))
    )
    assert run.returncode == 3, run.stderr.decode(errors="replace")
    assert lines_of(run.stdout, 0)[:2] == [b"handled", b"child -15"]
    assert lines_of(run.stdout, 1)[:2] == [b"child -15", b"child -15"]
    failed = float(lines_of(run.stdout, 1)[-1])
    assert began < failed
    assert time.monotonic() - failed < 50
