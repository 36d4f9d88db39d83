"""The launcher accepts the clusters in the recipes of docs/launch.md."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
import yaml

from tf_optimizers.launch.__main__ import make_parser, split
from tf_optimizers.launch.platforms import find_place
from tf_optimizers.workers.agreement.cluster import check_cluster

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = (ROOT / "docs" / "launch.md").read_text()
FAILURES = (ROOT / "docs" / "distribute.md").read_text()
MANIFESTS = ROOT / "docs" / "launch"
# The environment of a Slurm node; tasks run one after another.
SRUN = """
    shift  # --kill-on-bad-exit
    test "$SRUN_CPUS_PER_TASK" = 16
    export SLURM_STEP_NODELIST=node[2,10] SLURM_STEP_TASKS_PER_NODE="1(x2)"
    SLURM_PROCID=0 "$@"
    SLURM_PROCID=1 "$@"
    exit ${SRUN_STATUS:-143}
"""


def block(name):
    pattern = rf"<!-- {name} -->\n```\w+\n(.*?)```"
    return re.search(pattern, RECIPES, re.S).group(1)


def place(monkeypatch, text):
    """Return cluster, job and index, as the strategy reads them."""
    monkeypatch.setenv("TF_CONFIG", text)
    resolver = check_cluster(None)
    cluster = resolver.cluster_spec().as_dict()
    return cluster, resolver.task_type, resolver.task_id


def test_tf_config_is_taken(monkeypatch, run_block):
    addresses = ["192.168.1.10:12345", "192.168.1.11:12345"]
    expected = {"worker": addresses}, "worker", 1
    (text,) = run_block("TF_CONFIG")
    found = place(monkeypatch, text.removeprefix("[worker 1] "))
    assert found == expected


def test_tf_config_of_a_tfjob_is_taken(monkeypatch):
    text = re.search(r"'(.*)'", block("TF_CONFIG"), re.S).group(1)
    config = json.loads(text) | {"environment": "cloud"}
    config["cluster"]["chief"] = ["host2:12345"]
    assert place(monkeypatch, json.dumps(config))[1:] == ("worker", 1)


@pytest.fixture
def run_block(tmp_path):
    """Return a function that runs a block; return the lines on stdout.

    `train.py` prints `TF_CONFIG`.
    """
    # A link to Python would not find its environment's packages.
    python = f'exec {sys.executable} "$@"'
    programs = {"srun": SRUN, "scontrol": 'echo "$@"', "python": python}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nset -eu\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(
        "import os; print(os.environ['TF_CONFIG'].replace('\\n', ''))"
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "16"}

    def run(name):
        return subprocess.run(
            ["bash", "-c", block(name)],
            cwd=tmp_path,
            env=os.environ | slurm | {"PATH": path},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout.splitlines()

    return run


def test_slurm_script_starts_every_worker_at_its_place(monkeypatch, run_block):
    addresses = ["node2:12345", "node10:12345"]
    *lines, requeued = run_block("slurm")
    assert requeued == "requeue 4711"
    for index, text in enumerate(lines):
        text = text.removeprefix(f"[worker {index}] ")
        expected = {"worker": addresses}, "worker", index
        assert place(monkeypatch, text) == expected
    assert index == 1


def test_slurm_script_returns_the_status_of_a_failure(monkeypatch, run_block):
    monkeypatch.setenv("SRUN_STATUS", "7")
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_block("slurm")
    assert error.value.returncode == 7


def options_of(command):
    """Return the launcher's options from a container's command."""
    assert command[:3] == ["python", "-m", "tf_optimizers.launch"]
    own, script = split(command[3:])
    assert script == ["train.py"]
    return make_parser().parse_args(own)


def test_indexed_job_gives_every_pod_its_place(monkeypatch):
    text = (MANIFESTS / "indexed_job.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    template = spec["template"]["spec"]
    (container,) = template["containers"]
    options = options_of(container["command"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["metadata"]["name"] == template["subdomain"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == options.machines
    domain = f"{template['subdomain']}.default.svc.cluster.local"
    for i in range(options.machines):
        # Kubernetes sets these in the pods of such a job.
        monkeypatch.setattr(
            socket, "getfqdn", lambda i=i: f"{name}-{i}.{domain}"
        )
        variables = {"JOB_COMPLETION_INDEX": str(i)}
        found = find_place(options.cluster, variables, options.machines)
        assert found.rank == i
        assert found.hosts == [f"{name}-{j}.{domain}" for j in range(2)]


def test_train_job_gives_every_pod_its_place():
    job = yaml.safe_load((MANIFESTS / "train_job.yaml").read_text())
    assert job.pop("apiVersion") == "trainer.kubeflow.org/v1alpha1"
    assert job.pop("kind") == "TrainJob"
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    # The fields of the custom resource; Kubernetes drops others silently.
    assert {*job["spec"]} == {"runtimeRef", "trainer"}
    assert {*trainer} == {"image", "numNodes", "command"}
    options = options_of(trainer["command"])
    for i in range(trainer["numNodes"]):
        variables = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NODE_RANK": str(i),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        }
        found = find_place(options.cluster, variables, None)
        assert found.rank == i
        assert found.hosts == [f"{name}-node-0-{j}.{name}" for j in range(2)]


def test_workers_have_less_time_for_a_backup_than_their_launcher():
    """Else the platform kills the launcher, or the launcher kills too early."""
    *_, job = yaml.safe_load_all((MANIFESTS / "indexed_job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    train_job = yaml.safe_load((MANIFESTS / "train_job.yaml").read_text())
    script = block("slurm")
    times = {
        int(re.search(r"--signal=TERM@(\d+)", script)[1]): int(
            re.search(r"--grace-period (\d+)", script)[1]
        ),
        pod["terminationGracePeriodSeconds"]: options_of(
            pod["containers"][0]["command"]
        ).grace_period,
        # The default of Kubernetes.
        30: options_of(train_job["spec"]["trainer"]["command"]).grace_period,
    }
    for platform, launcher in times.items():
        assert 0.8 * platform < launcher < platform


def pod_with_volume(name):
    """Return the pod's fields after uncommenting the lines for a volume."""
    text = (MANIFESTS / f"{name}.yaml").read_text()
    if name == "indexed_job":
        assert text.count("# volume") == 2
        *_, job = yaml.safe_load_all(text.replace("# volume", "volume"))
        return job["spec"]["template"]["spec"]
    before, patches = text.split("  # runtimePatches:")
    lines = [line.replace("  # ", "  ", 1) for line in patches.splitlines()]
    job = yaml.safe_load("\n".join([f"{before}  runtimePatches:", *lines]))
    # The fields of the custom resource, and the names of Kubeflow's runtime
    # `torch-distributed`; Kubernetes drops other fields silently.
    (patch,) = job["spec"]["runtimePatches"]
    assert {*patch} == {"manager", "trainingRuntimeSpec"}
    spec = patch["trainingRuntimeSpec"]["template"]["spec"]
    (node,) = spec["replicatedJobs"]
    assert node["name"] == "node"
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["name"] == "node"
    return pod


