"""A run's config.json as the settings of another one."""

import json
import re

import numpy as np
import pytest

from experiments import build, entry, gather, main, runs, settings
from fedjax_pfl.errors import InputError

GIVEN = [
    "--algo=fedprox",
    "--hparam=mu=0.3",
    "--data_fraction=0.2",
    "--clients=5",
    "--steps=3",
    "--model=linear",
]
GIVEN += [
    "--width=1",
    "--devices=1",
    "--seed=3",
    "--lr=0.0123456789",
    "--participation=0.5:1",
    "--rounds=2",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    assert main.run([*GIVEN, f"--workdir={path}"]) == 0
    return path


def resolved(path, **user):
    return settings.resolve({"config": str(path / "config.json"), "hparams": {}} | user)


@pytest.mark.slow  # that the settings are the same is tested below
def test_it_is_the_same_run_bit_for_bit(done, tmp_path):
    again = tmp_path / "again"
    assert main.run([f"--config={done / 'config.json'}", f"--workdir={again}"]) == 0
    for name in ("config.json", "metrics.jsonl", "scores.jsonl", "partition.json"):
        assert (again / name).read_bytes() == (done / name).read_bytes()


def test_flags_override(done):
    before = runs.read_config(done)
    assert (
        resolved(done) == before and before.hparams == {"mu": 0.3} and before.steps == 3
    )
    assert resolved(done, seed=4, lr=0.1) == before.replace(seed=4, lr=0.1)
    assert resolved(done, epochs=2) == before.replace(steps=None, epochs=2)
    assert resolved(done, hparams={"mu": "0.5"}).hparams == {"mu": 0.5}
    assert resolved(done, algo="ditto").hparams == settings.hyperparameters(
        settings.find("ditto")
    )


def test_a_partition_of_ones_own_over_another_and_back(done, tmp_path):
    own = resolved(done, partition="own.py:f")
    assert own.alpha is None and own.clients == 5
    content = json.loads((done / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | vars(own)))
    assert resolved(tmp_path) == own
    assert resolved(tmp_path, partition="iid").alpha == settings.Config().alpha


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda c: c.pop("digests"),
            "is not the config.json of a run .it lacks 'digests'",
        ),
        (lambda c: c.update(nothing=1), "'nothing', which this version does not know"),
        (lambda c: c.pop("algo"), "is not the config.json of a run .it lacks 'algo'"),
        (lambda c: c.update(lr="fast"), "lr is 'fast', not a number"),
        (lambda c: c.update(lr=-1.0), r"`lr` must be in"),
        (lambda c: c["hparams"].update(nu=1), "nu"),
    ],
)
def test_a_file_of_another_format_is_one_sentence(
    done, tmp_path, change, sentence, capsys
):
    content = json.loads((done / "config.json").read_text())
    change(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert (
        main.run(
            [f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path / 'run'}"]
        )
        == entry.BAD_INPUT
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(sentence, said), said


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--config=nowhere.json"], "cannot be read"),
        (["--config=/"], "cannot be read"),
        (["--config={done}/metrics.jsonl"], "give the config.json of a run"),
        (["--config={done}/versions.json"], "is not the config.json of a run"),
        (
            ["--config={done}/config.json", "--preset=digits"],
            "--preset=digits means nothing with --config",
        ),
        (
            ["--config={done}/config.json", "--resume", "--workdir={done}"],
            "--config means nothing with --resume",
        ),
    ],
)
def test_a_wrong_command_is_one_sentence(done, flags, sentence, capsys):
    assert main.run([flag.format(done=done) for flag in flags]) == entry.BAD_INPUT
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "dataset, public",
    [
        ("mnist", "tfds:mnist:50"),
        ("cifar100", "cifar100_coarse:50"),
        ("cifar100", "tfds:cifar100_coarse:50"),
        ("emnist/bymerge", "emnist/byclass:50"),
        ("npz:mine.npz", "npz:./mine.npz"),
        ("mine.py:digits", "./mine.py:digits:50"),
    ],
)
def test_the_clients_own_data_are_not_public_by_another_name(dataset, public):
    with pytest.raises(InputError, match="is the clients' own data set"):
        build._public(
            settings.resolve({"algo": "fedmd", "dataset": dataset, "public": public})
        )


def test_of_a_method_with_networks_of_its_own_their_settings_have_no_effect(caplog):
    made = settings.resolve({"algo": "feddva", "compute_dtype": "bfloat16"})
    assert "--compute_dtype=bfloat16 has no effect with --algo=feddva." in caplog.text
    found = [
        gather.setting(made.replace(algo=name), "compute_dtype")
        for name in ("feddva", "fedavg")
    ]
    assert found == [None, "bfloat16"]


def test_images_whose_channels_are_first_are_warned_of(tmp_path, caplog):
    x = np.random.default_rng(0).integers(0, 256, (40, 3, 16, 16), np.uint8)
    for name, images in (("first", x), ("last", x.transpose(0, 2, 3, 1))):
        np.savez(tmp_path / f"{name}.npz", x=images, y=np.arange(40) % 2)
        where = {
            "dataset": f"npz:{tmp_path / name}.npz",
            "clients": 2,
            "partition": "iid",
            "model": "linear",
        }
        build.prepare(settings.resolve({"algo": "local", **where}))
        assert ("store x.transpose(0, 2, 3, 1)" in caplog.text) == (name == "first")
        caplog.clear()


def test_a_pool_of_ones_own_that_cannot_be_imported_is_one_sentence(
    tmp_path, monkeypatch
):
    (tmp_path / "broken_pool.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="'broken_pool' cannot be imported"):
        build._public(settings.resolve({"algo": "fedmd", "public": "broken_pool:pool"}))
