"""Tests of the documents: commands, code blocks, links, names and language."""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys

import pytest
import toy
from documents import PAGES, ROOT, blocks, commands, files_of, is_program, module, read

from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import (
    cli,
    config,
    export,
    figures,
    predict,
    reconstruct,
    report,
    sweep,
)

FLAGS = {
    "main": sweep.RUN_FLAGS,
    "sweep": sweep.SWEEP_FLAGS,
    "report": report.FLAGS,
    "plot": figures.FLAGS,
    "export": export.FLAGS,
    "predict": predict.FLAGS,
    "reconstruct": reconstruct.FLAGS,
}
OTHERS = {
    *("pip", "pytest", "mkdocs", "pre-commit", "python", ".ci/run", ".ci/full"),
    *("jupyter", "tensorboard", "TINY=1"),
}
LINKED = [*PAGES, "CONTRIBUTING.md", "docs/reference.md"]
LINKED += [str(p.relative_to(ROOT)) for p in (ROOT / "docs/results").glob("*.md")]


def check(words: list[str]) -> None:
    """Checks a command up to its compilation."""
    assert words[0] in OTHERS, words
    name, argv = module(words) or ("", [])
    package, _, name = name.rpartition(".")
    if package == "experiments":
        parsed = cli.parse(argv, FLAGS[name])
        given = parsed.settings() if name == "main" else {}
        if not given.keys() <= {"hparams"} and not {"resume", "config"} & given.keys():
            config.resolve(given)
    elif package == "benchmarks":
        source = (ROOT / "benchmarks" / f"{name}.py").read_text()
        source += (ROOT / "benchmarks/report.py").read_text()
        for flag in re.findall(r"--(?:no)?(\w+)", " ".join(argv)):
            assert re.search(rf'DEFINE_\w+\(\s*"{flag}"', source), words
    elif words[:2] == ["pip", "install"]:
        declared = (ROOT / "pyproject.toml").read_text()
        for extra in re.findall(r"\w+", "".join(re.findall(r"\[.*?\]", words[-1]))):
            assert re.search(rf"^{extra} = \[", declared, re.M), words


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_commands_are_right_up_to_compilation(page, tmp_path, monkeypatch):
    with files_of(page, tmp_path, monkeypatch):
        for block in blocks(page, "bash"):
            for words in commands(block.code):
                check(words)


@pytest.mark.parametrize(
    "command",
    [
        "experiments.main --algo=fedavg --nonsense=1",
        "experiments.main --algo=fedavgg",
        "experiments.report runs --nonsense",
    ],
)
def test_a_wrong_command_is_found(command):
    with pytest.raises(InputError):
        check(["python", "-m", *command.split()])


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_are_python(page):
    for block in blocks(page, "python"):
        ast.parse(block.code)


@pytest.mark.parametrize("page", LINKED)
def test_links_have_targets(page):
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)\s]*)\)", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in map(anchor_of, headings), target


def anchor_of(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_names_in_backticks_exist():
    known = {"help", *(flag for flags in FLAGS.values() for flag in flags)}
    for path in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', path.read_text()))
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
        quoted = re.findall(r"`([^`\n]+)`", prose)
        assert set(re.findall(r"--(\w+)", " ".join(quoted))) <= known, page
        for path in quoted:
            if re.fullmatch(r"(fedjax_pfl|benchmarks|tests|docs)/[\w/.]+\.\w+", path):
                assert (ROOT / path).exists(), (page, path)


def generated():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs/pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    return pages


def test_the_reference_is_generated():
    assert read("docs/reference.md") == generated().reference(), "python docs/pages.py"


@pytest.mark.parametrize(
    "names", [["ditto", "fedproto", "cfl"], toy.slow(list(ALGORITHMS))], ids=len
)
def test_the_table_of_options_is_generated(names):
    pages = generated()
    _, table, _ = read("docs/methods/index.md").split(pages.OPTIONS)
    assert {*pages.taken(names).splitlines()} <= {*table.splitlines()}
    assert table.count("\n| `") == len(ALGORITHMS)


def test_the_costs_of_methods_are_those_measured():
    """A method that takes over 1.5 times its arithmetic has a reason."""
    pages, index = generated(), read("docs/methods/index.md")
    assert index == pages.with_costs(index), "python docs/pages.py"
    known = json.loads(pages.COST.read_text())
    assert known.keys() == {*ALGORITHMS}
    slow = {name for name, x in known.items() if x["time"] > 1.5 * x["arithmetic"]}
    reasons = index.split("## Slower than their arithmetic")[1].split("\n## ")[0]
    lists = re.findall(r"^\* ((?:`\w+`(?:, )?)+):", reasons, re.MULTILINE)
    assert slow == {*re.findall(r"\w+", " ".join(lists))}


# Folders and files whose language is checked; the rest of the repository follows.
CLEAN = ["README.md", "CONTRIBUTING.md", "docs", "experiments", "fedjax_pfl"]
BANNED = re.compile(
    r"\b(?:said|told|beside|apart|lies|stands|courses?|homes|own part|stays|of it|dealt"
    r"|what comes of|dearest)\b|(?<!\bin[\s-])(?<!\.)\bplaces?\b(?! of\b|[(=.`:,)\]])",
    re.IGNORECASE,
)
OPENING = re.compile(r"(What|Whether|Where|Of|So that|As)\b")


@pytest.mark.parametrize("path", CLEAN)
def test_the_language_is_plain(path):
    root = ROOT / path
    for file in [root] if root.is_file() else sorted(root.rglob("*.[mp][dy]")):
        text = file.read_text()
        code = r"```.*?```|`[^`]*`" if file.suffix == ".md" else r"\Z"
        words = BANNED.findall(re.sub(code, "", text, flags=re.DOTALL))
        assert not words, (file, words)
        tree = ast.walk(ast.parse(text)) if file.suffix == ".py" else ()
        for node in tree:
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            doc = documented and ast.get_docstring(node)
            assert not OPENING.match(doc or ""), (file, doc)


# --- slow: everything is run


def run(words: list[str]) -> None:
    """Runs a command with one round, unless its data need a download."""
    if words[:2] == ["python", "-c"]:
        exec(words[2], {})
    name, argv = module(words) or ("", [])
    if not name.startswith("experiments.") or re.search(
        "mnist|cifar|usps|agnews|plays|photos|answers", str(argv)
    ):
        return
    name = name.removeprefix("experiments.")
    command = "run" if name == "main" else name
    if name in ("main", "sweep") and not re.search("list|describe|resume", str(argv)):
        argv = [*argv, "--rounds=1"]
    where, _, function = cli.COMMANDS[command].partition(":")
    found = importlib.import_module(f"fedjax_pfl.experiment.{where}")
    assert getattr(found, function)(argv) == 0, words


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    names: dict = {}
    with files_of(page, tmp_path, monkeypatch):
        for block in blocks(page):
            if block.language == "bash":
                for words in commands(block.code):
                    run(words)
            elif is_program(block) and not block.title:
                exec(compile(block.code, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("mkdocs"), reason="pip install -e '.[docs]'"
)
def test_the_site_is_built_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "policy" in (tmp_path / "methods/fedcp/index.html").read_text()
    home = (tmp_path / "index.html").read_text()
    assert "md-nav__item--nested" in home and "md-nav__item--section" not in home
    assert "stylesheets/tables.css" in home
