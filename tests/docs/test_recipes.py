"""The recipes of docs/launch.md describe clusters that are taken."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf
import yaml

from tf_optimizers.workers.agreement.cluster import check_cluster

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = (ROOT / "docs" / "launch.md").read_text()
FAILURES = (ROOT / "docs" / "distribute.md").read_text()
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# Stand-ins for what a node of Slurm has.
COMMANDS = {
    "scontrol": """
        test "$*" = "show hostnames node[2,10]"
        printf "node2\\nnode10"
    """,
    "srun": """
        shift  # --kill-on-bad-exit
        SLURM_PROCID=0 "$@"
        SLURM_PROCID=1 "$@"
    """,
}


def block(name):
    pattern = rf"<!-- {name} -->\n```\w+\n(.*?)```"
    return re.search(pattern, RECIPES, re.S).group(1)


def place(monkeypatch, text):
    """Return cluster, job and index, as the strategy takes them."""
    monkeypatch.setenv("TF_CONFIG", text)
    resolver = check_cluster(None)
    cluster = resolver.cluster_spec().as_dict()
    return cluster, resolver.task_type, resolver.task_id


def test_tf_config_is_taken(monkeypatch):
    addresses = ["host0:12345", "host1:12345"]
    expected = {"worker": addresses}, "worker", 1
    assert place(monkeypatch, block("TF_CONFIG")) == expected


def test_tf_config_of_a_tfjob_is_taken(monkeypatch):
    config = json.loads(block("TF_CONFIG")) | {"environment": "cloud"}
    config["cluster"]["chief"] = ["host2:12345"]
    assert place(monkeypatch, json.dumps(config))[1:] == ("worker", 1)


def test_slurm_script_starts_every_worker_at_its_place(monkeypatch, tmp_path):
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nset -eu\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "train.py").write_text(
        f"{block('cluster')}\nprint(os.environ['TF_CONFIG'])"
    )
    output = subprocess.run(
        ["bash", "-c", block("slurm")],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node[2,10]",
        },
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    ).stdout
    addresses = ["node2:12345", "node10:12345"]
    for index, text in enumerate(output.splitlines()):
        expected = {"worker": addresses}, "worker", index
        assert place(monkeypatch, text) == expected
    assert index == 1


def test_kubernetes_manifest_gives_every_pod_its_place(monkeypatch):
    service, job = yaml.safe_load_all(block("kubernetes"))
    template = job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables.pop("PYTHONHASHSEED") == "0"
    (addresses_in,) = variables.values()
    assert [*variables] == ["WORKERS"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == template["subdomain"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    # The names that an indexed job gives its pods.
    addresses = [
        f"{job['metadata']['name']}-{i}.{template['subdomain']}:12345"
        for i in range(job["spec"]["completions"])
    ]
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    monkeypatch.setenv("WORKERS", addresses_in)
    monkeypatch.setenv("TF_CONFIG", "")
    for index in range(len(addresses)):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        exec(block("cluster"), {})
        expected = {"worker": addresses}, "worker", index
        assert place(monkeypatch, os.environ["TF_CONFIG"]) == expected


def slurm_resolver(monkeypatch, nodes, **kwargs):
    for name, value in (SLURM | {"SLURM_STEP_NODELIST": nodes}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return tf.distribute.cluster_resolver.SlurmClusterResolver(**kwargs)


def test_slurm_resolver_of_tensorflow_is_taken(monkeypatch):
    resolver = check_cluster(slurm_resolver(monkeypatch, "node[1-2]"))
    addresses = ["node1:8888", "node2:8888"]
    assert resolver.cluster_spec().as_dict() == {"worker": addresses}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_slurm_resolver_of_tensorflow_is_as_the_page_says(monkeypatch):
    """Sorted as text; no way without a GPU."""
    resolver = slurm_resolver(monkeypatch, "node[2,10]")
    addresses = ["node10:8888", "node2:8888"]
    assert resolver.cluster_spec().as_dict() == {"worker": addresses}
    resolver = slurm_resolver(monkeypatch, "node[1-2]", gpus_per_node=0)
    with pytest.raises(ValueError, match="must not be zero"):
        resolver.cluster_spec()


def test_failures_are_those_that_are_tested():
    tests = "".join(
        (ROOT / "tests" / path).read_text()
        for path in (
            "workers/agreement/test_worker_errors.py",
            "workers/collectives/test_collectives.py",
            "workers/test_guide.py",
        )
    )
    table = FAILURES.split("| what happened |")[1]
    messages = [
        re.search("`(.+?)`", line.split("|")[2]).group(1)
        for line in table.splitlines()[2:]
        if line.startswith("|")
    ]
    assert len(messages) == 17
    for message in messages:
        assert message in tests
