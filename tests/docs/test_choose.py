"""Every figure in docs/choose.md is equal to that in the results."""

import json
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "choose.md").read_text()
ROWS = dict(re.findall(r"^\| (\w+) \| .*? \| (.*) \|$", PAGE, re.M))


def models(name):
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text())["models"]


def figures(text):
    """Return the decimal fractions and the factors in a cell."""
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.findall(r"\d+\.\d+|\d+(?= times)", text)


def test_page_has_five_questions_and_one_table():
    assert re.findall(r"^(\d)\. \*\*.*?\?", PAGE, re.M | re.S) == [*"12345"]
    assert len(re.findall(r"^\| --- ", PAGE, re.M)) == 1


def test_offload():
    found = models("gpu")["396 M, float32, batch 16,384"]
    assert "H100" in found["gpu"]
    names = "keras Adam", "tfo.AdamOffload"
    memory = [f"{found['peak_bytes'][name] / 1e9:.1f}" for name in names]
    adam, ours = (statistics.median(found["step_ms"][n]) for n in names)
    assert figures(ROWS["AdamOffload"]) == [*memory, f"{ours / adam:.1f}"]


def test_sharded_state():
    found = models("sharded_state")["bert-base"]["layouts"]["4 workers"]
    whole, shards = found["AdamW, whole"], found["AdamW, sharded"]
    expected = [
        f"{statistics.median(shards[k]) / statistics.median(whole[k]):.2f}"
        for k in ("state_bytes", "step_ms")
    ]
    assert figures(ROWS["ShardedState"]) == expected


def test_large_batches():
    results = json.loads((ROOT / "docs/demo/results.json").read_text())
    means = {
        (cell["optimizer"], cell["steps"]): f"{100 * cell['mean']:.1f}"
        for cell in results["parts"]["large-batch"]["cells"]
        if cell["batch_size"] == 1024
    }
    lamb = [means[name, 30] for name in ("tfo.Lamb", "AdamW")]
    assert figures(ROWS["Lamb"]) == lamb
    lans = [means[key] for key in (("tfo.LANS", 30), ("tfo.LANS", 10))]
    assert figures(ROWS["LANS"]) == [*lans, means["AdamW", 10]]


def test_compression():
    def speedup(name, link, slow, fast):
        found = models(name)["4 M, 2 hosts"]["links"][link]
        slow, fast = (
            statistics.median(found[key]["step_ms"]) for key in (slow, fast)
        )
        return slow / fast

    contenders = "dense, float32", "DGC, float32 values"
    slow = speedup("shaped_network", "100 Mbit/s", *contenders)
    fast = speedup("shaped_network", "1 Gbit/s", *contenders)
    assert figures(ROWS["DGCMomentum"]) == [f"{slow:.0f}", f"{fast:.1f}"]
    contenders = "AdamW, dense", "AdamW in SparseLoCo, float32 values"
    slow = speedup("loco_network", "100 Mbit/s", *contenders)
    assert figures(ROWS["SparseLoCo"]) == [f"{slow:.0f}"]
