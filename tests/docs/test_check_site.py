"""`tools/check_site.py` finds what is wrong with a built site."""

import check_site
import pytest


def checked(site, monkeypatch, capsys):
    """Return the exit message and the problems that the tool prints."""
    monkeypatch.setattr("sys.argv", ["check_site.py", str(site)])
    with pytest.raises(SystemExit) as stop:
        check_site.main()
    return str(stop.value), capsys.readouterr().err.splitlines()


def test_missing_start_page_is_a_problem(tmp_path, monkeypatch, capsys):
    text = "<article><h1>Page</h1><p><a href='.'>Start</a></p></article>"
    (tmp_path / "page.html").write_text(text)
    message, problems = checked(tmp_path, monkeypatch, capsys)
    assert message.startswith("2 problems in ")
    assert problems == ["index.html is missing", "page.html: . leads nowhere"]
    (tmp_path / "index.html").write_text(text)
    check_site.main()
