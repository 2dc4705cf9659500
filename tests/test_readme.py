"""Tests of the README, the table of methods and the template."""

import re
import sys

from documents import ROOT, blocks, read

from fedjax_pfl import testing
from fedjax_pfl.algorithms import ALGORITHMS

README = read("README.md")


def test_the_table_lists_every_method():
    table = read("docs/methods/index.md").split("<!-- methods -->")[1]
    rows = re.findall(r"^\| `(\w+)` \|.*\| `([\w/]+\.py)` \|", table, re.M)
    assert [name for name, _ in rows] == list(ALGORITHMS)
    for name, file in rows:
        module = ALGORITHMS[name].__module__.removeprefix("fedjax_pfl.algorithms.")
        assert module.replace(".", "/") + ".py" == file


def test_the_readme_lists_every_method_once_and_counts_them():
    rows = README.split("<!-- papers -->")[1]
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(ALGORITHMS)
    assert f"{len(ALGORITHMS)} methods" in README


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120
    prose = re.sub(r"\]\([^)]*\)", "]", README)
    assert len(re.findall(r"\S*\w\S*", prose)) <= 600


def test_continuous_integration_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    first = blocks("README.md", "bash")[0].code.splitlines()[0]
    check = "pip install -e '.[test]' && pytest"
    assert f"`{check}`" in README and check in script.splitlines()
    assert first in script


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    start, method = blocks("README.md", "python")
    exec(compile(start.code, "README.md", "exec"), {})
    assert 0.5 < float(capsys.readouterr().out.split()[-1]) <= 1
    (tmp_path / method.title).write_text(method.code)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own

    testing.check_algorithm(own.personal_head)
    del sys.modules["own"]


def without_comments(source: str) -> list[str]:
    """Returns the words of a method from its factory on, without its comments."""
    return re.sub(r" *#[^\n]*", "", source[source.index("def small_head") :]).split()


def test_the_template_is_the_method_of_the_page():
    pages = blocks("docs/your-own-method.md", "python")
    (shown,) = (block.code for block in pages if "def small_head" in block.code)
    template = (ROOT / "fedjax_pfl/algorithms/template.py").read_text()
    assert without_comments(template) == without_comments(shown)
