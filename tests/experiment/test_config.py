import json

import optax
import pytest

from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import config as settings, groups
from fedjax_pfl.experiment.config import FREE, HELP, SECTIONS, SETTINGS, resolve


def test_every_setting_has_a_help_and_a_kind():
    assert {name for names in SECTIONS.values() for name in names} == set(SETTINGS)
    assert all(HELP.values())
    assert {known.kind for known in SETTINGS.values()} == {str, int, float, bool}


def test_a_given_value_overrides_the_preset_which_overrides_the_default():
    assert resolve({"algo": "ditto"}).clients == 100  # of the preset of digits
    assert resolve({"algo": "ditto", "clients": 7}).clients == 7
    assert (
        resolve({"algo": "ditto", "dataset": "mnist"}).clients
        == SETTINGS["clients"].default
    )
    fedcp = resolve({"algo": "fedcp"})
    assert fedcp.hparams["lam"] == 1.0  # of the preset
    assert resolve({"algo": "fedcp", "hparams": {"lam": "2"}}).hparams["lam"] == 2.0


def test_hyperparameters_are_typed():
    given = {"lam": "0.5", "personal_epochs": "3"}
    found = resolve({"algo": "ditto", "hparams": given}).hparams
    assert found == {"lam": 0.5, "personal_epochs": 3}
    found = resolve({"algo": "ditto", "hparams": {"personal_epochs": "none"}}).hparams
    assert found["personal_epochs"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Choose a method"),
        ({"algo": "dito"}, "Did you mean ditto"),
        ({"algo": "xyzzy"}, "Unknown algo 'xyzzy'. Known"),
        ({"algo": "fedavg", "dataset": "femnist"}, "Unknown dataset 'femnist'. Known"),
        ({"algo": "fedavg", "partition": "noniid"}, "Did you mean pathological or"),
        ({"algo": "fedavg", "preset": "pfedc_mnis"}, "did you mean 'pfedc_mnist'"),
        ({"algo": "fedavg", "optimizer": "adm"}, "Did you mean adam"),
        ({"algo": "ditto", "hparams": {"lamb": "1"}}, "did you mean .lam"),
        ({"algo": "ditto", "hparams": {"lam": "x"}}, "`lam` must be a number"),
        ({"algo": "ditto", "hparams": {"lam": "-1"}}, "must be in"),
        ({"algo": "fedavg", "unseen": 1.0}, "must be in"),
        ({"algo": "fedavg", "epochs": 0}, "`epochs` must be in"),
        ({"algo": "fedavg", "steps": 0}, "`steps` must be in"),
        ({"algo": "fedavg", "epochs": 1, "steps": 1}, "exactly one"),
        ({"algo": "fedavg", "momentum": 0.9, "optimizer": "adam"}, "--optimizer=sgd"),
        (
            {"algo": "fedavg", "server_optimizer": "adam"},
            "--server_optimizer needs --server_lr",
        ),
        ({"algo": "fedavg", "participation": "half"}, "must be a number"),
        ({"algo": "fedavg", "width": "wide"}, "must be an integer"),
        ({"algo": "fedavg", "partition": "file:x.npz", "alpha": 1.0}, "no effect"),
        ({"algo": "fedavg", "partition": "iid", "alpha": 1.0}, "--alpha needs --part"),
        ({"algo": "fedavg", "partition": "iid", "classes_per_client": 3}, "needs --pa"),
        ({"algo": "fedavg", "dp_clip": 0.5}, "--dp_clip needs --dp"),
        ({"algo": "fedavg", "dp_sampling": "fixed"}, "--dp_sampling needs --dp"),
        ({"algo": "fedavg", "staleness": "constant"}, "needs --asynchronous"),
        ({"algo": "fedavg", "unseen_rounds": 2}, "--unseen_rounds needs --unseen"),
        ({"algo": "fedavg", "image_size": 8}, "needs --dataset=imagefolder:, domains:"),
        ({"algo": "fedavg", "steps": 3, "drop_last": True}, "needs --epochs"),
        ({"algo": "fedavg", "patience": 1}, "--patience needs --val_fraction"),
        ({"algo": "fedavg", "watch": "auc"}, "--watch=auc must be val/SCORE"),
        ({"algo": "fedavg", "public": "mnist:9"}, "no effect with --algo=fedavg"),
        ({"algo": "fedavg", "shared_model": "mlp"}, "no effect with --algo=fedavg"),
        ({"algo": "mocha", "momentum": 0.9}, "no effect with --algo=mocha"),
        ({"algo": "fedavg", "public": "digits:0"}, "`public` must be in"),
        ({"algo": "fedavg", "public": "digit:5"}, "Unknown dataset 'digit'"),
    ],
)
def test_wrong_settings_have_one_message(given, message):
    with pytest.raises(InputError, match=message):
        resolve(given)


def test_local_work_is_in_epochs_or_in_steps():
    by_steps = resolve({"algo": "fedavg", "steps": 3})
    assert (by_steps.steps, by_steps.epochs) == (3, None)
    assert resolve({"algo": "fedavg"}).steps is None


def test_a_partition_file_decides_its_settings():
    found = resolve({"algo": "fedavg", "partition": "file:x.npz"})
    assert found.clients is None and found.alpha is None and found.val_fraction is None


def test_a_recorded_config_is_read_and_overridden(tmp_path):
    path = tmp_path / "config.json"
    config = resolve({"algo": "ditto", "lr": 0.25, "hparams": {"lam": "0.5"}})
    path.write_text(json.dumps(config.flat() | {"a_setting_of_before": 1}))
    assert settings.read(path) == config
    other = resolve({"config": str(path), "lr": 0.5})
    assert other == config.replace(lr=0.5)
    assert resolve({"config": str(path), "algo": "fedavg"}).hparams == {}
    path.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        settings.read(path)


def test_a_resume_changes_free_settings_only():
    before = resolve({"algo": "ditto"}).replace(model="mlp")
    after = settings.resumed(before, {"width": "2", "rounds": 30, "model": "auto"})
    assert after == before.replace(width="2", rounds=30)
    assert "width" in FREE and "lr" not in FREE
    for given in ({"lr": 0.5}, {"rounds": 1}, {"hparams": {"lam": "3"}}):
        with pytest.raises(InputError, match="recorded"):
            settings.resumed(before, given)


def test_optimizers_are_those_of_optax():
    assert all(callable(getattr(optax, name)) for name in groups.OPTIMIZERS)


def test_a_run_is_named_by_what_was_changed():
    given = {"algo": "ditto", "lr": 0.5, "width": "2", "hparams": {"lam": "0.1"}}
    name = settings.run_name(given, resolve(given))
    assert name == "ditto-digits-dirichlet_hsu-seed0-lr=0.5-lam=0.1"
