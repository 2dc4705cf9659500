"""What the README says is what the project does."""

import re
import textwrap
from pathlib import Path

from fedjax_pfl.algorithms import ALGORITHMS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_table_lists_every_method():
    table = README.split("<!-- methods -->")[1]
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+\.py)` \|", table, re.M)
    assert [name for name, _ in rows] == list(ALGORITHMS)
    for name, file in rows:
        assert ALGORITHMS[name].__module__.rsplit(".", 1)[1] + ".py" == file


def test_continuous_integration_runs_the_commands_as_they_stand():
    script = (ROOT / ".ci" / "run").read_text()
    start, check = blocks("bash")[:2]
    assert check.strip() in script.splitlines()
    assert start.strip() in script


def test_the_example_runs():
    (example,) = (code for code in blocks("python") if code.startswith("import"))
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["federation"].train.size.shape == (20,)


def test_the_method_shown_is_the_method():
    (shown,) = (code for code in blocks("python") if code.startswith("def round"))
    source = (ROOT / "fedjax_pfl" / "algorithms" / "ditto.py").read_text()
    start = source.index("    def round")
    found = textwrap.dedent(source[start : source.index("    def predict")])
    found = re.sub(r": (PyTree|Array|State|Client|Cohort)\b|, epochs=personal_epochs| -> [^:\n]*(?=:\n)", "", found)
    found = re.sub(r"\n *#[^\n]*", "", found)
    assert found.split() == shown.split()
