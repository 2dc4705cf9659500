"""Tests of the user's own networks, data sets and partitions, by the name of their
file."""

import pytest

from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment.build import build, room
from fedjax_pfl.experiment.config import Config

MODEL = '''
from fedjax_pfl.models import nets

def net(input_shape, num_classes, *, rngs):
    """Softmax regression by another name."""
    return nets.linear(input_shape, num_classes, rngs)
'''


def test_a_module_is_as_good_as_a_file_and_has_a_hash(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "other.py").write_text("data = 1")
    (tmp_path / "mine_of_one.py").write_text(MODEL)
    assert (
        user_code.load("model", "mine_of_one:net").__doc__
        == "Softmax regression by another name."
    )
    assert (
        user_code.digest(["mine_of_one:net"])
        == user_code.digest([f"{tmp_path}/mine_of_one.py:net"])
        != user_code.digest([f"{tmp_path}/other.py:data"])
    )
    assert user_code.digest(["linear", "npz:x.npz"]) is None


def test_beside_a_file_pythons_own_library_is_meant(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit")
    (tmp_path / "part.py").write_text(
        "import random\n\n\ndef part():\n    return random.Random(0).random() < 1\n"
    )
    assert user_code.load("dataset", f"{tmp_path / 'part.py'}:part")()


HEAD = (
    "import numpy as np\nimport fedjax_pfl as pfl\nfrom flax import nnx\nfrom "
    "fedjax_pfl.data import partition\n"
)
MISTAKES = {  # kind, function (or the file's name): what is said
    ("model", "nowhere.py:f"): r"fails \(FileNotFoundError",
    (
        "model",
        "no_such_module:f",
    ): r"fails \(ModuleNotFoundError: No module named 'no_such_module'",
    ("model", "g = 1"): "there is no function 'f'",
    ("model", "f = 1"): "there is no function 'f'",
    ("model", "def f(:"): r"fails \(SyntaxError",
    ("model", "raise SystemExit(0)"): "fails",
    (
        "model",
        "def f(shape): pass",
    ): r"arguments \(input_shape, num_classes, rngs\).*\(too many positional",
    (
        "model",
        "def f(s, c, rngs): 1 / 0",
    ): r"fails \(ZeroDivisionError: division by zero\)",
    ("model", "def f(s, c, rngs): return None"): "NoneType must be .* it has no `body`",
    (
        "model",
        "def f(s, c, rngs): return pfl.models.nets.Net(nnx.Linear(8, 3, rngs=rngs), "
        "nnx.Linear(4, c, rngs=rngs))",
    ): (r"model=.*f fails \(TypeError: dot_general"),
    (
        "model",
        "from fedjax_pfl.models import nets\ndef f(s, c, rngs): return nets.linear(s, "
        "c + 1, rngs)",
    ): (r"model=.*must return logits \[2, 10\] for a batch of 2 of digits"),
    (
        "dataset",
        "def f(path): pass",
    ): r"arguments \(\) or \(seed\) \(missing a required argument: 'path'\)",
    ("dataset", "def f(): raise KeyError('x')"): r"fails \(KeyError: 'x'\)",
    ("dataset", "def f(): return 1, 2"): r"x must be \[examples, ...\] and not empty",
    ("dataset", "def f(): return pfl.load('digitts')"): "Unknown data set 'digitts'",
    (
        "dataset",
        "def f(): d = pfl.load('digits'); return d._replace(prepare=None)",
    ): r"fails \(TypeError",
    (
        "dataset",
        "def f(): d = pfl.load('digits'); return d._replace(y=d.y[1:])",
    ): "y must be 1797 integer labels",
    (
        "dataset",
        "def f(): d = pfl.load('digits'); return d._replace(num_classes=9)",
    ): r"labels must be below num_classes=9, got 9",
    (
        "dataset",
        "def f(): d = pfl.load('digits'); return d._replace(x=d.x * np.nan)",
    ): "x must be finite",
    (
        "dataset",
        "def f(): d = pfl.load('digits'); return d._replace(prepare=lambda x: x[0])",
    ): "must keep the first axis",
    ("partition", "def f(): pass"): r"arguments \(dataset, num_clients, seed\)",
    (
        "partition",
        "def f(d, n, seed): return [1, 2]",
    ): "must be a Partition, as .*, got list",
    (
        "partition",
        "def f(d, n, seed): return partition.of_clients([[0], [1]], [[2], [3]])",
    ): ("`clients` must be 2, as in partition=.*, got 5"),
    (
        "partition",
        "def f(d, n, seed): return partition.of_clients([[0]] * n, [[1]] * n)",
    ): "train must hold every row once",
    (
        "partition",
        "def f(d, n, seed): return partition.of_clients([[i] for i in range(n)], "
        "[[0.5]] * n)",
    ): ("test` must have a list of row numbers"),
    (
        "partition",
        "def f(d, n, seed): return partition.of_clients([[i] for i in range(n)], "
        "[[9999]] * n)",
    ): ("test must hold rows of the data set, 0..1796, got 9999"),
}


@pytest.mark.parametrize(("kind", "code"), MISTAKES)
def test_a_mistake_is_one_sentence(kind, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = code if code.endswith(":f") else f"{tmp_path}/own.py:f"
    (tmp_path / "own.py").write_text(f"{HEAD}{code}\n")
    given = {"algo": "fedavg", "clients": 5, "model": "linear", kind: name}
    with pytest.raises(InputError, match=MISTAKES[kind, code]) as found:
        build(Config(**given))
    assert name.rpartition(":")[0] in str(found.value) and "\n" not in str(found.value)


@pytest.mark.slow
def test_a_seed_that_a_data_set_takes_is_the_runs(tmp_path):
    (tmp_path / "own.py").write_text(
        "import fedjax_pfl as pfl\ndef f(*, seed): return "
        "pfl.data.sources.toys.synthetic(seed=seed)"
    )
    config = Config(algo="fedavg", dataset=f"{tmp_path}/own.py:f", model="linear")
    one, same, other = (
        build(config.replace(seed=seed)).dataset.x for seed in (1, 1, 2)
    )
    assert (one == same).all() and (one != other).any()
    assert room([config, config.replace(seed=1)])
