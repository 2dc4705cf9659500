"""Predictions of a run from its directory alone."""

import json

import jax
import numpy as np
import pandas as pd
import pytest
import sklearn.metrics
from PIL import Image

from experiment.runs import run
from experiment.test_build import TABLE, sites
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import export, predict, results
from fedjax_pfl.experiment.build import _load, build, unseen_scorer
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.types import Trained
from fedjax_pfl.experiment.warm_start import first_state

SMALL = {"clients": 6, "data_fraction": 0.2, "model": "linear", "devices": "1"}


def untrained(path, **settings):
    """Returns the experiment of a run directory with the start as its checkpoint."""
    e, directory = build(Config(**SMALL | settings)), RunDirectory(path)
    directory.open(e)
    directory.save(1, first_state(e))
    directory.unlock()
    return e


def same(path, e, client=1, rows=None, loaded=False):
    """Asserts that the files alone predict as the experiment does, bit for bit."""
    known = results.load(path)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype),
            known.trained.state_shapes(),
            e.state_shapes(),
        )
    )
    x = e.dataset.x[:3]
    found = known.predictor(client)(x if rows is None else rows)
    wanted = e.predictor(known.state(), 1, client)(x)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert (type(known.trained) is Trained) is not loaded


@pytest.mark.parametrize(
    "settings",
    [
        {"algo": "ditto", "unseen": 0.3, "sampling": "power_of_choice"},
        {"algo": "scaffold", "asynchronous": "fedbuff:2", "participation": "0.5"},
        {"algo": "fedmd", "public": "digits:7"},
        {"algo": "local", "model": "linear,mlp"},
        {"algo": "fedavg", "malicious": "0.3:sign_flip"},
        {"algo": "fedavg", "compress": "top_k:0.5", "participation": "0.5"},
    ],
)
def test_a_run_predicts_from_its_files_alone(settings, tmp_path):
    same(tmp_path, untrained(tmp_path, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_every_method_predicts_from_its_files_alone(algo, tmp_path):
    lora = {"adapt": "lora:2:dense", "model": "mlp"}
    settings = {
        "fedmd": {"public": "digits:20"},
        "hetlora": lora,
        "fedsa_lora": lora,
        "flora": lora,
    }
    try:
        e = untrained(tmp_path, algo=algo, **settings.get(algo, {}))
    except ValueError:
        e = untrained(tmp_path, algo=algo, public="digits:20", model="mlp")
    same(tmp_path, e)


def test_raw_rows_of_a_table_equal_the_loaders_rows(tmp_path):
    file, settings = tmp_path / "sites.csv", {"missing": "mean", "data_fraction": 1.0}
    made = {"dataset": sites(file), "algo": "ditto", "categories": "onehot"} | TABLE
    e = untrained(tmp_path / "run", **made | settings)
    rows = pd.read_csv(file)[:3]
    file.unlink()
    same(tmp_path / "run", e, "2", rows)


def predicted(*argv):
    return run(*map(str, argv), command=predict.main)


def test_the_command_predicts_a_table_by_site(tmp_path, capsys, caplog):
    file, out = tmp_path / "sites.csv", tmp_path / "run" / "predictions.csv"
    made = {"dataset": sites(file), "algo": "ditto", "missing": "mean"} | TABLE
    made["categories"] = "onehot"
    e = untrained(
        tmp_path / "run", **made | {"data_fraction": 1.0, "metrics": "acc,auc,ap"}
    )
    rows = pd.read_csv(file)
    file.unlink()
    rows.to_csv(tmp_path / "new.csv", index=False)
    given = tmp_path / "run", f"--input={tmp_path / 'new.csv'}"
    assert predicted(*given, "--client=2") == 0
    found = pd.read_csv(out)
    assert [*found] == ["row", "client", "label", "class", "0", "1"] and len(
        found
    ) == 60
    z = e.predictor(results.load(tmp_path / "run").state(), 1, "2")(e.dataset.x)
    np.testing.assert_allclose(found[["0", "1"]], jax.nn.softmax(z), rtol=1e-5)
    right, given_to_one = (found["class"] == rows.label).mean(), found["1"]
    printed = capsys.readouterr().out
    assert f"accuracy {100 * right:.1f} % of 60" in printed
    for name, score in (
        ("auc", sklearn.metrics.roc_auc_score),
        ("ap", sklearn.metrics.average_precision_score),
    ):
        value = 100 * score(rows.label, given_to_one)
        assert f"{name} {value:.1f} %" in printed
    assert predicted(*given, "--client=all") == 0
    every = pd.read_csv(out)
    assert every["row"].tolist() == list(range(1, 61))
    assert every["client"].tolist() == rows.site.tolist()
    own = every[every["client"] == 2].set_index("row")["0"]
    np.testing.assert_array_equal(own, found.set_index("row").loc[own.index, "0"])
    assert predicted(*given, "--client=global") == 0
    as_floats = rows.assign(label=rows.label.astype(float))
    as_floats.to_csv(tmp_path / "new.csv", index=False)
    assert predicted(*given, "--client=2") == 0
    assert f"accuracy {100 * right:.1f} % of 60" in capsys.readouterr().out
    as_floats.loc[3, "label"] = np.nan
    as_floats.to_csv(tmp_path / "new.csv", index=False)
    assert predicted(*given, "--client=2") == 2
    assert "label of row 4 is missing" in capsys.readouterr().err
    rows.drop(columns=["site", "label"]).to_csv(tmp_path / "new.csv", index=False)
    assert predicted(*given, "--client=all") == 0
    every = pd.read_csv(out)
    assert len(every) == 4 * 60 and "label" not in every
    loaded = results.load(tmp_path / "run")
    with caplog.at_level("WARNING"):
        loaded.predictor("2")(rows.assign(kind="d"))
    assert "kind: 60 rows have categories that no training row had" in caplog.text
    with pytest.raises(InputError, match="There must be a row"):
        loaded.predictor("2")(np.zeros((0, 3), np.float32))
    rows.drop(columns="age").to_csv(tmp_path / "new.csv", index=False)
    assert predicted(*given, "--client=2") == 2
    assert "must have a column age" in capsys.readouterr().err


def test_the_command_predicts_texts(tmp_path, capsys):
    file = tmp_path / "texts.csv"
    lines = [f"a good day {i},fine" if i % 2 else f"bad {i},poor" for i in range(60)]
    file.write_text("\n".join(["text,label", *lines]))
    made = {"dataset": f"text:{file}", "model": "fasttext", "partition": "iid"}
    e = untrained(tmp_path / "run", algo="fedavg", **made | {"data_fraction": 1.0})
    file.unlink()
    (tmp_path / "new.txt").write_text("a good day 1\nnever seen\n")
    given = tmp_path / "run", f"--input={tmp_path / 'new.txt'}", "--client=0"
    assert predicted(*given, f"--output={tmp_path / 'out.csv'}") == 0
    found = pd.read_csv(tmp_path / "out.csv")
    z = e.predictor(results.load(tmp_path / "run").state(), 1, 0)(e.dataset.x[1:2])
    np.testing.assert_allclose(
        found[["fine", "poor"]][:1], jax.nn.softmax(z), rtol=1e-5
    )
    assert predicted(tmp_path / "run", "--client=0") == 2
    assert predicted(*given[:2], "--client=9") == 2
    assert "Unknown client '9'" in capsys.readouterr().err


def test_the_command_predicts_images_and_arrays(tmp_path, capsys):
    x = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 1), np.uint8)
    folder = tmp_path / "images"
    for i, image in enumerate(x):
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(folder / "ab"[i % 2] / f"{i:02}.png")
    made = {"dataset": f"imagefolder:{folder}", "partition": "iid", "algo": "local"}
    e = untrained(tmp_path / "run", **made | {"data_fraction": 1.0, "clients": 2})
    given = tmp_path / "run", "--client=1"
    assert predicted(*given, f"--input={folder}") == 0
    assert "of 40" in capsys.readouterr().out
    found = pd.read_csv(tmp_path / "run" / "predictions.csv")
    z = e.predictor(results.load(tmp_path / "run").state(), 1, 1)(e.dataset.x)
    np.testing.assert_allclose(found[["a", "b"]], jax.nn.softmax(z), rtol=1e-5)
    assert found["label"].tolist() == ["a"] * 20 + ["b"] * 20
    y = e.dataset.y[:5]
    np.savez(tmp_path / "new.npz", x=e.dataset.x[:5, ..., 0], y=y.astype(float))
    assert predicted(*given, f"--input={tmp_path / 'new.npz'}") == 0
    again = pd.read_csv(tmp_path / "run" / "predictions.csv")
    assert again["label"].tolist() == ["ab"[i] for i in y]
    np.testing.assert_allclose(again[["a", "b"]], found[["a", "b"]][:5], rtol=1e-5)
    np.savez(tmp_path / "new.npz", x=np.zeros((5, 3, 3), np.uint8))
    assert predicted(*given, f"--input={tmp_path / 'new.npz'}") == 2
    assert "x must be uint8[4, 4, 1] per row" in capsys.readouterr().err
    assert predicted(tmp_path / "run", "--client=global", f"--input={folder}") == 2
    assert "local has no global model" in capsys.readouterr().err


