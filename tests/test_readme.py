"""What the README and the pages say is what the project does."""

import re

from documents import ROOT, blocks, read

from fedjax_pfl.algorithms import ALGORITHMS

README = read("README.md")


def test_the_table_lists_every_method():
    table = read("docs/methods/index.md").split("<!-- methods -->")[1]
    rows = re.findall(r"^\| `(\w+)` \|.*\| `([\w/]+\.py)` \|", table, re.M)
    assert [name for name, _ in rows] == list(ALGORITHMS)
    for name, file in rows:
        module = ALGORITHMS[name].__module__.removeprefix("fedjax_pfl.algorithms.")
        assert module.replace(".", "/") + ".py" == file


def test_the_readme_groups_every_method_once_and_counts_them():
    rows = README.split("<!-- papers -->")[1]
    names = re.findall(r"`(\w+)`", rows)
    assert sorted(names) == sorted(ALGORITHMS)
    assert f"{len(ALGORITHMS)} methods" in README
    # the name follows its link, by which its page finds the paper
    assert not re.search(r"\]\([^)]*\) (?!`)", rows)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


def test_continuous_integration_runs_the_commands_as_they_stand():
    script = (ROOT / ".ci" / "run").read_text()
    start = blocks("README.md", "bash")[0].code.strip()
    check = "pip install -e '.[test]' && pytest"
    assert f"`{check}`" in README and check in script.splitlines()
    assert start in script


def test_the_examples_run():
    one, mixed = blocks("README.md", "python")
    names: dict = {}
    exec(compile(one.code, "README.md", "exec"), names)
    assert names["last"].pre["acc"].shape == (20,)
    tiny = mixed.code.replace(', "cnn_dropout")', ")").replace("rounds=10", "rounds=1")
    exec(compile(tiny, "README.md", "exec"), names)
    assert "proto_acc" in names["last"].pre


def without_types(source: str) -> list[str]:
    """The words of a source, without annotations and comments."""
    types = "PyTree|Array|State|Client|Cohort|Batch|Task"
    return re.sub(rf": ({types})\b| -> [^:\n]*(?=:\n)| *#[^\n]*", "", source).split()


def test_the_template_is_the_method_of_the_page():
    (shown,) = (
        b.code
        for b in blocks("docs/your-own-method.md", "python")
        if "def small_head" in b.code
    )
    source = (ROOT / "fedjax_pfl" / "algorithms" / "template.py").read_text()
    start = "def small_head"
    assert without_types(source[source.index(start) :]) == without_types(
        shown[shown.index(start) :]
    )
