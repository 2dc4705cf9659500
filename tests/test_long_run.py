"""A run of many rounds: a row costs at the end what it costs at the start, and scores do not stay in memory."""

import time

import numpy as np
import psutil
import pytest

from experiments import runs
from fedjax_pfl import simulate
from fedjax_pfl.types import Traffic

CLIENTS, ROUNDS = 200, 5_000


def result(t, rng):
    ids = np.sort(rng.choice(CLIENTS, 20, replace=False))
    one = np.ones(20)
    scores = {name: rng.random(20).astype(np.float32) for name in ("acc", "acc_present")}
    metrics = {"loss": rng.random(20), "post": scores, "ids": ids, "active": one > 0, "finite": one > 0}
    metrics["traffic"] = Traffic(one * 10, one * 10, one, one)
    pre = {name: rng.random(CLIENTS).astype(np.float32) for name in scores}
    return simulate.Result(t, None, metrics, pre)


@pytest.mark.slow
def test_appending_a_row_costs_the_same_at_the_end_as_at_the_start(tmp_path):
    run, rng = runs.RunDirectory(tmp_path, np.ones(CLIENTS), True), np.random.default_rng(0)
    seconds = np.zeros(ROUNDS)
    memory = psutil.Process().memory_info
    for t in range(ROUNDS):
        one = result(t, rng)
        begin = time.perf_counter()
        run.append(one)
        seconds[t] = time.perf_counter() - begin
        if t == 500:
            before = memory().rss
    held = (memory().rss - before) / (ROUNDS - 501)  # bytes a round
    written = (tmp_path / "scores.jsonl").stat().st_size / ROUNDS
    early, late = np.median(seconds[100:600]), np.median(seconds[-500:])
    print(f"{early:.2e} s at the start, {late:.2e} at the end; {held:.0f} bytes held, {written:.0f} written of scores")
    assert late < 1.3 * early
    assert held < 4096  # the numbers of one row of metrics, whatever the number of clients
