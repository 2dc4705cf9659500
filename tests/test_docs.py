"""Every command and code block of README and docs: checked up to compilation here, run
at a tiny size when slow."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toy
from documents import (
    PAGES,
    ROOT,
    TABLES,
    blocks,
    commands,
    files_of,
    is_program,
    module,
    read,
)

from experiments import (
    build,
    export,
    figures,
    flags,
    grid,
    html,
    main,
    settings,
    show,
    sweep,
    tables,
    within,
)
from fedjax_pfl import user_code

WITHOUT_FILES = ("digits", "synthetic", "npz:")
OTHERS = {
    "pip",
    "pytest",
    "mkdocs",
    "ruff",
    "mypy",
    "pre-commit",
    "python",
    "nice",
    ".ci/run",
    ".ci/full",
    "git",
    "jupyter",
    "tensorboard",
    "TINY=1",
}
TINY = {"rounds": 1, "epochs": 1}


def user_settings(parsed: flags.Parsed, name: str) -> list[dict]:
    """The settings of each run of a command line of main or of a sweep."""
    if name == "main":
        return [parsed.settings()]
    return [
        member.given
        for member in grid.members(parsed.settings(), Path(), parsed.get("seeds"))
    ]


def check_run(argv: list[str], name: str, prepared: set) -> None:
    """Reads a command of main or sweep, and prepares what it would train, but for data
    that are not in the package."""
    parsed = flags.parse(argv, {"main": main._FLAGS, "sweep": sweep._FLAGS}[name])
    if parsed.get("list") or parsed.get("describe"):
        assert main._information(parsed)
        return
    if parsed.get("resume") or parsed.get("config"):  # of a run that is not there yet
        assert parsed.get("workdir")
        return
    for user in user_settings(parsed, name):
        config = settings.resolve(user)
        what = repr(config.replace(seed=0, rounds=0, targets=None))
        if (
            config.dataset.startswith(WITHOUT_FILES) or user_code.named(config.dataset)
        ) and what not in prepared:
            prepared.add(what)
            public = config.public is None or config.public.startswith(WITHOUT_FILES)
            build.prepare(config if public else config.replace(public="synthetic"))


def check_benchmark(name: str, argv: list[str]) -> None:
    folder = ROOT / "benchmarks"
    assert (folder / f"{name}.py").is_file()
    source = "".join((folder / f"{file}.py").read_text() for file in (name, "report"))
    for word in argv:
        flag = word.removeprefix("--").removeprefix("no").partition("=")[0]
        assert not word.startswith("--") or re.search(
            rf'DEFINE_\w+\(\s*"{flag}"', source
        ), word


READERS = {
    "export": export._FLAGS,
    "tables": {"targets": flags.OF_A_RUN["targets"]},
    "figures": figures._FLAGS,
    "html": html._FLAGS,
    "show": {},
    "within": {"tasks": flags.Flag(str, "")},
    "active": {},
}


@pytest.fixture(scope="module")
def prepared():
    return set()


# Their many commands take long; those of pages are also run when slow.
MANY = (
    "docs/command-line.md",
    "docs/data.md",
    "docs/methods/index.md",
    "experiments/README.md",
)


@pytest.mark.parametrize(
    "page", [toy.slow(page) if page in MANY else page for page in [*PAGES, *TABLES]]
)
def test_commands_are_right_up_to_compilation(page, tmp_path, monkeypatch, prepared):
    with files_of(page, tmp_path, monkeypatch):
        for block in blocks(page):
            if (
                block.language == "python"
                and "fedjax_pfl" not in block.code
                and not block.title
            ):
                if "savez" in block.code:  # writes what the commands below it read
                    exec(compile(block.code, page, "exec"), {})
            elif block.language == "bash":
                for words in commands(block.code):
                    check(words, prepared)


def check(words: list[str], prepared: set) -> None:
    assert words[0] in OTHERS, words
    name, argv = module(words) or ("", [])
    package, _, name = name.rpartition(".")
    if package == "experiments" and name in ("main", "sweep"):
        check_run(argv, name, prepared)
    elif package == "experiments":
        assert flags.parse(argv, READERS[name], words=True).words
    elif package == "benchmarks":
        check_benchmark(name, argv)
    elif words[:2] == ["pip", "install"]:
        extras = ",".join(re.findall(r"\[([\w,]+)\]", " ".join(words))).split(",")
        declared = (ROOT / "pyproject.toml").read_text()
        assert all(
            re.search(rf"^{extra} = \[", declared, re.M)
            for extra in filter(None, extras)
        ), words


def test_a_wrong_command_is_found(prepared):
    for words in (
        ["python", "-m", "experiments.main", "--algo=fedavg", "--nonsense=1"],
        ["python", "-m", "experiments.sweep", "--algo=fedavg,fedavgg"],
        # which needs one architecture
        ["python", "-m", "experiments.main", "--algo=fedavg", "--model=mlp,linear"],
    ):
        with pytest.raises(ValueError):
            check(words, prepared)
    with pytest.raises(AssertionError):
        # another one's
        check(["python", "-m", "benchmarks.cost", "--recipes=flute"], prepared)
    with pytest.raises(AssertionError):
        check(["pip", "install", "-e", ".[nonsense]"], prepared)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_are_python(page):
    for block in blocks(page, "python"):
        ast.parse(block.code)


@pytest.mark.parametrize("page", [*PAGES, *TABLES])
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)\s]*)\)", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in map(
                anchor_of, re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            ), target


def anchor_of(heading: str) -> str:
    """A heading's anchor, as GitHub and MkDocs both make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_what_is_named_in_code_is_there():
    """Names of flags, and of files of the repository, between backticks."""
    known = {*main._FLAGS, *sweep._FLAGS, "help", "tasks", "output"}
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
        quoted = re.findall(r"`([^`\n]+)`", prose)
        for flag in re.findall(r"--(\w+)", " ".join(quoted)):
            assert flag in known or flag in BENCHMARK_FLAGS, (page, flag)
        for path in quoted:
            if re.fullmatch(
                r"(fedjax_pfl|experiments|benchmarks|tests|docs|notebooks)/[\w/.]+\.\w+",
                path,
            ):
                assert (ROOT / path).exists(), (page, path)


