"""Tests of the benchmarks: both sides do the same work, which is counted."""

import types
from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from benchmarks import (
    feddva,
    htfllib,
    leaderboard,
    memory,
    mixed,
    peers,
    pytorch,
    recipes,
    report,
    scaling,
    setting,
)
from benchmarks.agreement import check
from benchmarks.stock import stock
from fedjax_pfl import hyperparameters, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data.federate import federate
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import presets
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.models import flops, model, num_parameters
from fedjax_pfl.models.nets import AFM
from fedjax_pfl.simulate import task

SMALL = recipes.RECIPES["pfllib_20"]._replace(clients=3, cohort=3, images=90)
SERVER = """
import time
import numpy as np
import torch


class Client:
    def __init__(self, args, id):
        self.args, self.id = args, id
        self.train_time_cost = {"num_rounds": 0, "total_cost": 0.0}
        self.train_samples = len(self.read()[1])

    def read(self):
        with open(f"../dataset/{self.args.dataset}/train/{self.id}.npz", "rb") as file:
            data = np.load(file, allow_pickle=True)["data"].tolist()
        return torch.Tensor(data["x"]), torch.Tensor(data["y"]).long()


class FedAvg:
    def __init__(self, args, times):
        self.args, self.Budget, self.evaluations = args, [], 0
        self.clients = [Client(args, id) for id in range(int(args.join_ratio * args.num_clients))]

    def train(self):
        sgd = torch.optim.SGD(self.args.model.parameters(), self.args.local_learning_rate)
        for t in range(self.args.global_rounds + 1):
            begin = time.time()
            if t % self.args.eval_gap == 0:
                self.evaluate()
            for client in self.clients:
                client.train_time_cost["num_rounds"] += 1
                client.train_time_cost["total_cost"] += 0.25
                for x, y in zip(*(part.split(self.args.batch_size) for part in client.read())):
                    if len(y) == self.args.batch_size:
                        loss = torch.nn.functional.cross_entropy(self.args.model(x), y)
                        sgd.zero_grad(), loss.backward(), sgd.step()
            self.Budget.append(time.time() - begin)
        assert self.evaluations == 1

    def evaluate(self):
        print("accuracy")
        self.evaluations += 1
"""
MODELS = """
from torch import nn


def FedAvgCNN(in_features=1, num_classes=10, dim=1024):
    one = nn.Conv2d(in_features, 32, 5), nn.ReLU(), nn.MaxPool2d(2)
    two = nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*one, *two, nn.Flatten(), nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, num_classes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", setting.SHAPES)
def test_the_plain_baselines_networks_have_our_parameters(name):
    stock_net = nnx.eval_shape(
        lambda: stock(name, setting.SHAPES[name], setting.CLASSES)
    )
    count = sum(x.size for x in jax.tree.leaves(nnx.state(stock_net, nnx.Param)))
    assert count == num_parameters(
        jax.eval_shape(setting.in_form(name, "auto").init, jax.random.key(0))
    )


@pytest.mark.parametrize("name", [*pytorch.NETS, "resnet18"])
def test_pytorchs_networks_have_our_parameters(name):
    pytest.importorskip("torch")
    shape = (28, 28, 1) if name in ("mlp28", "lenet") else (32, 32, 3)
    variables = jax.eval_shape(
        model(name.removesuffix("28"), shape, 10).init, jax.random.key(0)
    )
    net = pytorch._network(name, shape, 10)
    assert sum(x.numel() for x in net.parameters()) == num_parameters(variables)


def test_pfllib_reads_our_clients(tmp_path):
    peers.write(tmp_path, SMALL)
    data, owned = recipes.partitioned(SMALL)
    for part in ("train", "test"):
        index, sizes = getattr(owned, part), getattr(owned, f"{part}_sizes")
        for client in range(SMALL.clients):
            with open(
                tmp_path / "dataset" / "Cifar10" / part / f"{client}.npz", "rb"
            ) as file:
                found = np.load(file, allow_pickle=True)["data"].tolist()
            rows = index[client, : sizes[client]]
            x = np.asarray(data.prepare(data.x[rows]))
            np.testing.assert_allclose(found["x"], np.moveaxis(x, -1, 1), rtol=1e-6)
            assert found["x"].dtype == np.float32
            np.testing.assert_array_equal(found["y"], data.y[rows])


def test_pfllib_is_given_the_same_work(tmp_path):
    """A stand-in with PFLlib's interface, so far as it is used."""
    pytest.importorskip("torch")
    for name, text in {
        "servers/serveravg": SERVER,
        "trainmodel/models": MODELS,
    }.items():
        path = tmp_path / "PFLlib" / "system" / "flcore" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "run").mkdir()
    peers.write(tmp_path / "run", SMALL)
    case = peers.Case(
        SMALL,
        1,
        pytorch.check(str(tmp_path / "PFLlib"), "PFLlib"),
        str(tmp_path / "run"),
    )
    ((cost, count, training),) = report.fresh(peers.measure, [case])
    data, owned = recipes.partitioned(SMALL)
    net = model(SMALL.model, SMALL.shape, SMALL.classes)
    ours = task(
        data,
        federate(data, owned).class_counts,
        net,
        lr=0.1,
        batch_size=SMALL.batch,
        drop_last=True,
    )
    assert (cost.steps, cost.samples) == report.planned(ours)
    assert (
        cost.samples
        < report.planned(ours._replace(drop_last=False))[1]
        == sum(owned.train_sizes)
    )
    assert count == num_parameters(jax.eval_shape(net.init, jax.random.key(0)))
    assert (
        min(cost.start, cost.round, cost.evaluation, cost.peak) > 0
        and training == 0.25 * SMALL.clients
    )
    assert before == sorted(
        x for x in tmp_path.rglob("*") if tmp_path / "run" not in (x, *x.parents)
    )


