"""Bad commands and files, made systematically: each is one sentence and the documented
exit code, and writes nothing.

Every setting and every hyperparameter has values of a wrong kind and out of its range;
every file that a user may bring is damaged in every way. A command that would begin to
compile counts as accepted, which none of them may be.
"""

import functools
import io
import math

import numpy as np
import pytest
from experiments.config import SETTINGS

from experiments import (
    entry,
    export,
    figures,
    html,
    main,
    show,
    sweep,
    tables,
    train,
    within,
)
from fedjax_pfl import hyperparameters
from fedjax_pfl.algorithms import ALGORITHMS

BASE = {
    "algo": "fedavg",
    "data_fraction": "0.2",
    "clients": "5",
    "model": "linear",
    "width": "1",
    "devices": "1",
}
INTEGERS = ("x", "1.5", "", "nan", "-1", "1\n2", "9" * 30)
NUMBERS = ("x", "", "nan", "inf", "-1", "1,5", "1\n2")
WRONG = {int: INTEGERS, float: NUMBERS, bool: ("maybe", ""), str: ("", "no such")}
TEXTS = {
    "algo": (
        "",
        "fedavgg",
        "FedAvg",
        "x:",
        ":x",
        "nowhere.py:f",
        "os:getcwd",
        "os.path:nothing",
        "1\n2",
    ),
    "preset": ("", "pfedc", "DIGITS"),
    "dataset": ("", "digit", "npz:", "npz:/", "npz:nowhere.npz", "mnist"),
    "test_split": ("", "Pool", "official"),
    "partition": ("", "dirichlett", "file:", "file:/", "file:nowhere.npz"),
    "participation": (
        "",
        "0",
        "1.5",
        "-1",
        "nan",
        "1:0.5",
        "0.1:",
        ":",
        "0.1:0.5:1",
        "half",
    ),
    "optimizer": ("", "sgdd", "lbfgs", "SGD"),
    "model": (
        "",
        "linearr",
        "linear,",
        "linear,linear,linear,linear,linear,linear",
        "file:",
        "file:/",
        "cnn",
    ),
    "shared_model": ("", "linearr", "linear,linear"),
    "public": (
        "",
        "digit",
        "digits:0",
        "digits:99999999",
        "digits:-1",
        "digits:20k",
        "npz:",
    ),
    "bn_stats": ("", "Local", "global"),
    "compute_dtype": ("", "float", "int8"),
    "targets": ("", "80", "x", "0.5;0.6", "nan", ":", "nothing:0.5"),
    "conv": ("", "fft"),
    "width": ("", "0", "-1", "1.5", "wide"),
    "devices": ("", "0", "-1", "1.5", "many", "99", "9" * 30),
    "client_memory": ("", "disk", "host"),
    "data_dir": (),
}
WITH = {  # other settings, without which one means nothing
    "alpha": {"partition": "dirichlet"},
    "classes_per_client": {"partition": "pathological"},
    "test_split": {},
    "momentum": {"optimizer": "sgd"},
    "data_dir": {"dataset": "mnist"},
}


def flags(**given):
    return [f"--{name}={value}" for name, value in (BASE | given).items()]


def of_settings():
    for name, known in SETTINGS.items():
        for value in TEXTS[name] if name in TEXTS else WRONG[known.kind]:
            if known.kind is bool:
                yield [*flags(), f"--{name}={value}"]
            else:
                yield flags(**WITH.get(name, {}), **{name: value})


def of_hyperparameters():
    for algo, factory in ALGORITHMS.items():
        for name, known in hyperparameters.of(factory).items():
            for value in WRONG.get(known.kind, ("no such choice",))[:1]:
                yield [*flags(algo=algo), f"--hparam={name}={value}"]
            if known.kind in (int, float) and math.isfinite(known.low):
                yield [
                    *flags(algo=algo),
                    f"--hparam={name}={math.floor(known.low) - 1}",
                ]