BENCHMARK_FLAGS = {
    flag
    for path in (ROOT / "benchmarks").glob("*.py")
    for flag in re.findall(r'DEFINE_\w+\(\s*"(\w+)"', path.read_text())
}


# Folders and files whose language is checked; the rest of the repository follows.
CLEAN = [
    "CONTRIBUTING.md",
    "docs/comparison.md",
    "docs/evaluation.md",
    "docs/faq.md",
    "docs/methods",
    "docs/performance.md",
    "docs/scaling.md",
]
BANNED = re.compile(
    r"\b(?:said|told|beside|apart|lies|stands|courses?|homes|own part|stays|of it|dealt"
    r"|what comes of|dearest)\b|(?<!\bin[\s-])\bplaces?\b(?! of\b|[(=.`])",
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
            doc = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
            assert not OPENING.match(doc or ""), (file, doc)


# --- slow: everything is run


def tiny(name: str, argv: list[str]) -> list[str]:
    """The arguments of a run, made small; its directory is the one that it would have
    had."""
    parsed = flags.parse(argv, {"main": main._FLAGS, "sweep": sweep._FLAGS}[name])
    if parsed.get("list") or parsed.get("describe") or parsed.get("resume"):
        return argv
    user = user_settings(parsed, name)[0]
    config = settings.resolve(user)
    more = [
        f"--{key}={value}"
        for key, value in TINY.items()
        if config.steps is None or key != "epochs"
    ]
    # not everywhere prepared
    if not config.dataset.startswith(WITHOUT_FILES) and not user_code.named(
        config.dataset
    ):
        more += ["--dataset=synthetic", "--model=linear", "--batch_size=10"]
        more += ["--shared_model=linear"] if config.shared_model else []
    if name == "main" and not parsed.get("workdir"):
        more.append(f"--workdir={settings.default_workdir(user, config)}")
    if name == "sweep" and not parsed.get("root"):
        more.append(f"--root={sweep._root(parsed, parsed.settings())}")
    return [*argv, *more]


def run(words: list[str]) -> None:
    """Runs a command of the project at a tiny size; those that install or build are
    other tests'."""
    name, argv = module(words) or ("", [])
    package, _, name = name.rpartition(".")
    if package != "experiments":
        return
    if name == "main":
        assert main.run(tiny(name, argv)) == 0, words
    elif name == "sweep":
        assert sweep.run(tiny(name, argv)) == 0, words
    else:
        readers = {
            "export": export,
            "figures": figures,
            "html": html,
            "show": show,
            "tables": tables,
            "within": within,
        }
        assert readers[name].main(argv), words


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
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "methods" / "fedcp" / "index.html").read_text()
    fedprox = (tmp_path / "site" / "methods" / "fedprox" / "index.html").read_text()
    assert "Idle at the defaults on this data" in fedprox
    assert "Hyperparameters" in page and "policy" in page and "91.30 ± 0.17" in page
