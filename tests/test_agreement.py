"""PFLlib beside a run: it is given the run's clients, weights and settings, which a stand-in shows."""

import json
import sys

import numpy as np
import pytest

from benchmarks import agreement
from experiments import main, runs
from fedjax_pfl.errors import InputError

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
FLAGS = ["--algo=fedper", "--model=mlp", "--clients=8", "--rounds=1", "--epochs=1", "--drop_last"]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    assert main.run([*FLAGS, f"--workdir={folder / 'run'}"]) == 0
    servers = folder / "PFLlib" / "system" / "flcore" / "servers"
    servers.mkdir(parents=True)
    (servers / "serverper.py").write_text(SERVER)
    (folder / "work").mkdir()
    return agreement.Case(str(folder / "run"), str(folder / "PFLlib"), str(folder / "work"))


def test_pfllib_begins_where_the_run_began_and_is_given_its_settings(case, monkeypatch):
    monkeypatch.chdir(case.folder)  # from where it goes on, and comes back
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = agreement.theirs(case)
    run = runs.load(case.run)
    np.testing.assert_allclose(found, run.metrics[0]["pre/acc_micro"], rtol=1e-6)
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
    assert header[1:3] == ("ours", "PFLlib") and start[0] == "0" and float(start[3]) == 0
    assert end[1] == f"{100 * run.metrics[-1]['pre/acc_micro']:.2f}"


def test_what_cannot_be_compared_is_one_sentence(case):
    run = runs.load(case.run)
    for change, said in (
        ({"algo": "pfedc"}, "--run has the method pfedc: it must be one of local, fedavg"),
        ({"model": "resnet18"}, "--run has the network resnet18"),
        ({"momentum": 0.9}, "--run has momentum=0.9: for a comparison it must be 0.0"),
        ({"epochs": None}, "--run has local work by --steps"),
    ):
        with pytest.raises(InputError) as error:
            agreement.check(run._replace(config=run.config.replace(**change)))
        assert said in str(error.value)
    agreement.check(run)
