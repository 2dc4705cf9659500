"""Finished runs scored task by task."""

import shutil

import numpy as np
import pytest
import toy

from experiments import main, runs, within
from fedjax_pfl.errors import InputError

TINY = [
    "--data_fraction=0.2",
    "--clients=4",
    "--classes_per_client=3",
    "--width=1",
    "--epochs=1",
    "--model=linear",
    "--rounds=1",
]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["pfedc", *map(toy.slow, ["ditto", "fedrod"])])
def test_a_run_is_asked_for_the_class_within_the_group(algo, tmp_path):
    """Of pFedC with these tasks it is its own score; of the others the argmax within
    the group, counted by hand, of FedRoD's two models the personal one's."""
    more = ["--hparam=tasks=consecutive:2"] if algo == "pfedc" else []
    assert main.run([*TINY, *more, f"--algo={algo}", f"--workdir={tmp_path}"]) == 0
    run = runs.load(tmp_path)
    found = within.scores(tmp_path, "consecutive:2")["task_acc"]
    if algo == "pfedc":
        np.testing.assert_allclose(found, run.scores[-1]["pre"]["task_acc"], rtol=1e-6)
        return
    e = run.experiment
    for i in range(4):
        rows = e.partition.test[i, : e.partition.test_sizes[i]]
        y, z = e.dataset.y[rows], np.asarray(run.predictor(i)(e.dataset.x[rows]))
        hit = [
            5 * (y[k] // 5) + np.argmax(z[k, 5 * (y[k] // 5) :][:5]) == y[k]
            for k in range(len(y))
        ]
        held = np.unique(
            e.dataset.y[e.partition.train[i, : e.partition.train_sizes[i]]] // 5
        )
        means = [
            np.mean(np.array(hit)[y // 5 == t]) for t in held if (y // 5 == t).any()
        ]
        np.testing.assert_allclose(found[i], np.mean(means), rtol=1e-6)
    table = within.main(["--tasks=consecutive:2", str(tmp_path)])
    assert f"| {tmp_path} | {100 * found.mean():.2f} |" in table


def test_what_cannot_be_asked_is_one_sentence(tmp_path):
    wrong = {
        "--tasks=single": "Name the run directories",
        str(tmp_path): "Give a task map and runs",
    }
    for argv, said in (
        wrong
        | {
            "--tasks=single --task "
            f"{tmp_path}": "Unknown flag --task: did you mean --tasks"
        }
    ).items():
        with pytest.raises(InputError, match=said):
            within.main(argv.split())
    assert main.run([*TINY, "--algo=local", f"--workdir={tmp_path}"]) == 0
    with pytest.raises(InputError, match="single class"):
        within.main(["--tasks=class", str(tmp_path)])


@pytest.mark.slow  # a run of its own
def test_a_run_that_cannot_be_scored_does_not_lose_the_others(tmp_path, capsys):
    whole, torn = tmp_path / "a", tmp_path / "b"
    assert main.run([*TINY, "--algo=local", f"--workdir={whole}"]) == 0
    shutil.copytree(whole, torn)
    shutil.rmtree(torn / "checkpoints")
    table = within.main(["--tasks=consecutive:2", str(tmp_path)])
    assert f"| {whole} |" in table and str(torn) not in table
    assert f"{torn} is left out: " in capsys.readouterr().err.replace("\n", "")
    with pytest.raises(InputError, match="checkpoint"):
        within.main(["--tasks=consecutive:2", str(torn)])
