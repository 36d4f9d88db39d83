"""The launcher: one command starts a script in several worker processes.

It is like torchrun, but for TensorFlow. On one machine,

    python -m tf_optimizers.launch --workers 2 train.py --epochs 3

runs `python train.py --epochs 3` twice, with `TF_CONFIG` set to a cluster of
two workers. `tfo.SparseMultiWorkerMirroredStrategy()` reads this variable. On a
cluster, start one launcher on every machine:

    python -m tf_optimizers.launch --cluster auto train.py --epochs 3

The script gets all arguments after its name. To run a module, pass `-m`:

    python -m tf_optimizers.launch --workers 2 -m package.train --epochs 3

In a notebook, write the script in a cell with `%%writefile train.py`. Start it
in the next cell:

    !python -m tf_optimizers.launch --workers 2 train.py --epochs 3

Options:
    --workers N: int >= 1. The number of worker processes of this launcher.
        Required without `--cluster`; 1 by default with `--cluster`.
    --cluster PLATFORM: `auto`, `kubernetes`, `sagemaker`, `slurm`, `tf-config`
        or `vertex`. The launcher reads the addresses of all machines and its
        own index from the platform's environment variables; in an indexed Job
        of Kubernetes, also from the pod's host name. It prints the index and up
        to five addresses. `auto` detects the platform. If variables are
        missing, the launcher exits with an error.
    --machines K: int >= 1. The number of launchers in the cluster. Required in
        an indexed Job of Kubernetes, where no variable gives this number.
    --port P: int in [1, 65535]. With `--cluster`, the port of each machine's
        first worker, unless the platform sets this port. Further workers get
        the next ports. Defaults to `12345`.
    --gpus-per-worker G: int >= 0. The number of GPUs that each worker can use,
        set through `CUDA_VISIBLE_DEVICES`; 0 hides all GPUs. By default, the
        launcher's workers divide the machine's GPUs, if there are any. On
        Slurm, and with equal hosts in `TF_CONFIG`, the workers of all launchers
        on a machine divide them, unless each launcher has its own GPUs. The
        launcher exits with an error if there are fewer than G GPUs per worker,
        or if workers must divide GPUs, but there are more workers than GPUs. If
        `CUDA_VISIBLE_DEVICES` is set, the default leaves it unchanged, except
        in a Slurm job with GPUs, whose workers divide the listed GPUs.
    --devices-per-worker M: int >= 1. Logical CPU devices of each worker.
        Defaults to `1`, which does not configure TensorFlow. With 2 or more,
        the worker imports and configures TensorFlow before the script starts.
    --host ADDRESS: an address of this machine, for `TF_CONFIG`, without
        `--cluster`. Defaults to `127.0.0.1`. Workers connect only to this
        address, but TensorFlow's server (2.21) listens on all interfaces,
        without encryption or a password. On an open network, block the
        server's ports with a firewall.
    --grace-period SECONDS: number >= 0. Time between the signal that stops
        workers (SIGTERM, SIGINT or SIGHUP) and SIGKILL. By default 30, which
        leaves time for a backup. After a worker has failed with a code other
        than 143, the others cannot back up, so the default is 10. It is also 10
        for processes that are left when a worker ends by itself.
    --max-restarts K: int >= 0. How many times to restart all workers of this
        launcher after one has failed. A script that passes
        `tfo.callbacks.BackupAndRestore` to `fit` then resumes from its last
        backup. If K is not 0, a worker's environment variable
        `TF_OPTIMIZERS_RESTART` counts the restarts, from 0. After a signal, the
        launcher restarts no workers. Defaults to `0`.
    --restart-pause SECONDS: number >= 0. Time from the end of all workers to
        the first restart. The pause doubles with every restart, up to 60.
        Meanwhile, a temporary problem may disappear. Defaults to `0.1`.
    --standby SECONDS: number >= 0. Time from the start of the workers until a
        standby process starts for each worker. The standby process imports
        TensorFlow and Keras, and waits. At a restart, it runs the script, so
        the restart takes less time. The script then cannot set environment
        variables that TensorFlow or Keras reads at import; set them before you
        start the launcher. Requires `--max-restarts`. By default, there are no
        standby processes.

A worker runs like `python -u script`, with the same `sys.argv`, `sys.path`,
`__main__` and working directory. A worker's stdin is empty. The launcher
forwards the worker's stdout and stderr, and prefixes each line, for example
with `[worker 0] `. A carriage return ends a line too, so each state of a
progress bar becomes a line. If the launcher starts with a closed stream
(`>&-`), it drops the output to this stream.

A worker inherits the launcher's environment, plus `TF_CONFIG`. Unless they are
already set, the launcher also sets these variables. `no_grpc_proxy` lets
workers connect to each other without a proxy. `TF_NUM_INTRAOP_THREADS` divides
the cores among the launcher's workers: an operation of TensorFlow uses at most
as many threads as its worker has cores. `PYTHONHASHSEED` is 0, so that a set of
strings has the same order on all workers, and after a restart.

When a worker fails, the launcher sends SIGTERM to the others. The launcher
reports failures and restarts on stderr, in lines prefixed with `[launcher] `.
If no worker has failed, it forwards Ctrl-C (SIGINT), SIGTERM and SIGHUP to all
workers. A second Ctrl-C or SIGTERM kills all workers immediately. When a worker
ends, the launcher also ends the processes that the worker has started. So when
the launcher returns, no process is left, except processes that have left a
worker's process group (`setsid`, `timeout`). If the launcher itself is killed,
all workers are killed immediately.

Without `--cluster`, the launcher reserves the workers' ports from before the
workers start until they have ended. Another program can take a reserved port
only if it requests exactly that port. The worker then fails with TensorFlow's
"Could not start gRPC server".

Exit codes:
    0: All workers exited with 0.
    1: The output could not be written, or a worker could not be started.
    2: The command line or the cluster's variables are wrong, there are too few
        GPUs, or another process uses a worker's port (with `--cluster`).
    128 + s: The launcher received signal s (130 after Ctrl-C, 143 after
        SIGTERM), or signal s killed the worker that failed first.
    143: Also if a worker received SIGTERM, and all workers have backed up. To
        resume, start the launcher again. With `--max-restarts`, the launcher
        restarts the workers itself.
    Any code: If a worker failed, the code of the worker that failed first.
After restarts, the exit code is that of the last attempt. A signal after a
failure prevents a restart, but does not change the exit code.
"""
