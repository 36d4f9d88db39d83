"""Every figure in docs/choose.md is equal to that in the results."""

import itertools
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


def test_offload():
    row, saved, factors = ROWS["AdamOffload"], [], {}
    for name, found in models("gpu").items():
        if not name.startswith("396 M, float32, batch "):
            continue
        assert "H100" in found["gpu"]
        names = "keras Adam", "tfo.AdamOffload"
        adam, ours = (found["peak_bytes"][name] for name in names)
        saved.append(100 * (1 - ours / adam))
        adam, ours = (statistics.median(found["step_ms"][n]) for n in names)
        factors[name.rpartition(" ")[2]] = f"{ours / adam:.1f}"
    assert f"falls by {min(saved):.0f} to {max(saved):.0f}%" in row
    few, many = factors["256"], factors["16,384"]
    assert f"{many} (batch size 16,384) to {few} (256) times" in row


def test_sharded_state():
    found = models("sharded_state")["bert-base"]["layouts"]["4 workers"]
    whole, shards = found["AdamW, whole"], found["AdamW, sharded"]
    expected = [
        f"{statistics.median(shards[k]) / statistics.median(whole[k]):.2f}"
        for k in ("state_bytes", "step_ms")
    ]
    row = ROWS["ShardedState"].replace("a quarter", "0.25")
    assert figures(row) == expected


def accuracies():
    """Return the mean of each optimizer and number of steps, in percent."""
    results = json.loads((ROOT / "docs/demo/results.json").read_text())
    return {
        (cell["optimizer"], cell["steps"]): f"{100 * cell['mean']:.1f}"
        for cell in results["parts"]["large-batch"]["cells"]
    }


def test_large_batches_on_the_page_of_lamb():
    """The table and the learning rates are those of the study."""
    means, lamb = accuracies(), (ROOT / "docs/lamb.md").read_text()
    rows = re.findall(r"^\| [\d,]+ / (\d+) \| (.*) \|$", lamb, re.M)
    assert [steps for steps, _ in rows] == ["40", "30", "10"]
    names = "AdamW", "tfo.Lamb", "tfo.LANS", "Keras Muon"
    for steps, row in rows:
        assert row.split(" | ") == [means[n, int(steps)] for n in names]
    cells = json.loads((ROOT / "docs/demo/results.json").read_text())
    cells = cells["parts"]["large-batch"]["cells"]
    tried = [trial["learning_rate"] for trial in cells[0]["tuning"]]
    assert all(b == 2 * a for a, b in itertools.pairwise(tried))
    chosen = [
        " or ".join(
            sorted(
                {
                    str(c["learning_rate"])
                    for c in cells
                    if c["optimizer"] == name
                }
            )
        )
        for name in ("tfo.Lamb", "tfo.LANS")
    ]
    assert (
        f"rates from {tried[0]:.3f} to {tried[-1]}, in factors of 2. "
        "For runs of 10 to 40 steps in [our study](demo/report.md), "
        f"{chosen[0]} was best for LAMB, and {chosen[1]} for LANS."
    ) in " ".join(lamb.split())


def test_large_batches():
    means = accuracies()
    rows = {
        "Muon": [("Keras Muon", 10), ("AdamW", 10)]
        + [("Keras Muon", 30), ("AdamW", 30)],
        "LANS": [("tfo.LANS", 10), ("tfo.LANS", 30)],
        "Lamb": [("tfo.Lamb", 10), ("tfo.Lamb", 30)],
    }
    for row, cells in rows.items():
        assert figures(ROWS[row]) == [means[cell] for cell in cells]


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