def test_a_run_that_pfllib_cannot_repeat_is_refused():
    plain = Config(
        algo="per_fedavg",
        model="mlp",
        hparams={"alpha": None, "beta": None},
    )
    made = types.SimpleNamespace
    run = lambda **changes: made(
        experiment=made(config=plain.replace(**changes), networks=["mlp"])
    )
    check(run(participation="1.0"))
    for changes, said in (
        ({"participation": "0.5"}, "participation=0.5: for a comparison it must be 1."),
        (
            {"server_optimizer": "adam"},
            "server_optimizer=adam: for a comparison it must be None.",
        ),
        (
            {"compute_dtype": "bfloat16"},
            "compute_dtype=bfloat16: for a comparison it must be float32.",
        ),
        ({"features": 16}, "features=16"),
        ({"unseen": 0.5}, "unseen=0.5"),
        ({"hparams": plain.hparams | {"beta": 0.1}}, "hparam=beta=0.1"),
        (
            {"algo": "fedbabu", "hparams": {"fine_tune": "head"}},
            "hparam=fine_tune=head",
        ),
    ):
        with pytest.raises(InputError, match=f"--run has {said}"):
            check(run(**changes))


def held(megabytes):
    return np.ones(megabytes * 2**20, np.uint8).any() and report.process_peak() / 2**20


@pytest.mark.slow  # processes of its own
def test_the_peak_of_a_process_is_its_own():
    """Not that of the one that started it."""
    held(1500)
    small, large = report.fresh(held, [1, 500])
    assert small < 1000 and large > small + 400


@pytest.mark.slow  # two measurements
def test_memory_is_what_is_compiled():
    cost = memory.measure(memory.Case("ditto", model="mlp"))
    assert (
        cost.compiled > 2**16
        and memory.measure(memory.Case("ditto", 1, "host", "mlp")).compiled is None
    )
    assert min(cost.compile, cost.round) > 0 and cost.device is None
    # half of 20 clients with 99 or 100 examples
    assert (cost.steps, cost.samples) == (100, 993)
    assert cost.flops == 2 * flops("mlp", (8, 8, 1), 10, 10)  # of two models


