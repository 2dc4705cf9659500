import json

import jax
import numpy as np
import pandas as pd
import pytest

from fedjax_pfl import averaging
from fedjax_pfl.data.preparation import Preparation
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import clients
from fedjax_pfl.experiment.build import architectures, build, digests, optimizer, room
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.run_directory import RunDirectory

SMALL = {
    "algo": "fedavg",
    "clients": 6,
    "data_fraction": 0.2,
    "model": "linear",
    "width": "1",
    "devices": "1",
}


def make(**settings):
    return build(Config(**(SMALL | settings)))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"dp": "example", "dp_epsilon": 2.0}, "needs --dp_noise in place"),
        ({"dp": "client", "dp_noise": 1.0, "dp_epsilon": 1.0}, "got both"),
        ({"dp_clip": 2.0, "dp_noise": 1.0}, "--dp_noise needs --dp"),
        ({"momentum": 2.0}, "momentum"),
    ],
)
def test_settings_that_are_not_resolved_are_checked(given, message):
    with pytest.raises(InputError, match=message):
        build(Config(algo="fedavg", **given))


def test_an_experiment_is_complete():
    e = make(algo="ditto", model="auto", clients=4, partition="iid")
    assert e.config.model.name == "mlp" and e.config.hparams["lam"] == 1.0
    assert e.headline == ("acc", "max") and e.networks.tolist() == ["mlp"] * 4
    assert e.task.num_clients == len(e.partition.train) == 4
    assert e.examples["used"] < e.examples["available"] == e.examples["of"] == 1797
    assert jax.random.key_data(e.key).tolist() == [0, 0]


def test_unseen_clients_do_not_train():
    e = make(unseen=0.3)
    assert len(e.unseen.ids) == 2 and e.task.num_clients == 4
    assert len(e.everybody.train) == 6
    seen = np.delete(np.arange(6), e.unseen.ids)
    sizes = e.everybody.train_sizes
    assert (e.partition.train_sizes == sizes[seen]).all()
    assert (e.unseen.partition.train_sizes == sizes[e.unseen.ids]).all()
    with pytest.raises(InputError, match="leaves no client"):
        make(unseen=0.95)


def test_each_network_has_unseen_clients():
    e = make(algo="local", model="linear,mlp", unseen=0.3)
    assert sorted(e.networks.tolist()) == ["linear"] * 2 + ["mlp"] * 2
    assert len(e.unseen.ids) == 2


def test_networks_of_the_clients(tmp_path):
    names, of = architectures("cnn,lenet", 4)
    assert names == ["cnn", "lenet"] and of.tolist() == [0, 1, 0, 1]
    assert architectures("blocks:cnn,lenet", 4)[1].tolist() == [0, 0, 1, 1]
    file = tmp_path / "networks.txt"
    file.write_text("mlp cnn cnn mlp")
    names, of = architectures(f"file:{file}", 4)
    assert names == ["mlp", "cnn"] and of.tolist() == [0, 1, 1, 0]
    with pytest.raises(InputError, match="3 names, 2 clients"):
        architectures("a,b,c", 2)


def test_parts_of_the_users_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from fedjax_pfl import ALGORITHMS, load, partition\n"
        "def method(task, *, rate: float = 1.0):\n"
        "    return ALGORITHMS['fedavg'](task)\n"
        "def data(seed):\n"
        "    return load('digits')\n"
        "def split(dataset, num_clients, seed):\n"
        "    return partition(dataset, 'iid', num_clients=num_clients, seed=seed)\n"
    )
    own = {"algo": f"{file}:method", "dataset": f"{file}:data"}
    e = make(**own, partition=f"{file}:split", clients=3)
    assert e.config.hparams == {"rate": 1.0} and e.task.num_clients == 3
    before = digests(e)
    file.write_text(file.read_text() + "# changed\n")
    after = digests(e)
    assert {name for name in before if before[name] != after[name]} == {"code"}