@functools.cache
def arrays(kind):
    """The arrays of a data set or of a partition of 5 clients."""
    rng = np.random.default_rng(0)
    if kind == "dataset":
        return {
            "x": rng.random((60, 8), np.float32),
            "y": (np.arange(60) % 3).astype(np.int32),
        }
    sizes = {
        "train_sizes": np.full(5, 8, np.int32),
        "test_sizes": np.full(5, 4, np.int32),
    }
    return {
        "train": np.arange(40, dtype=np.int32),
        "test": np.arange(40, 60, dtype=np.int32),
        **sizes,
    }


ARRAYS = {  # what is done to one array
    "gone": lambda x: None,
    "short": lambda x: x[:-1],
    "empty": lambda x: x[:0],
    "a scalar": lambda x: x[0] if x.ndim == 1 else np.float32(1),
    "one more axis": lambda x: x[..., None] if x.ndim == 1 else x[:, 0],
    "text": lambda x: x.astype(str),
    "objects": lambda x: x.astype(object),
    "nan": lambda x: np.full(x.shape, np.nan),
    "complex": lambda x: x + 1j,
    "negative": lambda x: (
        np.where(np.arange(len(x)) == 1, -1, x.T).T.astype(x.dtype)
        if x.dtype.kind == "i"
        else None
    ),
    "huge": lambda x: (
        np.where(np.arange(len(x)) == 1, 2**31 - 1, x)
        if x.dtype.kind == "i"
        else x * np.inf
    ),
}
FILES = {  # what is done to the file
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "text": lambda content: b"hello\n",
    "the end gone": lambda content: content[:-1],
    "the beginning gone": lambda content: content[1:],
    "zeros": lambda content: bytes(len(content)),
    "a byte in the middle": lambda content: (
        content[:200] + bytes([content[200] ^ 255]) + content[201:]
    ),
}


def npz(kind, part, how):
    """A damaged file's content."""
    content, file = dict(arrays(kind)), io.BytesIO()
    if part != "file":
        content[part] = ARRAYS[how](content[part])
    np.savez(file, **{name: x for name, x in content.items() if x is not None})
    return FILES[how](file.getvalue()) if part == "file" else file.getvalue()


def of_files():
    for kind in ("dataset", "partition"):
        for part in (*arrays(kind), "file"):
            yield from (
                (kind, part, how) for how in (FILES if part == "file" else ARRAYS)
            )


OTHER = {  # other files of a user: the flag, and contents that cannot be
    "--model=file:{}": (
        b"",
        b"linear\n",
        b"linear\n" * 6,
        b"linear\n" * 4 + b"linearr\n",
        b"\xff\xfe",
    ),
    "--algo={}.py:f": (
        b"",
        b"f = 1\n",
        b"def f(:\n",
        b"import nowhere\n",
        b"f = open\n",
        b"raise KeyError('a\\nb')\n",
        b"def f(task): return None\n",
        b"def f(task): raise TypeError('x\\ny')\n",
        b"\xff\n",
        b"def f(): pass\n",
    ),
    "--hparam=tasks=file:{}": (
        b"",
        b"0 1",
        b"x " * 10,
        b"0.5 " * 10,
        b"\xff",
        b"-1 " * 10,
        b"99999999999999 " * 10,
    ),
}