@pytest.mark.slow
def test_the_work_of_a_round_is_counted():
    cost = scaling.measure(scaling.Case(20, cohort=20, rounds=1))
    sizes = scaling.partitioned(20).train_sizes
    assert (
        cost.samples == 2 * sizes.sum() and cost.steps == 2 * np.ceil(sizes / 10).sum()
    )
    rates = dict(
        zip(
            report.RATES,
            report.rates(cost.steps, cost.samples, 2.0, flops=4e9, peak=cost.steps),
            strict=True,
        )
    )
    assert rates == {
        "steps/s": cost.steps / 2,
        "samples/s": cost.samples / 2,
        "GFLOP/s": cost.steps * 2,
        "of peak": 2,
    }


@pytest.mark.slow
def test_the_operations_of_fedproto_and_fml():
    """A step forwards and backwards takes two products for each of 10 examples, eight
    steps 80; the pass after them one for each of 80. The norm that FML clips by takes
    one multiply-add for each of 64 x 10 weights and 10 biases."""
    found = mixed.operations(
        mixed.Setting(("linear",), (8, 8, 1), clients=2, each=80, public=20)
    )
    assert found == {
        "FedProto": pytest.approx(1 + 80 / 160),
        "FML": pytest.approx(1 + 650 / (20 * 640)),
    }


def test_htfllibs_networks_are_pfedafms():
    """With the head that HtFLlib puts behind 500 features in place of the last
    layer."""
    pytest.importorskip("torch")
    from torch import nn

    for name, sizes in AFM.items():
        net = htfllib.network(*sizes)
        net.fc = nn.AdaptiveAvgPool1d(htfllib.FEATURES)
        count = sum(x.numel() for x in net.parameters()) + 10 * (htfllib.FEATURES + 1)
        assert count == num_parameters(
            jax.eval_shape(model(name, (32, 32, 3), 10).init, jax.random.key(0))
        )
    assert (
        htfllib.options(htfllib.Case("fml", SMALL, 2)).models[-1] == "network(32, 500)"
    )


@pytest.mark.slow  # of a benchmark that takes long
def test_the_plain_autoencoder_is_feddvas_without_what_is_personal(monkeypatch):
    """Its encoder is FedDVA's of z, and a round moves encoder and decoder."""
    monkeypatch.setattr(feddva, "SHAPE", (8, 8, 1))
    task, federation = feddva.build(2, 6, epochs=1, batch=4)
    plain = simulate.program(partial(feddva.plain_vae, hidden=16), task)
    results = simulate.rounds(
        plain, jax.random.key(0), federation, rounds=2, state_every=1
    )
    # of one round, and of two
    start, after, _ = (jax.device_get(result.state.server) for result in results)
    own = jax.eval_shape(
        feddva.feddva(task, latent=feddva.LATENT, hidden=16).init, jax.random.key(0)
    ).server
    assert jax.tree.map(np.shape, start["encoder"]) == jax.tree.map(np.shape, own["z"])
    for part in ("encoder", "decoder"):
        assert sum(map(np.size, jax.tree.leaves(start[part]))) > 100
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), start[part], after[part])
        assert (
            np.all(np.isfinite(jax.tree.leaves(moved)))
            and max(jax.tree.leaves(moved)) > 1e-4
        )


def test_a_method_of_the_board_has_eight_trials():
    for algo in set(ALGORITHMS) - set(leaderboard.ABSENT):
        asked = []

        def score(one, asked=asked):
            asked.append(one)
            return -abs((one.lr or 0.1) - 0.1) - len(one.hparams)

        trials = leaderboard.search(algo, score)
        assert len({str(one) for one in asked}) == len(trials) == 8
        assert trials[0][0] == max(x[0] for x in trials)
        for _, _, one in trials:
            hyperparameters.check(ALGORITHMS[algo], one.hparams)