def test_public_examples(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import fedjax_pfl\ndef pool(seed): return fedjax_pfl.load('digits')\n"
    )
    e = make(algo="fedmd", public=f"{file}:pool:7")
    assert e.public.x.shape == (7, *e.dataset.x.shape[1:])
    assert len(e.federation.public.y) == e.task.public.shape[0] == 7


def test_public_examples_of_the_clients_own_data_set_belong_to_no_client():
    e = make(algo="fedmd", public="digits:7")
    whole = make(algo="fedmd", public="synthetic:7").dataset
    assert len(e.public.y) == 7 and len(e.dataset.y) == len(whole.y) - 7
    both = np.concatenate([e.dataset.x, e.public.x]).reshape(len(whole.y), -1)
    assert sorted(map(bytes, both)) == sorted(map(bytes, whole.x.reshape(both.shape)))
    with pytest.raises(InputError, match="is the data set of the clients"):
        make(public="digits")


def test_runs_with_the_same_room_have_the_same_shapes():
    configs = [Config(**SMALL | {"partition": "iid", "seed": seed}) for seed in (0, 1)]
    rows = room(configs)
    made = [build(config, rows) for config in configs]
    shapes = [jax.tree.map(np.shape, e.federation.train) for e in made]
    assert shapes[0] == shapes[1]
    assert made[0].dataset.x.shape == made[1].dataset.x.shape


def test_optimizers_clip_then_decay():
    w, g = {"a": jax.numpy.ones(4)}, {"a": 3 * jax.numpy.ones(4)}
    rule = optimizer("sgd", decay=0.5, clip=1.0)(0.1)
    step = rule.update(g, rule.init(w), w)[0]["a"]
    np.testing.assert_allclose(step, -0.1 * (3 / 6 + 0.5), rtol=1e-6)
    for name in ("adam", "adamw"):
        rule = optimizer(name, decay=0.5)(0.1)
        assert np.isfinite(rule.update(g, rule.init(w), w)[0]["a"]).all()


def test_a_client_predicts_from_a_fetched_state():
    e = make()
    state = e.fetch(e.program.init(e.key, e.program.traced))
    predict = e.predictor(state, 0, 2)
    assert predict(e.dataset.x[:3]).shape == (3, 10)


def test_unusual_own_data_are_warned_of(tmp_path, caplog):
    x = np.random.default_rng(0).integers(0, 256, (60, 4, 4, 1))
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 3)
    given = {"algo": "fedavg", "clients": 3, "partition": "iid"}
    build(Config(dataset=f"npz:{tmp_path}/own.npz", **given))
    assert "integers are taken as plain numbers" in caplog.text
    caplog.clear()
    build(Config(dataset="synthetic", **given))
    assert not caplog.text


def test_a_predictor_has_the_precision_of_the_run(monkeypatch):
    e, seen, logits = make(matmul_precision="float32"), [], averaging.logits

    def noted(*given):
        seen.append(jax.config.jax_default_matmul_precision)
        return logits(*given)

    monkeypatch.setattr(averaging, "logits", noted)
    state = e.fetch(e.program.init(e.key, e.program.traced))
    e.predictor(state, 0, 2)(e.dataset.x[:3])
    assert seen == ["float32"]


def test_the_vocabulary_is_that_of_the_clients_that_train(tmp_path):
    speech = {
        name: f"{name} {name} only {name} " * 4 for name in ("ada", "bob", "cyd", "eve")
    }
    path = tmp_path / "plays.json"
    path.write_text(json.dumps(speech))
    settings = {"dataset": f"text:{path}", "data_fraction": 1.0, "max_length": 4}
    settings |= {"partition": "natural:speaker", "clients": None, "tokenizer": "word"}
    e = make(**settings, model="auto", unseen=0.3)
    away = {sorted(speech)[i] for i in e.unseen.ids}
    assert len(away) == 1 and e.config.clients == 4 and e.config.model.name == "gru"
    assert set(e.dataset.words) == {"<pad>", "<unk>", "only", *speech} - away
    assert e.task.num_classes == e.dataset.vocabulary == 6
    rows = e.unseen.partition.test[0][: e.unseen.partition.test_sizes[0]]
    assert (e.dataset.x[rows] == 1).any()
    assert (e.unmarked.x != e.dataset.x).any()
    directory = RunDirectory(tmp_path / "run")
    directory.open(e)
    assert Preparation.from_json(directory.read("preparation.json")) == e.preparation
    assert e.preparation.words == e.dataset.words


