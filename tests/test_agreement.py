"""PFLlib and HtFLlib beside a run: they are given the run's clients, weights and
settings, which stand-ins show."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import agreement
from fedjax_pfl import keys
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import results, sweep

pytest.importorskip("torch", reason="PyTorch is not installed: PFLlib needs it")

SERVER = """
import json
import numpy as np
import torch


class FedPer:
    def __init__(self, args, times):
        self.args, self.rs_test_acc = args, []

    def train(self):
        right, rows = 0, 0
        for client in range(self.args.num_clients):
            with open(f"../dataset/{self.args.dataset}/test/{client}.npz", "rb") as file:
                data = np.load(file, allow_pickle=True)["data"].tolist()
            logits = self.args.model.head(self.args.model.base(torch.Tensor(data["x"])))
            right += (logits.argmax(1).numpy() == data["y"]).sum()
            rows += len(data["y"])
        names = ("num_classes", "batch_size", "local_learning_rate", "global_rounds", "local_epochs", "eval_gap")
        with open("args.json", "w") as file:
            json.dump({name: getattr(self.args, name) for name in names}, file)
        self.rs_test_acc = [right / rows] * 2
        self.save_results()
"""
FLAGS = [
    "--algo=fedper",
    "--model=mlp",
    "--clients=8",
    "--rounds=1",
    "--epochs=1",
    "--drop_last",
]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    assert sweep.run([*FLAGS, f"--workdir={folder / 'run'}"]) == 0
    servers = folder / "PFLlib" / "system" / "flcore" / "servers"
    servers.mkdir(parents=True)
    (servers / "serverper.py").write_text(SERVER)
    (folder / "work").mkdir()
    return agreement.Case(
        str(folder / "run"), str(folder / "PFLlib"), str(folder / "work")
    )


def test_pfllib_begins_where_the_run_began_and_is_given_its_settings(case, monkeypatch):
    monkeypatch.chdir(case.folder)  # from where it goes on, and comes back
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = agreement.theirs(case)
    run = results.load(case.run)
    np.testing.assert_allclose(found, run.metrics["pre/acc/micro"].iloc[0], rtol=1e-6)
    with open(f"{case.folder}/system/args.json") as file:
        assert json.load(file) == {
            "num_classes": 10,
            "batch_size": 10,
            "local_learning_rate": 0.1,
            "global_rounds": 1,
            "local_epochs": 1,
            "eval_gap": 1,
        }
    header, start, end = agreement.rows(run, found)
    assert (
        header[1:3] == ("ours", "PFLlib") and start[0] == "0" and float(start[3]) == 0
    )
    assert end[1] == f"{100 * run.metrics['pre/acc/micro'].iloc[-1]:.2f}"


MIXED_NETS = """
from torch import nn


class BaseHeadSplit(nn.Module):
    def __init__(self, args, cid=0, feature_dim=None, is_global=False):
        super().__init__()
        self.base = eval(args.global_model if is_global else args.models[cid])
        self.base.fc = nn.Identity()
        self.head = nn.Linear(args.feature_dim, args.num_classes)
"""
MIXED_SERVER = """
import numpy as np
import torch
from flcore.clients import clientbase
from flcore.trainmodel.models import BaseHeadSplit


class FML:
    def __init__(self, args, times):
        self.args, self.rs_test_acc = args, []

    def accuracy(self, model):
        right, rows = 0, 0
        for client in range(self.args.num_clients):
            with open(f"../dataset/{self.args.dataset}/test/{client}.npz", "rb") as file:
                data = np.load(file, allow_pickle=True)["data"].tolist()
            net = model(client)
            right += (net.head(net.base(torch.Tensor(data["x"]))).argmax(1).numpy() == data["y"]).sum()
            rows += len(data["y"])
        return right / rows

    def train(self):
        names = ("alpha", "beta", "batch_size", "local_learning_rate", "global_rounds", "local_epochs", "eval_gap")
        given = [getattr(self.args, name) for name in names]
        own = self.accuracy(lambda client: BaseHeadSplit(self.args, client))
        small = BaseHeadSplit(self.args, is_global=True)
        shared = float(small.head(small.base(torch.ones(1, 3, 32, 32))).detach().sum())
        loader = lambda last: clientbase.DataLoader(range(50), 50, drop_last=last, shuffle=False)
        order = lambda last: [int(x) for x in loader(last).sampler]
        self.rs_test_acc = [own, shared, *given, order(True) != order(False), order(False) == list(range(50))]
        self.save_results()
