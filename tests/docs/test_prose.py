"""The pages keep few of the habits that tools/prose_habits.py counts."""

import pathlib

import prose_habits
import pytest

# The most that pages may have: what is left is meant.
MOST = {"what": 75, "who, nobody, one that": 12}
OTHERS = 6


def counted(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [habit for habit, *_ in prose_habits.places([path])]


@pytest.fixture(scope="module")
def found():
    pages = [
        path
        for path in prose_habits.files(prose_habits.ROOT)
        if path.suffix == ".md" and path.stem != "CHANGELOG"
    ]
    assert len(pages) > 20
    return [(habit, path) for habit, _, path, _ in prose_habits.places(pages)]


@pytest.mark.parametrize("habit", prose_habits.HABITS)
def test_pages_have_few_of_a_habit(habit, found):
    places = [path.stem for name, path in found if name == habit]
    assert len(places) <= MOST.get(habit, OTHERS), places


@pytest.mark.parametrize(
    ("habit", "sentence"),
    [
        ("what", "It sends what it has."),
        ("begins with Of", "It is small. Of each variable, a copy."),
        ("likewise, as above", "| mean |\n| likewise |"),
        ("tell, say, refuse", "Tell whether it is built."),
        ("who, nobody, one that", "Nobody else\nhas it."),
        ("share out, hold back", "The state is shared\nout."),
        ("inversion", "It stays. So do the others."),
    ],
)
def test_habit_is_counted_across_lines_but_not_in_code(
    habit, sentence, tmp_path
):
    assert habit in counted(tmp_path, "docs/page.md", f"# Page\n\n{sentence}\n")
    code = f"# Page\n\n```text\n{sentence}\n```\n"
    assert counted(tmp_path, "docs/page.md", code) == []


def test_docstrings_comments_and_strings_are_counted(tmp_path):
    text = '"""Of a module."""\n\n# Of a comment.\nx = "Of a string"\n'
    path = pathlib.Path("tf_optimizers") / "module.py"
    assert counted(tmp_path, path, text) == ["begins with Of"] * 3
