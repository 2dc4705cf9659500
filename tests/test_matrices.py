"""Matrices of a run, such as MNFL's coefficients: kept for every evaluated round, and rewound by a resume."""

import json

import numpy as np

from experiments import main, matrices

TINY = ["--algo=mnfl", "--data_fraction=0.2", "--clients=5", "--epochs=1", "--model=linear", "--width=1", "--devices=1"]


def run(path, *flags):
    assert main.run([*TINY, "--eval_every=2", "--checkpoint_every=2", f"--workdir={path}", *flags]) == 0


def test_a_file_for_each_evaluated_round_and_a_resume_ends_alike(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(whole, "--rounds=6")
    found = matrices.load(whole, "coefficients")
    assert matrices.names(whole) == ["coefficients"] and list(found) == [0, 2, 4, 5]
    np.testing.assert_allclose([a.sum(axis=1) for a in found.values()], 1, rtol=1e-5)
    row = json.loads((whole / "metrics.jsonl").read_text().splitlines()[2])
    assert row["coefficients/max"] == found[2].max() and "coefficients" not in row

    run(resumed, "--rounds=4")
    matrices.save(resumed, 4, {"coefficients": np.zeros((5, 5))})  # of a round that was killed before its checkpoint
    assert main.run(["--resume", f"--workdir={resumed}", "--rounds=6"]) == 0
    again = matrices.load(resumed, "coefficients")
    np.testing.assert_array_equal(again[4], found[4])
    np.testing.assert_array_equal(again[5], found[5])
