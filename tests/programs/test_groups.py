"""Groups report the end of the processes that have just ended."""

from . import groups

_WORKER = """import pathlib, sys, time

folder = pathlib.Path(sys.argv[1])
while not (folder / "0.json").exists():
    time.sleep(0.01)
sys.exit((folder / "0.py").read_text())
"""


def test_last_words_are_of_the_last_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "WORKER", tmp_path / "worker.py")
    groups.WORKER.write_text(_WORKER)
    group = groups.Group("1")
    for text in ("first", "second"):
        assert group.run(text, limit=60) == [None]
        assert group.last_words() == f"exit code 1\n{text}"
