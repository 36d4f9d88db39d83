"""The launcher finds its place in the documented variables of schedulers."""

import json
import os
import socket

import pytest
from launcher import lines_of

from tf_optimizers.launch import gpus
from tf_optimizers.launch.platforms import (
    Place,
    expand_counts,
    expand_hosts,
    find_place,
)

# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[2,10-11]",
    "SLURM_STEP_NODELIST": "node[2,10]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
# There are four tasks on the first node, two on the second.
TASKS = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_PROCID": "4"}
# https://cloud.google.com/vertex-ai/docs/training/distributed-training
SPEC = {
    "cluster": {
        "workerpool0": ["cmle-training-workerpool0-1d9-0:2222"],
        "workerpool1": ["cmle-training-workerpool1-1d9-0:2222"],
    },
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 0},
}
CONFIG = {
    "cluster": {"chief": ["chief-0:2222"], "worker": ["worker-0:2222"]},
    "environment": "cloud",
    "job": "{}",
    "task": {"type": "worker", "index": 0},
}
# Two launchers of two workers each would both use port 1001.
CLOSE = CONFIG | {"cluster": {"worker": ["h:1000", "h:1001"]}}
CHIEF = CONFIG | {"task": {"type": "chief", "index": 0}}
# kubeflow/trainer: pkg/runtime/framework/plugins/torch/torch.go. The pods are
# of an indexed Job, too.
TRAIN_JOB = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-1-node-0-0.train-1",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "2",
}
# https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
HOSTS = [f"algo-{i}" for i in (1, 10, 2)]
SAGEMAKER = {"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": "algo-10"}

PLACES = {
    "slurm": (SLURM, ["node2:7", "node10:7"], 1),
    "slurm tasks": (
        TASKS,
        [f"node2:{7 + i}" for i in range(4)] + ["node10:7", "node10:8"],
        4,
    ),
    "vertex": (
        {"CLUSTER_SPEC": json.dumps(SPEC)},
        [*SPEC["cluster"]["workerpool0"], *SPEC["cluster"]["workerpool1"]],
        1,
    ),
    "tf-config": (
        {"TF_CONFIG": json.dumps(CONFIG), "CLUSTER_SPEC": json.dumps(SPEC)},
        ["chief-0:2222", "worker-0:2222"],
        1,
    ),
    "tf-config chief": (
        {"TF_CONFIG": json.dumps(CHIEF)},
        ["chief-0:2222", "worker-0:2222"],
        0,
    ),
    "kubernetes": (
        TRAIN_JOB,
        [f"train-1-node-0-{i}.train-1:7" for i in range(3)],
        2,
    ),
    "sagemaker": (SAGEMAKER, ["algo-1:7", "algo-2:7", "algo-10:7"], 2),
}


@pytest.mark.parametrize("name", PLACES)
def test_place_is_found_by_auto_and_by_name(name):
    environment, addresses, index = PLACES[name]
    for kind in ("auto", name.split()[0]):
        place = find_place(kind, environment, None)
        assert (place.addresses(1, 7), place.rank) == (addresses, index)


def test_pods_of_an_indexed_job_are_named_by_their_service(monkeypatch):
    name = "train-1.workers.default.svc.cluster.local"
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    place = find_place("auto", {"JOB_COMPLETION_INDEX": "1"}, 3)
    assert place.addresses(1, 7) == [
        name.replace("-1", f"-{i}") + ":7" for i in range(3)
    ]
    assert place.rank == 1


def test_several_workers_of_a_machine_have_successive_ports_and_ranks():
    place = find_place("auto", TASKS, None)
    addresses = place.addresses(2, 7)
    assert addresses[:8] == [f"node2:{7 + i}" for i in range(8)]
    assert addresses[8:] == [f"node10:{7 + i}" for i in range(4)]
    assert (place.local_index, place.local_count) == (0, 2)


@pytest.mark.parametrize(
    ("index", "visible", "expected"),
    [(0, {}, (0, 1)), (2, {}, (1, 2)), (2, {gpus.VISIBLE: "1"}, (0, 1))],
)
def test_launchers_of_a_host_are_counted_to_divide_its_gpus(
    index, visible, expected
):
    """A launcher that has a list of GPUs uses this whole list."""
    config = {
        "cluster": {"worker": ["g:1000", "h:1000", "h:2000"]},
        "task": {"type": "worker", "index": index},
    }
    environment = {"TF_CONFIG": json.dumps(config)} | visible
    place = find_place("tf-config", environment, None)
    assert (place.local_index, place.local_count) == expected


def without(environment, name):
    return {key: environment[key] for key in environment if key != name}


def spec(text):
    return {"CLUSTER_SPEC": text}