@pytest.mark.parametrize("name", ["indexed_job", "train_job"])
def test_pods_share_a_volume_by_uncommenting_lines(name):
    pod = pod_with_volume(name)
    (volume,), (container,) = pod["volumes"], pod["containers"]
    (mount,) = container["volumeMounts"]
    assert volume["name"] == mount["name"]
    assert f'BackupAndRestore("{mount["mountPath"]}")' in RECIPES
    claim = yaml.safe_load((MANIFESTS / "volume.yaml").read_text())
    assert claim["apiVersion"] == "v1"
    assert claim["kind"] == "PersistentVolumeClaim"
    claimed = claim["metadata"]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claimed
    assert {*claim["spec"]} == {"accessModes", "resources"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("indexed_job", "spec template spec containers 0 resources"),
        ("train_job", "spec trainer resourcesPerNode"),
    ],
)
def test_pods_get_gpus_by_uncommenting_a_line(name, path):
    text = (MANIFESTS / f"{name}.yaml").read_text()
    assert text.count("# resources") == 1
    *_, job = yaml.safe_load_all(text.replace("# resources", "resources"))
    for key in path.split():
        job = job[int(key) if key.isdecimal() else key]
    assert job == {"limits": {"nvidia.com/gpu": 1}}


def test_machines_of_a_custom_job_get_gpus_by_uncommenting_lines():
    text = (MANIFESTS / "custom_job.yaml").read_text()
    job = yaml.safe_load(text.replace("# accelerator", "accelerator"))
    for pool in job["workerPoolSpecs"]:
        assert {*pool["machineSpec"]} == {
            *("machineType", "acceleratorType", "acceleratorCount")
        }


def test_custom_job_starts_the_launcher_on_all_machines():
    job = yaml.safe_load((MANIFESTS / "custom_job.yaml").read_text())
    assert {*job} == {"workerPoolSpecs"}
    first, others = job["workerPoolSpecs"]
    assert first["replicaCount"] == 1
    assert {*first} == {"replicaCount", "machineSpec", "containerSpec"}
    assert {*first["containerSpec"]} == {"imageUri", "command"}
    for part in ("machineSpec", "containerSpec"):
        assert first[part] == others[part]
    options = options_of(first["containerSpec"]["command"])
    pools = [["a:2222"], ["b:2222"] * others["replicaCount"]]
    cluster = {f"workerpool{i}": hosts for i, hosts in enumerate(pools)}
    for i, job in enumerate(cluster):
        spec = {"cluster": cluster, "task": {"type": job, "index": 0}}
        variables = {"CLUSTER_SPEC": json.dumps(spec)}
        found = find_place(options.cluster, variables, options.machines)
        assert (found.rank, len(found.hosts)) == (i, 2)


def test_commands_of_sagemaker_are_those_of_the_launcher():
    commands = re.findall(r"python -m \S+ --cluster sagemaker \S+py", RECIPES)
    assert len(commands) == 2
    for command in commands:
        options = options_of(command.split())
        variables = {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"}
        found = find_place(options.cluster, variables, options.machines)
        assert (found.rank, found.hosts) == (1, ["a", "b"])


def test_commands_of_all_pages_are_those_of_the_launcher():
    """Whatever page people copy from, the launcher knows the options."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = []
    for page in pages:
        text = " ".join(page.read_text().replace("\\\n", " ").split())
        found += re.findall(
            r"python -m tf_optimizers\.launch ([^`\"]*?)train\.py", text
        )
    assert len(found) > 15
    for command in found:
        own, script = split([*command.split(), "train.py"])
        assert script == ["train.py"]
        options = make_parser().parse_args(own)
        assert options.workers or options.cluster, command


def test_failures_are_those_that_are_tested():
    tests = "".join(
        (ROOT / "tests" / path).read_text()
        for path in (
            "workers/agreement/test_worker_errors.py",
            "workers/collectives/test_collectives.py",
            "workers/test_guide.py",
        )
    )
    table = FAILURES.split("| event |")[1]
    names = {"agreement_seconds", "communication_options", "timeout_seconds"}
    messages = [
        message
        for line in table.splitlines()[2:]
        if line.startswith("|")
        for message in re.findall("`(.+?)`", line.split("|")[2])
        if message not in names
    ]
    assert len(messages) == 6
    for message in messages:
        assert message in tests