def test_targets_and_several_labels_are_predicted(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    labels = {"targets": x[:, :2], "several": x[:, :2] > 0}
    for name, y in labels.items():
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
        made = {"dataset": f"npz:{tmp_path / name}.npz", "partition": "iid"}
        made |= {"algo": "fedavg", "data_fraction": 1.0}
        untrained(tmp_path / name, **made)
        np.savez(tmp_path / "new.npz", x=x[:4])
        given = f"--input={tmp_path / 'new.npz'}", "--client=0"
        assert predicted(tmp_path / name, *given) == 0
        found = pd.read_csv(tmp_path / name / "predictions.csv")
        columns = {
            "targets": ["target_1", "target_2"],
            "several": ["classes", "0", "1"],
        }
        assert [*found] == ["row", "client", *columns[name]] and len(found) == 4


def test_a_run_of_an_earlier_version_asks_for_its_data_set(tmp_path, capsys):
    file = tmp_path / "sites.csv"
    made = {"dataset": sites(file), "algo": "fedavg", "missing": "mean"} | TABLE
    e = untrained(tmp_path / "run", **made | {"data_fraction": 1.0})
    (tmp_path / "run" / "inputs.json").unlink()
    same(tmp_path / "run", e, loaded=True)
    file.rename(tmp_path / "new.csv")
    _load.cache_clear()
    given = tmp_path / "run", f"--input={tmp_path / 'new.csv'}", "--client=2"
    assert predicted(*given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "earlier version" in line and "sites.csv" in line


def test_code_from_elsewhere_needs_trust(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "here"))
    file = tmp_path / "own.py"
    file.write_text("from fedjax_pfl.algorithms import fedavg\nown = fedavg\n")
    e = untrained(tmp_path / "run", algo=f"{file}:own")
    np.savez(tmp_path / "new.npz", x=e.dataset.x[:2])
    given = tmp_path / "run", "--client=1", f"--input={tmp_path / 'new.npz'}"
    assert predicted(*given) == 0
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "elsewhere"))
    for command, argv in ((predict.main, given), (export.main, given[:2])):
        assert run(*map(str, argv), command=command) == 2
        assert "own.py was never imported here: --trust" in capsys.readouterr().err
    assert predicted(*given, "--trust") == 0
    assert predicted(*given) == 0  # from then on it is known