BAD = [
    ({}, None, "Received: none (tf-config"),
    (SLURM | SAGEMAKER, None, "variables of sagemaker and slurm"),
    # A batch script without `srun`.
    (without(SLURM, "SLURM_STEP_NODELIST"), None, "`SLURM_STEP_NODELIST` must"),
    (without(SLURM, "SLURM_PROCID"), None, "`SLURM_PROCID` must be set"),
    (SLURM | {"SLURM_PROCID": "x"}, None, "SLURM_PROCID='x'"),
    (SLURM | {"SLURM_PROCID": "2"}, None, "must be in [0, 2). Received: 2"),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, None, "lists of equal length"),
    (SLURM | {"SLURM_STEP_NODELIST": "n[x]"}, None, "lists of equal length"),
    (TASKS | {"SLURM_LOCALID": "2"}, None, "Pass `--distribution=block`"),
    (
        TASKS | {"SLURM_PROCID": "8", "SLURM_LOCALID": "1"},
        None,
        "must be in [0, 6). Received: 8 from Slurm",
    ),
    (SLURM, 3, "Received: --machines 3, but Slurm"),
    (spec("no JSON"), None, "`CLUSTER_SPEC` must be JSON with"),
    (spec("[]"), None, "`CLUSTER_SPEC` must be JSON with"),
    (
        spec(json.dumps(SPEC | {"cluster": {"workerpool2": ["ps:1"]}})),
        None,
        "only the jobs workerpool0 and workerpool1",
    ),
    (without(SAGEMAKER, "SM_HOSTS"), None, "`SM_HOSTS` must be set"),
    (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, None, "that contains `SM_CUR"),
    (without(TRAIN_JOB, "PET_NNODES"), None, "`PET_NNODES` must be set"),
    (TRAIN_JOB | {"PET_MASTER_ADDR": "10.0.0.1"}, None, "must be NAME-0.SUB"),
    ({"JOB_COMPLETION_INDEX": "0"}, None, "`--machines` must be given"),
    ({"JOB_COMPLETION_INDEX": "7"}, 9, "must be NAME-7.SUBDOMAIN. Received: "),
    ({"TF_CONFIG": json.dumps(CLOSE)}, None, "2, but TF_CONFIG has h:1000, h:"),
]


@pytest.mark.parametrize(("environment", "machines", "message"), BAD)
def test_wrong_or_half_environment_is_an_error(environment, machines, message):
    with pytest.raises(ValueError) as caught:
        find_place("auto", environment, machines).addresses(2, 7)
    assert message in str(caught.value)


@pytest.mark.parametrize(("workers", "is_advised"), [(1, False), (2, True)])
def test_fewer_workers_are_advised_only_if_there_are_several(
    workers, is_advised
):
    hosts = ["h", "h:7"] if workers == 1 else ["h:7", "h:8"]
    with pytest.raises(ValueError, match="same address") as caught:
        Place("TF_CONFIG", hosts, 0).addresses(workers, 7)
    assert ("pass `--workers 1`" in str(caught.value)) == is_advised


def test_lists_of_slurm_are_expanded():
    text = "a,n[08-10,2],r[1-2]n[0-1]-ib,b"
    assert expand_hosts(text) == [
        *("a", "n08", "n09", "n10", "n2"),
        *("r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib", "b"),
    ]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def test_workers_get_and_print_their_place(launch, write, environment):
    for name, value in TASKS.items():
        environment.setenv(name, value)
    environment.setenv(gpus.VISIBLE, "2,5,6,7")
    script = write(
        "import os\n"
        "for name in ('TF_CONFIG', 'CUDA_VISIBLE_DEVICES', 'no_grpc_proxy'):\n"
        "    print(os.environ[name])\n"
    )
    run = launch(
        *("--cluster", "auto", "--workers", "2", "--port", "9"),
        *("--gpus-per-worker", "1", script),
    )
    assert run.returncode == 0, run.stderr
    addresses = [f"node2:{9 + i}" for i in range(8)]
    addresses += [f"node10:{9 + i}" for i in range(4)]
    for index, gpu in ((8, b"2"), (9, b"5")):
        config, visible, hosts = lines_of(run.stdout, index)
        assert json.loads(config) == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        assert (visible, hosts) == (gpu, b"node2,node10")
    assert b"[launcher] Slurm (SLURM_STEP_NODELIST" in run.stderr
    assert b"index 4 of 6, workers at node2:9, node2:10" in run.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_tf_config_is_kept_for_one_worker(launch, write, environment, workers):
    environment.setenv("TF_CONFIG", json.dumps(CONFIG))
    script = write("import os; print(os.environ['TF_CONFIG'])")
    run = launch("--cluster", "auto", "--workers", str(workers), script)
    assert run.returncode == 0, run.stderr
    if workers == 1:
        assert json.loads(*lines_of(run.stdout, 1)) == CONFIG
        return
    (found,) = map(json.loads, lines_of(run.stdout, 2))
    ports = [2222, 2223]
    assert found["cluster"]["worker"] == [
        f"{host}:{port}" for host in ("chief-0", "worker-0") for port in ports
    ]


def test_close_ports_are_an_error_before_workers_start(
    launch, write, environment
):
    environment.setenv("TF_CONFIG", json.dumps(CLOSE))
    run = launch("--cluster", "auto", "--workers", "2", write("print(1)"))
    assert run.returncode == 2
    assert b"error: Two workers must not have the same address" in run.stderr


