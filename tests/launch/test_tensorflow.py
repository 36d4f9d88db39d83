"""Workers that load TensorFlow; those of the other tests do without."""

import pytest
from launcher import INDEX, lines_of

from tf_optimizers.launch import group


@pytest.mark.long
def test_workers_form_a_strategy_of_logical_cpus_and_reduce(
    launch, write, environment
):
    # Workers would wait for a proxy that leads nowhere, or not to them.
    environment.setenv("http_proxy", "http://127.0.0.1:9")
    script = write(
        INDEX,
        "import tensorflow as tf\n"
        "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "@tf.function\n"
        "def total():\n"
        "    value = tf.constant([1.0, 10.0]) * (index + 1)\n"
        "    context = tf.distribute.get_replica_context()\n"
        "    return context.all_reduce('sum', value)\n"
        "result = strategy.run(total).numpy().tolist()\n"
        "print('workers', strategy.num_replicas_in_sync, result)\n"
        "cpus = tf.config.list_logical_devices('CPU')\n"
        "print('places', *(cpu.name.split('/')[-1] for cpu in cpus\n"
        "    if f'task:{index}/' in cpu.name))\n",
    )
    run = launch("--workers", "2", "--devices-per-worker", "2", script)
    assert run.returncode == 0, run.stderr.decode(errors="replace")
    for index in range(2):
        lines = lines_of(run.stdout, index)
        # TensorFlow's strategy takes the first device of each.
        assert b"workers 2 [3.0, 30.0]" in lines
        assert b"places device:CPU:0 device:CPU:1" in lines


@pytest.mark.long
def test_port_taken_by_force_is_an_error_of_that_worker(launch, write):
    script = write(
        INDEX,
        "import socket, tensorflow as tf\n"
        "port = cluster['cluster']['worker'][index].split(':')[1]\n"
        "if index:\n"
        "    taker = socket.socket()\n"
        "    taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "    taker.bind(('', int(port)))\n"
        "    taker.listen()\n"
        "    print(port, flush=True)\n"
        "tf.distribute.MultiWorkerMirroredStrategy()\n",
    )
    run = launch("--workers", "2", "--grace-period", "0", script)
    assert run.returncode == 1
    assert b"[launcher] Worker 1 failed with exit code 1." in run.stderr
    errors = b"\n".join(lines_of(run.stderr, 1))
    assert b"Could not start gRPC server" in errors
    assert b"0.0.0.0:" + lines_of(run.stdout, 1)[0] in errors


def test_operations_have_the_threads_that_the_variable_says(
    launch, write, environment
):
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
