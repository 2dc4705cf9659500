"""A run of many rounds: a round costs at the end what it costs at the start, and rows
do not stay in memory."""

import functools
import io
import time

import numpy as np
import psutil
import pytest
from experiments.config import Config
from rich.console import Console

from experiments import build, figures, report, runs, settings, targets
from fedjax_pfl import simulate
from fedjax_pfl.engine.program import Round
from fedjax_pfl.types import Traffic

CLIENTS, ROUNDS = 200, 20_000


def result(t, rng):
    ids = np.sort(rng.choice(CLIENTS, 20, replace=False))
    one = np.ones(20)
    scores = {
        name: rng.random(20).astype(np.float32) for name in ("acc", "acc_present")
    }
    metrics = Round(
        rng.random(20),
        scores,
        {},
        {},
        Traffic(one * 10, one * 10, one, one),
        ids,
        one > 0,
        one > 0,
    )
    pre = {name: rng.random(CLIENTS).astype(np.float32) for name in scores}
    return simulate.Result(t, None, metrics, pre)


def held() -> int:
    """Bytes of this process."""
    return psutil.Process().memory_info().rss


@pytest.mark.slow
def test_a_round_costs_the_same_at_the_end_as_at_the_start(tmp_path):
    given = {
        "algo": "fedavg",
        "model": "linear",
        "clients": CLIENTS,
        "participation": "0.1",
        "hparams": {},
    }
    run = runs.RunDirectory(tmp_path, build.prepare(settings.resolve(given)))
    rng = np.random.default_rng(0)
    seconds, config = np.zeros(ROUNDS), Config(algo="fedavg", targets="0.5,0.9")
    with report.Reporter(Console(file=io.StringIO()), 0, ROUNDS) as reporter:
        for t in range(ROUNDS):
            one = result(t, rng)
            begin = time.process_time()
            reporter.update(run.append(one))
            seconds[t] = time.process_time() - begin
            if t == 500:
                before = held()
    rows = (held() - before) / (ROUNDS - 501)
    written = (
        sum(
            (tmp_path / f"{name}.jsonl").stat().st_size
            for name in ("metrics", "scores")
        )
        / ROUNDS
    )
    early, late = (np.median(x) for x in (seconds[100:1100], seconds[-1000:]))
    before, begin = held(), time.process_time()
    run.tables()
    report.summary(run.rows), targets.summary(run.rows, config, targets.Flops(1, 1))
    functools.reduce(targets.Spent.after, run.rows, targets.Spent())
    spent, shown = time.process_time() - begin, held() - before
    print(
        f"{early:.2e} s at the start, {late:.2e} at the end; {rows:.0f} bytes held of "
        f"{written:.0f} written per round"
    )
    print(
        f"tables, curves and summary of all rounds: {spent:.1f} s, {shown / 2**20:.0f} "
        "MiB"
    )
    assert late < 1.3 * early
    assert rows < 100
    assert shown < 50 * 2**20


def test_of_very_many_rounds_the_last_of_each_stretch_is_drawn():
    rounds = 5 * figures._MAX_POINTS
    rows = (
        {"round": t, "loss": t / 2} | ({"pre/acc": 1.0} if t % 1000 == 0 else {})
        for t in range(rounds)
    )
    series = figures._series(
        rows, {"loss": ("loss",), "pre": ("pre/acc", "pre/acc_std")}
    )
    loss, pre = series["loss"], series["pre"]
    assert figures._MAX_POINTS // 2 <= len(loss) <= figures._MAX_POINTS
    assert len(np.unique(np.diff(loss[:, 0]))) == 1 and loss[-1].tolist() == [
        rounds - 1,
        (rounds - 1) / 2,
    ]
    assert pre[:, 0].tolist() == [*range(0, rounds, 1000)] and np.isnan(pre[:, 2]).all()