def test_port_of_another_job_is_an_error_before_workers_start(
    launch, write, environment
):
    with socket.create_server(("", 0)) as closed:
        unused = closed.getsockname()[1]
    with socket.create_server(("", 0)) as other:
        used = other.getsockname()[1]
        hosts = [f"h:{used}", f"i:{unused}"]  # Of another machine, and of this.
        config = {"cluster": {"worker": hosts}}
        for index, code in ((1, 0), (0, 2)):
            task = {"task": {"type": "worker", "index": index}}
            environment.setenv("TF_CONFIG", json.dumps(config | task))
            run = launch("--cluster", "auto", write("print(1)"))
            assert run.returncode == code, run.stderr
    assert f"Received: h:{used}, but another".encode() in run.stderr


def test_port_beyond_the_last_is_an_error():
    place = Place("TF_CONFIG", ["h", "i"], 1)
    with pytest.raises(ValueError, match="at most 65535. Received: i:65536"):
        place.check_ports(place.addresses(2, 65535))


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ntest $1 = --list-gpus || exit 1\n"
        "for i in 0 1 2 3; do echo 'GPU '$i': NVIDIA H100 (UUID: GPU-'$i')'\n"
        "echo '  MIG 1g.10gb Device 0: (UUID: MIG-1)'; done\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("workers", "each", "visible", "expected"),
    [
        (1, None, None, ["0,1,2,3"]),
        (2, None, None, ["0,1", "2,3"]),
        (3, None, None, ["0", "1", "2"]),
        (2, 1, None, ["0", "1"]),
        (2, 0, None, ["-1", "-1"]),
        (2, None, "1", [None, None]),
        (2, None, "", [None, None]),
        (2, 1, "3,1,-1,0", ["3", "1"]),
        (5, None, None, "at least 5. Received: visible GPUs: 4, workers: 5"),
        (2, 3, None, "at least 6. Received: visible GPUs: 4, workers: 2"),
        (1, 1, "-1", "at least 1. Received: visible GPUs: 0, workers: 1."),
    ],
)
def test_workers_divide_the_gpus(workers, each, visible, expected):
    environment = {} if visible is None else {gpus.VISIBLE: visible}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            gpus.divide_gpus(workers, each, environment)
        return
    found = gpus.divide_gpus(workers, each, environment)
    assert [variables.get(gpus.VISIBLE) for variables in found] == expected


@pytest.mark.parametrize(
    ("tasks", "workers", "each", "visible", "on_node", "expected"),
    [
        (1, 4, None, "0,1,2,3", "4", ["0 1 2 3"]),
        (1, 1, None, "0,1,2,3", "4", ["0,1,2,3"]),
        (1, 2, None, "0,1,2,3", None, ["0,1 2,3"]),
        (2, 2, None, "0,1,2,3", "4", ["0 1", "2 3"]),
        (2, 1, 1, "0,1,2,3", "4", ["0", "1"]),
        (4, 1, None, "0", "4", ["0"] * 4),  # Each task sees its own GPU.
        (4, 1, 1, "0", "4", ["0"] * 4),
        (2, 2, None, "0,1", "4", ["0 1"] * 2),
        (2, 1, None, "0,1,2,3", None, ["0,1,2,3"] * 2),
        (2, 4, 0, "0,1,2,3", "4", ["-1 -1 -1 -1"] * 2),
        (1, 2, None, "", "0", ["None None"]),
    ],
)
def test_workers_divide_the_gpus_that_slurm_has_chosen(
    tasks, workers, each, visible, on_node, expected
):
    environment = {gpus.VISIBLE: visible, "SLURM_JOB_GPUS": "4,5,6,7"}
    if on_node is not None:
        environment["SLURM_GPUS_ON_NODE"] = on_node
    found = [
        gpus.divide_gpus(workers, each, environment, task, tasks)
        for task in range(tasks)
    ]
    assert expected == [
        " ".join(str(variables.get(gpus.VISIBLE)) for variables in task)
        for task in found
    ]


def test_too_few_gpus_of_slurm_are_an_error():
    environment = {gpus.VISIBLE: "0", "SLURM_STEP_GPUS": "5"}
    with pytest.raises(ValueError, match="unset SLURM_STEP_GPUS to let"):
        gpus.divide_gpus(2, None, environment)


def test_launchers_of_a_node_divide_the_gpus_of_a_slurm_step(
    launch, write, environment
):
    """The second of two tasks of the first node."""
    own = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "1"}
    own |= {"SLURM_LOCALID": "1", "SLURM_STEP_GPUS": "0,1,2,3"}
    own |= {"SLURM_GPUS_ON_NODE": "4", gpus.VISIBLE: "0,1,2,3"}
    for name, value in (SLURM | own).items():
        environment.setenv(name, value)
    script = write(f"import os; print(os.environ['{gpus.VISIBLE}'])")
    run = launch("--cluster", "slurm", "--workers", "2", script)
    assert run.returncode == 0, run.stderr
    assert [lines_of(run.stdout, i) for i in (2, 3)] == [[b"2"], [b"3"]]


def test_machine_without_gpus_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.divide_gpus(2, None, {}) == [{}, {}]