def test_shifts_and_augmentation_are_settings():
    e = make(shift="rotate:0,90", augment="flip", partition="iid", clients=2)
    mine = [e.partition.train[i][: e.partition.train_sizes[i]] for i in range(2)]
    assert np.array_equal(e.dataset.x[mine[0]], e.unmarked.x[mine[0]])
    turned = np.rot90(e.unmarked.x[mine[1]], axes=(1, 2))
    assert np.array_equal(e.dataset.x[mine[1]], turned)
    assert e.task.augment is not None


def sites(path, rows=60):
    """Writes a table of four sites, with a gap and a category."""
    rng = np.random.default_rng(0)
    lines = ["site,age,kind,label"]
    for i in range(rows):
        age = "" if i == 7 else f"{rng.normal(50 + 10 * (i % 4), 5):.2f}"
        lines.append(f"{i % 4},{age},{'abc'[i % 3]},{i // 4 % 2}")
    path.write_text("\n".join(lines))
    return f"table:{path}"


TABLE = {"partition": "natural:site", "clients": None, "model": "linear"}


def test_tables_are_prepared_by_the_clients_that_train(tmp_path):
    made = {"dataset": sites(tmp_path / "sites.csv"), "data_fraction": 1.0} | TABLE
    e = make(**made, missing="indicator", categories="onehot", unseen=0.3)
    (away,) = e.unseen.ids
    rows = np.concatenate(
        [x[:n] for x, n in zip(e.partition.train, e.partition.train_sizes, strict=True)]
    )
    frame = pd.read_csv(tmp_path / "sites.csv")
    assert away not in set(frame.site[rows])
    age = frame.age[rows]
    filled = age.fillna(age.mean())
    column, kind = e.preparation.columns
    np.testing.assert_allclose(column.mean, filled.mean())
    np.testing.assert_allclose(column.scale, filled.std(ddof=0))
    assert kind.categories == ("a", "b", "c")
    found = e.preparation.inputs(frame)
    np.testing.assert_allclose(found, e.dataset.x, rtol=1e-6)
    assert found.shape == (60, 1 + age.isna().any() + 3)
    directory = RunDirectory(tmp_path / "run")
    directory.open(e)
    kept = directory.read("preparation.json")
    assert Preparation.from_json(kept) == e.preparation


def test_private_runs_prepare_tables_by_public_rows(tmp_path, caplog):
    made = {"dataset": sites(tmp_path / "sites.csv"), "data_fraction": 1.0} | TABLE
    made |= {"missing": "mean", "dp": "client", "dp_noise": 1.0}
    with pytest.raises(InputError, match="excludes means and deviations of clients'"):
        make(**made)
    plain = make(**made, prepare="none")
    frame = pd.read_csv(tmp_path / "sites.csv")
    np.testing.assert_allclose(plain.dataset.x[:, 0], frame.age.fillna(0), rtol=1e-6)
    public = tmp_path / "public.csv"
    public.write_text("age,label\n0,0\n4,1\n")
    e = make(**made, prepare=str(public))
    wanted = (frame.age.fillna(2) - 2) / 2
    np.testing.assert_allclose(e.dataset.x[:, 0], wanted, rtol=1e-6)
    assert e.preparation.source == str(public)
    public.write_text("age,height,label\n0,1,0\n4,1,1\n")
    make(**made, prepare=str(public))
    assert "has no input height of --prepare" in caplog.text
    public.write_text("ages,label\n0,0\n4,1\n")
    with pytest.raises(InputError, match="must have the input age"):
        make(**made, prepare=str(public))


