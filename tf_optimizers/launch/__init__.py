"""The launcher: one command starts a script in several worker processes.

It is torchrun for TensorFlow. On one machine,

    python -m tf_optimizers.launch --workers 2 train.py --epochs 3

runs `python train.py --epochs 3` twice, with `TF_CONFIG` set to a cluster of
two workers, which `tfo.SparseMultiWorkerMirroredStrategy()` reads. On a
cluster, start one launcher on every machine:

    python -m tf_optimizers.launch --cluster auto train.py --epochs 3

The script gets all arguments after its name. The launcher also starts a module:

    python -m tf_optimizers.launch --workers 2 -m package.train --epochs 3

In a notebook, write the script in a cell with `%%writefile train.py`. Start it
in the next cell:

    !python -m tf_optimizers.launch --workers 2 train.py --epochs 3

Options:
    --workers N: int >= 1. Worker processes on this machine. Required without
        `--cluster`, and 1 with it.
    --cluster PLATFORM: `auto`, `kubernetes`, `sagemaker`, `slurm`, `tf-config`
        or `vertex`. Reads the addresses of all machines and the index of this
        machine from the variables that the platform sets, and prints them.
        `auto` finds the platform. Incomplete variables are an error.
    --machines K: int >= 1. Launchers in the cluster. Required in an indexed Job
        of Kubernetes, which has no variable for their number.
    --port P: int in [1, 65535]. With `--cluster`, the port of the first worker
        of every machine. Further workers get the next ports, unless the
        platform sets the ports. Defaults to `12345`.
    --gpus-per-worker G: int >= 0. GPUs that each worker sees, through
        `CUDA_VISIBLE_DEVICES`; 0 hides them all. By default, the workers of a
        machine divide its GPUs. It is an error if a machine has GPUs, but
        fewer GPUs than workers. If you have set `CUDA_VISIBLE_DEVICES`, the
        default does not change the variable.
    --devices-per-worker M: int >= 1. Logical CPU devices of each worker.
        Defaults to `1`, which leaves TensorFlow as it is. With more,
        TensorFlow is imported and configured before the script starts.
    --host ADDRESS: an address of this machine, for `TF_CONFIG`, without
        `--cluster`. Defaults to `127.0.0.1`. Workers connect only to this
        address. But whatever the address, TensorFlow's server (2.21) listens
        on all interfaces, without encryption or a password: on an open
        network, close its ports with a firewall.
    --grace-period SECONDS: number >= 0. Time between the request to end and
        SIGKILL. By default 30, which leaves time for a backup. After a worker
        has failed, no backup can be made, and the default is 10.
    --max-restarts K: int >= 0. How often to restart all workers of this
        machine when one fails. A script that passes
        `tfo.callbacks.BackupAndRestore` to `fit` then resumes from its last
        backup. The environment variable `TF_OPTIMIZERS_RESTART` of a worker
        counts the restarts, from 0. After a signal to the launcher, there are
        no restarts. Defaults to `0`.
    --restart-pause SECONDS: number >= 0. Time from the end of all workers to
        the first restart. The pause doubles with every restart, up to 60, to
        give the cause of the failure time to pass. Defaults to `1`.
    --standby SECONDS: number >= 0. After this time, a second process starts for
        each worker. The second process imports TensorFlow and Keras, and waits.
        At a restart, the second process runs the script, so a restart takes
        less time. If the script sets variables in `os.environ` before its
        imports, this can be too late: set them before the launcher starts.
        Requires `--max-restarts`. By default, no process waits.

A worker runs like `python -u script`, with the same `sys.argv`, `sys.path`,
`__main__`, working directory and environment, plus `TF_CONFIG` and
`no_grpc_proxy`, which lets workers reach each other without a proxy. Its stdin
is empty. The launcher forwards its stdout and stderr, each line prefixed with
`[worker 0] `. A carriage return ends a line too, so each state of a progress
bar becomes a line. Output to a stream that was closed from the start (`>&-`) is
dropped. Unless `TF_NUM_INTRAOP_THREADS` is set, the workers of a machine divide
its cores: each operation of TensorFlow has as many threads as its worker has
cores. Unless `PYTHONHASHSEED` is set, the launcher sets it to 0, so that the
elements of a set have the same order on all workers, and after a restart.

When a worker fails, the launcher ends the others with SIGTERM. Lines on stderr,
prefixed with `[launcher] `, report this and every restart. Ctrl-C, SIGTERM and
the end of the terminal (SIGHUP) are passed on to all workers; a second Ctrl-C
or SIGTERM kills all workers at once. The processes that a worker has started
end with the worker, unless they have left its session (`setsid`). So no process
is left when the launcher returns. If the launcher itself is killed, all workers
are killed at once.

Without `--cluster`, the launcher reserves the workers' ports before the workers
start, and until they have ended. Another program can take a reserved port only
if it asks for exactly that port. The worker then fails with TensorFlow's "Could
not start gRPC server".

Exit codes:
    0: All workers ended with 0.
    1: The output could not be written, or a worker could not be started.
    2: The command line or the cluster's variables are wrong. No worker was
        started.
    128 + s: The launcher received signal s (130 after Ctrl-C, 143 after
        SIGTERM), or signal s killed the worker that failed first.
    143: Also if a worker received SIGTERM, and all workers have backed up. To
        resume, start the launcher again; `--max-restarts` does this for you.
    Any other code: The code of the worker that failed first.
After restarts, the code is that of the last attempt. A signal that comes after
a failure prevents a restart, and leaves the code as it is.
"""