def test_a_held_out_client_predicts_after_its_own_training(tmp_path, capsys):
    """As `unseen` scores it, on the same rows."""
    file, given = tmp_path / "sites.csv", {"data_fraction": 1.0, "unseen": "names:1"}
    made = {"dataset": sites(file), "algo": "ditto", "missing": "mean"} | TABLE
    e = untrained(tmp_path / "run", **made | given | {"lr": 0.5, "unseen_rounds": 3})
    state, away = results.load(tmp_path / "run").state(), e.unseen
    score = unseen_scorer(e, away)
    wanted = score(e.key, away.federation, state.server, np.int32(1))["unseen"]["acc"]
    frame = pd.read_csv(file)
    for name in ("train", "test"):
        index, (size,) = (
            getattr(away.partition, name),
            getattr(away.partition, f"{name}_sizes"),
        )
        frame.iloc[index[0][:size]].to_csv(tmp_path / f"{name}.csv", index=False)
    argv = tmp_path / "run", "--client=1", f"--input={tmp_path / 'test.csv'}"
    assert predicted(*argv, f"--train={tmp_path / 'train.csv'}") == 0
    found = pd.read_csv(tmp_path / "run" / "predictions.csv")
    np.testing.assert_allclose((found["class"] == found["label"]).mean(), wanted[0])
    assert predicted(*argv) == 2
    assert "--client=1 --train=FILE trains its model" in capsys.readouterr().err
    with pytest.raises(InputError, match="1 did not train"):
        results.load(tmp_path / "run").predictor("1")
    train = f"--train={tmp_path / 'train.csv'}"
    assert predicted(*argv, train, "--unseen_rounds=1") == 0
    shorter = pd.read_csv(tmp_path / "run" / "predictions.csv")
    assert not np.allclose(shorter["0"], found["0"])
    assert predicted(*argv, "--unseen_rounds=1") == 2
    assert predicted(tmp_path / "run", "--client=0", *argv[2:], train) == 2
    assert "needs a client that did not train" in capsys.readouterr().err


def test_a_run_keeps_its_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    file, words = tmp_path / "own.json", {"?": 0, "good": 1, "bad": 2}
    model = tokenizers.models.WordLevel(words, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(file))
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": f"{['good', 'bad'][i % 2]} x", "label": i % 2} for i in range(40)]
    texts.write_text("\n".join(map(json.dumps, rows)))
    given = {"dataset": f"text:{texts}", "tokenizer": str(file), "model": "fasttext"}
    given |= {"partition": "iid", "data_fraction": 1.0, "algo": "fedavg"}
    e = untrained(tmp_path / "run", **given)
    file.unlink()
    texts.unlink()
    same(tmp_path / "run", e, rows=[row["text"] for row in rows[:3]])
