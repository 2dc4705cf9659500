"""Parts of a user's own: a network, a data set and a partition, named on the command
line by their file."""

import json

import pytest
import toy

from experiments import build, describe, entry, main, runs, settings
from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError

MODEL = '''
from fedjax_pfl.models import nets

def net(input_shape, num_classes, *, rngs):
    """Softmax regression by another name."""
    return nets.linear(input_shape, num_classes, rngs)
'''
DATA = '''
import fedjax_pfl as pfl

def data(seed):
    """The digits by another name."""
    return pfl.load("digits")
'''
SPLIT = '''
from fedjax_pfl.data import partitioners

def split(dataset, num_clients, seed):
    """Equal random parts by another name."""
    return partitioners.partition(dataset, "iid", num_clients=num_clients, seed=seed)
'''
FILES = {"model": MODEL, "dataset": DATA, "partition": SPLIT}
OWN = {
    "model": "model.py:net",
    "dataset": "dataset.py:data",
    "partition": "partition.py:split",
}
PLAIN = {
    "model": "linear",
    "dataset": "digits",
    "partition": "iid",
    "val_fraction": "0",
    "test_split": "pool",
}
TINY = [
    "--preset=digits",
    "--data_fraction=0.2",
    "--clients=5",
    "--epochs=1",
    "--width=1",
    "--devices=1",
]


def command(parts, path, *more):
    return [
        "--algo=fedavg",
        *TINY,
        *(f"--{k}={v}" for k, v in parts.items()),
        "--rounds=1",
        f"--workdir={path}",
        *more,
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("own")
    for kind, content in FILES.items():
        (path / f"{kind}.py").write_text(content)
    return path


@pytest.fixture(scope="module")
def done(folder):
    """A run of all three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main.run(command(OWN, folder / "run")) == 0
    return folder / "run"


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def test_it_is_the_run_of_what_it_says(here, done):
    assert main.run(command(PLAIN, here / "plain")) == 0
    assert runs.read_rows(done / "metrics.jsonl") == runs.read_rows(
        here / "plain" / "metrics.jsonl"
    )
    config = json.loads((done / "config.json").read_text())
    assert {kind: config[kind] for kind in OWN} == OWN and config["alpha"] is None
    assert runs.load(done).experiment.task.models[0].num_features == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        toy.slow("model", "model"),
        ("dataset", "data set"),
        toy.slow("partition", "partition"),
    ],
)
def test_a_resume_refuses_a_changed_file(here, done, kind, what, capsys):
    (here / f"{kind}.py").write_text(FILES[kind] + "# changed\n")
    assert main.run(["--resume", "--rounds=2", f"--workdir={done}"]) == entry.BAD_INPUT
    assert (
        f"The file of the {what} is not the one that {done} was started with"
        in capsys.readouterr().err
    )
    (here / f"{kind}.py").write_text(FILES[kind])


def test_a_module_is_as_good_as_a_file_and_has_a_hash(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    (here / "mine_of_one.py").write_text(MODEL)
    assert (
        user_code.load("model", "mine_of_one:net").__doc__
        == "Softmax regression by another name."
    )
    assert (
        user_code.digest(["mine_of_one:net"])
        == user_code.digest([f"{here}/mine_of_one.py:net"])
        != user_code.digest(["dataset.py:data"])
    )
    assert user_code.digest(["linear", "npz:x.npz"]) is None


def test_beside_a_file_pythons_own_library_is_meant(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit")
    (tmp_path / "part.py").write_text(
        "import random\n\n\ndef part():\n    return random.Random(0).random() < 1\n"
    )
    assert user_code.load("dataset", f"{tmp_path / 'part.py'}:part")()


def test_clients_of_several_networks_are_named_by_the_function():
    names = build.networks.names
    config = settings.resolve(
        {"algo": "fd", "model": "mlp,model.py:net", "hparams": {}}
    )
    assert names(config, 3).tolist() == ["mlp", "net", "mlp"]
    assert names(config.replace(model="a.py:net,b.py:net"), 2).tolist() == [
        "a.py:net",
        "b.py:net",
    ]
    # acc@net_std is none of a score
    with pytest.raises(InputError, match="give the function net_std another name"):
        names(config.replace(model="mlp,a.py:net_std"), 2)
    assert names(config.replace(model="a.py:net_std"), 1).tolist() == ["net_std"]


def test_describe_and_list_know_them(here, capsys):
    said = {kind: describe.describe(name) for kind, name in OWN.items()}
    assert (
        "Softmax regression" in said["model"]
        and "--model=model.py:net, called with (input_shape" in said["model"]
    )
    assert "Holds: 1,797 examples of uint8[8, 8, 1] in 10 classes" in said["dataset"]
    assert "--partition=partition.py:split" in said["partition"]
    assert main.run(["--list", "--model=mlp,model.py:net"]) == 0
    out = capsys.readouterr().out
    assert (
        "model.py:net       Softmax regression by another name\n" in out
        and "dataset.py" not in out
    )


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
    ): r"arguments \(input_shape, num_classes, rngs\) \(too many positional",
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
    ): "prepare` of .* fails on a batch",
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
    given = {
        "algo": "fedavg",
        "clients": 5,
        "model": "linear",
        kind: name,
        "hparams": {},
    }
    with pytest.raises(InputError, match=MISTAKES[kind, code]) as found:
        build.prepare(settings.resolve(given))
    assert name.rpartition(":")[0] in str(found.value) and "\n" not in str(found.value)
    if kind == "model":
        assert (
            main.run([f"--{k}={v}" for k, v in given.items() if k != "hparams"])
            == entry.BAD_INPUT
        )


def test_a_seed_that_a_data_set_takes_is_the_runs(tmp_path):
    (tmp_path / "own.py").write_text(
        "import fedjax_pfl as pfl\ndef f(*, seed): return "
        "pfl.data.datasets.synthetic(seed=seed)"
    )
    config = settings.resolve(
        {
            "algo": "fedavg",
            "dataset": f"{tmp_path}/own.py:f",
            "model": "linear",
            "hparams": {},
        }
    )
    one, same, other = (
        build.prepare(config.replace(seed=seed)).dataset.x for seed in (1, 1, 2)
    )
    assert (one == same).all() and (one != other).any()
    assert build.room([config, config.replace(seed=1)])


def test_what_the_settings_say_of_another_partition_means_nothing():
    user = {"algo": "fedavg", "partition": "split.py:f", "hparams": {}}
    with pytest.raises(
        InputError, match=r"--alpha means nothing with --partition=split.py:f"
    ):
        settings.resolve(user | {"alpha": 0.5})
    assert (
        settings.default_workdir(user, settings.resolve(user))
        == "runs/fedavg-digits-f-seed0"
    )


def test_a_hyperparameter_that_a_run_cannot_record_is_refused(tmp_path):
    (tmp_path / "own.py").write_text("def method(task, *, table=(1, 2)):\n    pass\n")
    with pytest.raises(
        InputError, match="hyperparameter table is tuple, which a run cannot record"
    ):
        settings.resolve({"algo": f"{tmp_path}/own.py:method", "hparams": {}})
