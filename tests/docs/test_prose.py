"""Pages and the package keep few of the habits of tools/prose_habits.py."""

import pathlib

import prose_habits
import pytest

# The most that pages may have: the rest are deliberate.
MOST_OF_PAGES = {
    "what": 2,
    "who, nobody, one that": 2,
    "of which, at whose": 2,
    "also before a phrase": 2,
    "of its own, of ours": 6,
}
OTHERS_OF_PAGES = 0
# Words of the pages without measured tables: more are not read to the end.
MOST_WORDS = 20_100
# The most that docstrings, comments and strings of the package may have.
MOST_OF_PACKAGE = {"of which, at whose": 9, "of its own, of ours": 7}
OTHERS_OF_PACKAGE = 2


def counted(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [habit for habit, *_ in prose_habits.places([path])]


@pytest.fixture(scope="module")
def found():
    paths = list(prose_habits.files(prose_habits.ROOT))
    assert len(paths) > 150
    return [
        (habit, path.suffix, path.relative_to(prose_habits.ROOT), words)
        for habit, _, path, words in prose_habits.places(paths)
    ]


@pytest.mark.parametrize("habit", prose_habits.HABITS)
@pytest.mark.parametrize(
    ("suffix", "most", "others"),
    [
        (".md", MOST_OF_PAGES, OTHERS_OF_PAGES),
        (".py", MOST_OF_PACKAGE, OTHERS_OF_PACKAGE),
    ],
    ids=["pages", "package"],
)
def test_few_places_have_a_habit(habit, suffix, most, others, found):
    places = [
        (str(path), words)
        for name, kind, path, words in found
        if (name, kind) == (habit, suffix)
    ]
    assert len(places) <= most.get(habit, others), places


def test_pages_stay_short():
    words = {
        path.stem: len(prose_habits.MEASURED.sub("", path.read_text()).split())
        for path in prose_habits.ROOT.glob("docs/*.md")
    }
    assert sum(words.values()) <= MOST_WORDS, words


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
        ("also before a phrase", "It runs eagerly, also\nin graphs."),
        ("of its own, of ours", "Give it a name of its\nown."),
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
