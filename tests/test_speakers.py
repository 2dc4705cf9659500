"""Speakers of a text file: which are of the base and which are new, and what adapters
gain on the new ones."""

import json

import jax
import numpy as np
import pandas as pd
import pytest

from benchmarks import speakers
from fedjax_pfl.models import nnx_model


def test_speakers_are_of_the_base_or_new(tmp_path):
    pytest.importorskip("tokenizers")
    draw = np.random.default_rng(0)
    said = {f"p{i}": "to be or not " * int(draw.integers(1, 400)) for i in range(60)}
    (tmp_path / "plays.json").write_text(json.dumps(said))
    speakers.split(str(tmp_path / "plays.json"), str(tmp_path), 6)
    base, new = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("base", "new")
    )
    assert len(base) == 30 and len(new) == 6 and not base.keys() & new.keys()
    sizes = [len(text) for text in new.values()]
    assert min(sizes) >= speakers.LEAST and max(sizes) <= speakers.MOST
    known = json.loads((tmp_path / "tokenizer.json").read_text())
    assert len(known["model"]["vocab"]) < 100  # two words and spaces have few pairs


def test_the_language_model_has_five_million_parameters():
    options = {"vocabulary": 1023, "positions": 64, "input_dtype": np.int32}
    made = nnx_model.model(speakers.network, (64,), 1023, **options)
    shapes = jax.eval_shape(made.init, jax.random.key(0))
    assert nnx_model.num_parameters(shapes) == 5_280_255


def test_gains_are_over_the_base_of_the_same_client_and_seed(tmp_path, capsys):
    rows = {"client": ["a", "b"], "train": [3, 9]}
    for sweep, algo, columns in (
        ("base", "local", {"pre/perplexity": [10.0, 20.0]}),
        ("lora", "ditto", {"pre/perplexity": [9.0, 16.0]}),
        ("whole", "local", {"pre/perplexity": [11.0, 20.0], "post/perplexity": [5, 2]}),
    ):
        run = tmp_path / sweep / "run"
        run.mkdir(parents=True)
        pd.DataFrame(rows | columns).to_csv(run / "clients.csv")
        (run / "config.json").write_text(json.dumps({"algo": algo, "seed": 0}))
    found = speakers.runs(str(tmp_path)).set_index(["method", "client"])
    assert found.loc["ditto", "pre"].tolist() == found.loc["ditto", "post"].tolist()
    assert found.loc["whole local", "post"].tolist() == [5, 2]
    assert found["base"].tolist() == [10, 20, 10, 20]
    speakers.gains(str(tmp_path), str(tmp_path / "gains.png"))
    assert "ditto: 100%, 1.00" in capsys.readouterr().out
    assert (tmp_path / "gains.png").stat().st_size > 10_000
