"""Several methods and seeds in one setting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from experiments import build, layouts, many, runs, session, settings, sweep
from fedjax_pfl.errors import InputError

TINY = [
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
    "--rounds=1",
    "--eval_every=0",
]


@pytest.mark.slow  # test_grid.py has such a sweep
def test_a_sweep_runs_what_is_missing_and_prints_a_table(tmp_path, capsys, monkeypatch):
    command = [*TINY, "--algo=fedavg,local", "--seed=0,1", f"--root={tmp_path}"]
    assert sweep.run([*command, "--verbose"]) == 0
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["fedavg-seed0", "fedavg-seed1", "local-seed0", "local-seed1"]
    table = capsys.readouterr().out
    assert all(
        f"| {method}, seed={k} | linear |" in table
        for method in ("fedavg", "local")
        for k in (0, 1)
    )
    started = []
    monkeypatch.setattr(
        session, "train_into", lambda given, *_: started.extend(given) or 0
    )
    assert sweep.run(command) == 0 and not started
    summary = tmp_path / "local-seed1" / "summary.json"
    runs.write_json(summary, runs.read_json(summary) | {"status": "interrupted"})
    assert sweep.run(command) == 0
    [(user, workdir, resume)] = started
    assert (user["algo"], user["seed"], workdir, resume) == (
        "local",
        1,
        str(tmp_path / "local-seed1"),
        True,
    )
    # more rounds are the same runs
    assert sweep.run([*command, "--rounds=2"]) == 0 and len(started) == 5
    for other, said in (
        ("--lr=0.5", r"lr \(recorded 0.1, now 0.5\)"),
        ("--epochs=2", "epochs"),
    ):
        with pytest.raises(
            InputError, match=f"fedavg-seed0 holds a run of other settings: {said}"
        ):
            sweep.run([*command, other])
    # its table would be that of the old runs, or of old and new ones
    assert len(started) == 5


@pytest.mark.slow
def test_hyperparameters_are_among_the_settings(tmp_path):
    command = [
        *TINY,
        "--algo=fedprox",
        "--rounds=0",
        "--hparam=mu=2",
        f"--root={tmp_path}",
    ]
    assert sweep.run(command) == 0
    assert sweep.run(command) == 0
    with pytest.raises(
        InputError, match=r"other settings: hparam mu \(recorded 2.0, now 0.001\)"
    ):
        sweep.run([word for word in command if "mu" not in word])


def test_sweeps_of_other_settings_have_other_roots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(
        session, "train_into", lambda given, *_: started.append(given[0].workdir) or 0
    )
    for more in ([], ["--lr=0.2"], ["--hparam=mu=2"]):
        assert (
            sweep.run(["--algo=fedprox", "--preset=digits", "--rounds=3", *more]) == 0
        )
    names = ["digits", "digits-lr=0.2", "digits-mu=2"]
    assert started == [f"runs/{name}/fedprox-seed0" for name in names]


def test_a_run_directory_is_no_root(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(
        InputError,
        match=f"--root={tmp_path} is the directory of one run: choose another.",
    ):
        sweep.run([*TINY, "--algo=local", f"--root={tmp_path}"])


def test_a_wrong_name_stops_a_sweep_before_anything_runs(tmp_path):
    with pytest.raises(InputError, match="did you mean 'fedavg'"):
        sweep.run([*TINY, "--algo=local,fedavgg", f"--root={tmp_path}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(  # test_at_once.py needs one program of two seeds, too
    "algo, spec, participation",
    [
        toy.slow("ditto", "pathological", "1"),
        toy.slow("ditto", "pathological", "0.5"),
        toy.slow("ditto", "dirichlet", "1"),
        toy.slow("ditto", "dirichlet", "0.5"),
        toy.slow("fedem", "dirichlet", "1"),  # these depend on the clients' sizes, too
        toy.slow("fedfomo", "dirichlet", "1"),
        toy.slow("mnfl", "dirichlet", "1"),
        toy.slow("fedproto", "pathological", "1"),
    ],
)
def test_seeds_have_the_same_programs(algo, spec, participation):
    """Text for text: what is compiled for one is found in the cache by the next, though
    their clients' sizes differ."""
    given = {
        "preset": "digits_pathological",
        "algo": algo,
        "model": "linear",
        "participation": participation,
        "partition": spec,
        "hparams": {},
    }
    configs = [settings.resolve(given | {"seed": seed}) for seed in range(3)]
    programs, sizes = [], []
    for config in configs:
        experiment = build.prepare(config, room=many._room(configs))
        program = experiment.program(width=2, devices=2)
        f = experiment.federation._replace(placement=program.placement)
        key, numbers = experiment.key, program.traced
        state = jax.eval_shape(program.init, key, numbers)
        lowered = [jax.jit(program.init).lower(key, numbers, f.placement)]
        lowered += [
            jax.jit(program.evaluate).lower(key, numbers, f, state, jnp.int32(0))
        ]
        lowered += [
            jax.jit(program.round).lower(
                key, numbers, f, state, jnp.int32(0), jnp.bool(True)
            )
        ]
        programs.append([x.as_text() for x in lowered])
        sizes.append(np.sort(experiment.task.sizes))
    assert programs[0] == programs[1] == programs[2]
    assert not np.array_equal(sizes[0], sizes[1])


@pytest.mark.parametrize("twice", ["--seed=0,1,0", "--algo=local,local"])
def test_a_run_that_is_listed_twice_is_refused(twice, tmp_path):
    with pytest.raises(
        InputError, match=r"lists (0|local) twice: each run has one directory"
    ):
        sweep.run([*TINY, "--algo=local", twice, f"--root={tmp_path}"])


def test_a_seed_with_nothing_to_deal_leaves_the_others_to_run():
    given = {"algo": "local", "partition": "file:nowhere.npz", "hparams": {}}
    assert (
        many._room([settings.resolve(given | {"seed": seed}) for seed in range(2)])
        == many.ROOM
    )


@pytest.mark.slow  # four runs
def test_seeds_are_laid_out_as_the_first_was(tmp_path, monkeypatch):
    """But for what the user says; the settings stay as they were given."""
    laid, choose, widths = [], layouts.choose, iter([3])
    monkeypatch.setattr(layouts.placement, "automatic_width", lambda *_: next(widths))

    def chosen(experiment, *given):
        laid.append((experiment.config.width, choose(experiment, *given)))
        return laid[-1][1]

    monkeypatch.setattr(layouts, "choose", chosen)
    for more in ([], ["--width=2"]):
        words = [
            "--algo=local",
            "--seed=0,1",
            "--rounds=0",
            "--model=linear",
            *more,
            f"--root={tmp_path / str(len(more))}",
        ]
        assert sweep.run(words) == 0
    assert [(given, found.width) for given, found in laid] == [
        ("auto", 3),
        ("auto", 3),
        ("2", 2),
        ("2", 2),
    ]


@pytest.mark.slow  # as a resume does, in test_checkpoint.py
def test_fewer_rounds_than_a_run_has_are_refused(tmp_path):
    """Else runs of different lengths would be averaged."""
    command = [*TINY, "--algo=local", f"--root={tmp_path}"]
    assert sweep.run([*command, "--rounds=2"]) == 0
    with pytest.raises(
        InputError, match="holds a run of 2 rounds, which may only grow"
    ):
        sweep.run([*command, "--rounds=1"])