"""
MIXED = [
    "--algo=fml",
    "--model=cnn2,cnn5",
    "--partition=iid",
    "--clients=4",
    "--epochs=5",
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    np.savez(
        folder / "images.npz",
        x=rng.integers(0, 256, (120, 32, 32, 3), np.uint8),
        y=np.arange(120) % 10,
    )
    flags = [
        "--hparam=alpha=0.25",
        "--lr=0.05",
        "--batch_size=7",
        "--rounds=0",
        f"--workdir={folder / 'run'}",
    ]
    flags.append(f"--dataset=npz:{folder / 'images.npz'}")
    assert sweep.run([*MIXED, *flags]) == 0
    system = folder / "HtFLlib" / "system" / "flcore"
    texts = {
        "servers/serverfml": MIXED_SERVER,
        "trainmodel/models": MIXED_NETS,
        "servers/serverproto": "",
    }
    for name, text in (
        texts | {"clients/clientbase": "from torch.utils.data import DataLoader"}
    ).items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / f"{name}.py").write_text(text)
    (folder / "work").mkdir()
    return agreement.Case(
        str(folder / "run"),
        str(folder / "HtFLlib"),
        str(folder / "work"),
        shuffled=True,
    )


def test_htfllib_begins_where_the_run_began_and_is_given_its_settings(
    mixed, monkeypatch
):
    monkeypatch.chdir(mixed.folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flcore"]:
        monkeypatch.delitem(sys.modules, name)
    run = results.load(mixed.run)
    agreement.check(run, mixed=True)
    own, shared, *given, shuffled, tested_in_order = agreement.theirs_mixed(mixed)
    assert shuffled and tested_in_order
    np.testing.assert_allclose(own, run.metrics["pre/acc/micro"].iloc[0], rtol=1e-6)
    small, key = (
        run.experiment.task.shared,
        keys.fold(run.experiment.key, keys.Run.INIT),
    )
    np.testing.assert_allclose(
        shared,
        small.apply(small.init(key), np.ones((1, 32, 32, 3), "float32"))[0].sum(),
        1e-5,
    )
    assert given == [0.25, 0.5, 7, 0.05, 0, 5, 1]


def changed(run, **settings):
    """Returns a run of other settings, for `check`."""
    e = run.experiment
    networks = [settings.get("model", "mlp")]
    config = e.config.replace(**settings)
    made = {"config": config, "dataset": e.dataset, "networks": networks}
    return SimpleNamespace(experiment=SimpleNamespace(**made))


def test_what_cannot_be_compared_is_one_sentence(case):
    run = results.load(case.run)
    with pytest.raises(
        InputError, match="has the network mlp: it must be one of cnn1, cnn2"
    ):
        agreement.check(changed(run, algo="local"), mixed=True)
    for change, said in (
        (
            {"algo": "pfedc"},
            "--run has the method pfedc: it must be one of local, fedavg",
        ),
        ({"model": "resnet18"}, "--run has the network resnet18"),
        ({"momentum": 0.9}, "--run has momentum=0.9: for a comparison it must be 0.0"),
        ({"epochs": None}, "--run has local work by --steps"),
    ):
        with pytest.raises(InputError) as error:
            agreement.check(changed(run, **change))
        assert said in str(error.value)
    agreement.check(run)