COMMANDS = {  # one a line; a line may be empty
    sweep.run: """
        --algo=
        --algo=,
        --algo=fedavg,fedavgg
        --algo=fedavg --seed=x
        --algo=fedavg --seed=0,,1
        --algo=fedavg --seed=-1
        --algo=fedavg --seed=1,1
        --algo=fedavg --lr=x
        --algo=fedavg --lr=0
        --algo=fedavg --lr=0.1,x
        --algo=fedavg --seeds=0
        --algo=fedavg --seeds=2 --seed=4294967295
        --algo=ditto --hparam=lam=1,
        --algo=fedavg --select=
        --algo=fedavg --select=val/
        --algo=fedavg --select=val/acc
        --algo=fedavg --root=~nobody_here/x
        --algo=fedavg --nothing
        fedavg""",
    tables.main: """
        nowhere
        file
        folder
        ~nobody_here/x
        --targets=2 run
        --targets=x run
        --nothing run""",
    within.main: """
        nowhere
        --tasks=class
        --tasks=class nowhere
        --tasks=class file
        --tasks=class folder
        --tasks=x nowhere
        --nothing""",
    export.main: """
        nowhere --client=0
        file --client=0
        folder --client=0
        folder
        --client=0
        --client=x folder
        --nothing folder""",
    figures.main: """
        nowhere
        file
        folder
        ~nobody_here/x
        --nothing""",
    html.main: """
        nowhere
        file
        folder
        --output=page.html nowhere
        --output=page.html
        --nothing run""",
    show.main: """
        nowhere
        file
        folder
        ~nobody_here/x
        --nothing
        run nowhere""",
    main.run: """
        fedavg
        --algo
        -x
        --=1
        --describe=
        --describe=x
        --nodrop_last=1
        --resume
        --resume --workdir=folder
        --resume --workdir=file
        --resume --workdir=nowhere
        --algo=fedavg --nothing=1
        --algo=fedavg --hparam
        --algo=fedavg --hparam=mu=1
        --algo=ditto --hparam=lam
        --algo=ditto --hparam==1
        --algo=ditto --hparam=LAM=1
        --algo=fedavg --steps=1 --epochs=1
        --algo=fedavg --workdir=file
        --algo=fedavg --workdir=file/run
        --algo=fedavg --workdir=full
        --algo=fedavg --workdir=~nobody_here/x
        --algo=fedavg --num_processes=2
        --algo=fedavg --process_id=1
        --algo=fedavg --process_id=x
        --algo=fedavg --coordinator=x
        --algo=fedavg --coordinator=x --num_processes=2 --process_id=2
        --algo=fedavg --coordinator=x --num_processes=0 --process_id=0""",
}


class Accepted(Exception):
    """A command went on to compile."""


def tree(path):
    """All that lies there, but what Python compiled of a file that it imported."""
    found = (p for p in path.rglob("*") if "__pycache__" not in p.parts)
    return {p.relative_to(path): p.read_bytes() if p.is_file() else None for p in found}


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Runs a command, which must be refused."""

    def accepted(*_, **__):
        raise Accepted

    monkeypatch.setattr(train, "compiled", accepted)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("hello")
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("hello")

    def run(words, command=main.run):
        before = tree(tmp_path)
        capsys.readouterr()

        def printed():
            said = command(words)
            return said if isinstance(said, int) else 0

        code, (out, said) = entry.guarded(printed), capsys.readouterr()
        assert code == entry.BAD_INPUT and "Traceback" not in out, (code, said, out)
        assert said.count("\n") == 1 and "Traceback" not in said and len(said) < 1500, (
            said
        )
        assert tree(tmp_path) == before

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [*of_settings(), *of_hyperparameters()], ids=lambda c: " ".join(c[-2:])
)
def test_a_bad_setting(command, check):
    check(command)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part", "how"), [*of_files()])
def test_a_damaged_npz(kind, part, how, tmp_path, check):
    (tmp_path / "damaged.npz").write_bytes(npz(kind, part, how))
    np.savez(tmp_path / "whole.npz", **arrays("dataset"))
    given = {"dataset": "npz:damaged.npz"}
    if kind == "partition":
        given = {"dataset": "npz:whole.npz", "partition": "file:damaged.npz"}
    words = [
        word
        for word in flags(**given)
        if not word.startswith(("--clients", "--data_fraction"))
    ]
    check(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "content"), [(flag, content) for flag in OTHER for content in OTHER[flag]]
)
def test_a_file_of_a_user_that_cannot_be(flag, content, tmp_path, check):
    (tmp_path / ("own.py" if ".py" in flag else "own")).write_bytes(content)
    check([*flags(algo="pfedc" if "tasks" in flag else "fedavg"), flag.format("own")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [(f, words) for f in COMMANDS for words in COMMANDS[f].splitlines()],
)
def test_a_bad_command(command, words, check):
    check(words.split(), command)