def test_private_runs_of_texts_need_a_public_vocabulary(tmp_path):
    rows = [f"word{i} good,{i % 2}" for i in range(40)]
    path, public = tmp_path / "a.csv", tmp_path / "b.csv"
    path.write_text("\n".join(["text,label", *rows]))
    public.write_text("text,label\nword1 fine,0\n")
    made = {"dataset": f"text:{path}", "data_fraction": 1.0, "partition": "iid"}
    made |= {"clients": 2, "model": "fasttext", "dp": "client", "dp_noise": 1.0}
    with pytest.raises(InputError, match="excludes a vocabulary of clients' rows"):
        make(**made)
    with pytest.raises(InputError, match=r"needs --tokenizer=FILE\.json"):
        make(**made, prepare="none")
    e = make(**made, prepare=str(public))
    assert e.dataset.words == ("<pad>", "<unk>", "word1", "fine")
    assert e.dataset.x[1].tolist() == [2, 1]
    with pytest.raises(InputError, match="--prepare has no effect on digits"):
        make(prepare="none")


def test_clients_have_the_names_of_their_column(tmp_path):
    made = {"dataset": sites(tmp_path / "sites.csv"), "data_fraction": 1.0} | TABLE
    e = make(**made, missing="mean", unseen=0.3)
    frame = pd.read_csv(tmp_path / "sites.csv")
    for rows, names in ((e.partition, e.names), (e.unseen.partition, e.unseen.names)):
        assert [str(frame.site[rows.train[i, 0]]) for i in range(len(names))] == [
            *names
        ]
    assert sorted(e.names + e.unseen.names) == ["0", "1", "2", "3"]
    directory = RunDirectory(tmp_path / "run")
    directory.open(e)
    recorded = directory.read("partition.json")
    assert recorded["clients"] == [*e.names]
    assert recorded["unseen_clients"] == [*e.unseen.names]
    several = make(**made | {"clients": 6}, missing="mean").names
    assert several == ("0/0", "1/0", "2", "3", "0/1", "1/1")
    assert make().names == ("0", "1", "2", "3", "4", "5")


def test_clients_are_held_out_by_name(tmp_path):
    made = {"dataset": sites(tmp_path / "sites.csv"), "data_fraction": 1.0} | TABLE
    e = make(**made, missing="mean", unseen="names:3,1")
    assert (e.names, e.unseen.names) == (("0", "2"), ("1", "3"))
    age = pd.read_csv(tmp_path / "sites.csv").age
    rows = np.concatenate([x[:n] for x, n in zip(*e.partition[:2], strict=True)])
    np.testing.assert_allclose(e.preparation.columns[0].mean, age[rows].mean())
    for names, words in (
        ("9", "Unknown client '9'"),
        ("0,1,2,3", "no client to train"),
    ):
        with pytest.raises(InputError, match=words):
            make(**made, missing="mean", unseen=f"names:{names}")
    assert make(unseen="names:2").unseen.ids.tolist() == [2]
    assert Config(unseen=0.0) == Config() and Config(unseen=0.50).unseen == "0.5"


def test_a_client_is_named_or_numbered():
    names = ("H03", "2", "H01")
    known = ("H03", 0), ("2", 1), (2, 2), ("#2", 2), (np.int64(1), 1)
    for client, wanted in known:
        assert clients.index(names, client) == wanted
    for client, words in (
        ("H3", "did you mean 'H03'"),
        ("1", "Unknown client '1'"),
        ("#3", r"must be in \[0, 2\]"),
        (-1, r"must be in \[0, 2\]"),
        ("#x", "Unknown client '#x'"),
    ):
        with pytest.raises(InputError, match=words):
            clients.index(names, client)