def test_values_with_which_a_seed_diverges_are_not_chosen():
    table = pd.DataFrame({"val": [50.0]}, index=[5])

    class Runs:
        def run(self, one, seed):
            return None if one.lr == 0.3 and seed == 3 else table * (1 + one.lr)

    one, found = leaderboard.chosen(Runs(), "fedbn")
    assert one.lr == 1.5 and len(found) == len(leaderboard.SEEDS)

    class Worse(Runs):
        def run(self, one, seed):
            return None if one.lr > 0.1 and seed == 3 else super().run(one, seed)

    assert leaderboard.chosen(Worse(), "ditto")[0].lr == 0.1

    class Never(Runs):
        def run(self, one, seed):
            return None

    with pytest.raises(InputError, match="diverges with all"):
        leaderboard.chosen(Never(), "ditto")


def test_a_run_of_the_board_ends_without_an_improvement():
    rows = [{"round": t, "val": min(t, 10)} for t in range(5, 45, 5)]
    ends = [leaderboard._ends(rows[: i + 1], 20) for i in range(len(rows))]
    assert ends.index(True) == 5  # after round 30, 20 after the best


def board(**gains):
    """Rows of a setting, relative to accuracies of Local and fine-tuned FedAvg."""
    base = np.array([80.0, 82.0, 81.0, 79.0, 80.0])
    rows = {name: base + gain for name, gain in gains.items()}
    rows |= {"local": base - 5, "fedavg_ft": base}
    return {
        name: {"lr": 0.1, "hparams": {}, "before": [*x], "after": [*(x - 1)]}
        for name, x in rows.items()
    }


def test_a_method_is_ahead_by_more_than_two_standard_errors_of_the_difference():
    noise = np.array([3.0, -2.0, 0.5, 2.0, -3.0])
    rows = board(good=1.0, noisy=1 + noise, worse=-1.0)
    assert leaderboard.ahead(rows | {"none": {"reason": "no"}}) == {"good"}


def test_ranks_of_the_board_are_over_settings_and_seeds(monkeypatch):
    rows = board(good=1.0, worse=-1.0)
    monkeypatch.setattr(leaderboard, "ALGORITHMS", rows)
    half = {"good": rows["good"]}
    complete = leaderboard.complete({"few": rows, "mild": half, "skewed": rows})
    assert list(complete) == ["skewed", "few"]
    found = leaderboard.ranks(complete)
    assert found.settings == 10
    assert found.means.to_dict() == {"good": 1, "fedavg_ft": 2, "worse": 3, "local": 4}


def test_a_row_of_the_board_runs_and_is_kept(monkeypatch, tmp_path):
    """FedAvg is trained with two rates and two seeds; its rounds count from the first
    evaluation on, and the best of each is kept with its values."""
    monkeypatch.setattr(leaderboard, "RATES", (0.1, 0.03))
    monkeypatch.setattr(leaderboard, "NEAR", ())
    monkeypatch.setattr(leaderboard, "SEEDS", (0, 1))
    monkeypatch.setattr(leaderboard, "BOARD", tmp_path / "board.json")
    monkeypatch.setattr(leaderboard.presets, "TUNED", tmp_path / "tuned.json")
    small = {"rounds": 4, "eval_every": 1, "clients": 4, "patience": 1}
    name = leaderboard.SETTINGS["rotated"]
    preset = leaderboard.presets.PRESETS[name]
    own = preset._replace(settings=preset.settings | small)
    monkeypatch.setitem(leaderboard.presets.PRESETS, name, own)
    row = leaderboard.row("rotated", "fedavg", None)
    assert row["lr"] in (0.1, 0.03) and len(row["after"]) == 2
    assert all(1 <= t <= 3 for t in row["rounds"])
    assert min(row["before"]) > 12 and 0 < row["MB to reach"][0] <= row["MB"][0]
    for path in (leaderboard.BOARD, leaderboard.presets.TUNED):
        path.write_text("{}")
    leaderboard.keep("rotated", "fedavg", row)
    leaderboard.keep("rotated", "feddva", {"reason": "no accuracy"})
    assert leaderboard.board() == {
        "rotated": {"fedavg": row, "feddva": {"reason": "no accuracy"}}
    }
    assert presets.tuned(name, "fedavg") == {"lr": row["lr"]}
    assert presets.tuned(name, "feddva") is None
