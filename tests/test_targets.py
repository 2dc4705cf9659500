"""Rounds to a target: what is counted, and until when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from rich.console import Console

from experiments import targets
from fedjax_pfl import local
from fedjax_pfl.checks import BadInput
from fedjax_pfl.types import Data

CONFIG = {"preset": None, "algo": "fedavg", "targets": None}


def rows(pre, post, **more):
    """A run's rows: 10 scalars each way, 3 integers and 2 messages a round, 4 steps on 30 examples."""
    spent = {"traffic/down": 10, "traffic/up": 10, "traffic/ints": 3, "traffic/messages": 2}
    spent |= {"work/steps": 4, "work/examples": 30, "loss": 1.0}
    made = [{"round": t, **(spent if t < len(post) else {})} for t in range(len(pre))]
    for name, series in (("pre/acc", pre), ("post/acc", post)):
        for row, value in zip(made, series, strict=False):
            if value is not None:
                row |= {name + suffix: value for suffix in ("", "_micro", "_std", "_worst10", "_best10")}
    return [row | more for row in made]


def test_the_first_round_that_reaches_it_and_what_was_spent_until_then():
    run = rows([0.1, None, 0.5, None, 0.8], [0.3, None, 0.5, 0.9])  # evaluated every second round, and the last
    before = targets.reached(run, "pre", "acc", 0.5, flops=7)
    assert before == {
        "round": 2,
        "rounds": 2,  # before the third begins
        "value": 0.5,
        "down": 20,
        "up": 20,
        "ints": 6,
        "messages": 4,
        "encrypted": 0,
        "bytes": 4 * 46,
        "client_steps": 8,
        "client_flops": 2 * 30 * 7,
    }
    after = targets.reached(run, "post", "acc", 0.5, flops=7)
    assert (after["round"], after["rounds"], after["down"], after["client_steps"]) == (2, 3, 30, 12)
    closing = targets.reached(run, "pre", "acc", 0.8, flops=7)
    assert (closing["round"], closing["rounds"], closing["up"]) == (4, 4, 40)
    assert targets.reached(run, "pre", "acc", 0.1, flops=7)["down"] == 0  # before anything was sent
    assert targets.reached(run, "post", "acc", 0.91, flops=7) is None
    assert targets.reached(run, "post", "task_acc", 0.1, flops=7) is None


def test_a_mean_of_float32_scores_reaches_what_it_is():
    mean = float(np.mean(np.full(4, 0.9, np.float32), dtype=np.float64))
    assert mean < 0.9
    assert targets.reached(rows([mean], []), "pre", "acc", 0.9, 1)


def test_rows_of_an_earlier_version_know_no_work():
    run = [{k: v for k, v in row.items() if not k.startswith("work/")} for row in rows([0.1, 0.6], [0.7])]
    found = targets.reached(run, "post", "acc", 0.5, 7)
    assert found["client_steps"] is found["client_flops"] is None and found["down"] == 10
    console = Console(record=True, width=100)
    targets.show(console, run, CONFIG, 7)
    assert "0.5     before         1" in console.export_text()


def test_the_usual_levels_are_shown_where_they_were_reached_and_those_asked_for_always():
    for text, expected in ((None, ["0.5", "0.6"]), ("0.6,0.95", ["0.6", "0.95"])):
        console = Console(record=True, width=100)
        targets.show(console, rows([0.1, 0.55], [0.65]), CONFIG | {"targets": text}, 10**12)
        shown = console.export_text().splitlines()[5:]
        assert [line.split()[0] for line in shown if "before" in line] == expected
        assert ["after", "1", "10", "10", "9.2e-05", "4", "30"] in [line.split() for line in shown]
        assert ("never" in " ".join(shown)) and "0.7" not in " ".join(shown)
    found = targets.summary(rows([0.1], []), CONFIG, 1)
    assert [level["target"] for level in found["levels"]] == list(targets.LEVELS)
    targets.show(console, [], CONFIG, 1)  # nothing evaluated: nothing to say


@pytest.mark.parametrize("text", ["", "0.8,", "80%", "0.8;0.9", "0", "-0.5", "1.2", "nan"])
def test_targets_that_cannot_be(text):
    with pytest.raises(BadInput, match=r"targets=.*\(0, 1\]"):
        targets.levels(text)


def test_targets_are_sorted_and_single():
    assert targets.levels("0.9,0.8, 0.9") == (0.8, 0.9)


@pytest.mark.parametrize(
    "options", [{"epochs": 3}, {"epochs": 2, "drop_last": True}, {"epochs": None, "steps": 7}], ids=str
)
def test_the_work_that_is_counted_is_the_work_that_is_done(options):
    f, task = toy.federation(), toy.task(**options)

    @jax.jit
    def work(index, size):
        def step(key, seen, batch):
            return seen + jnp.sum(batch.mask), ()

        data = Data(f.examples, index, size, task.prepare)
        return local.work(jax.random.key(0), data, step, jnp.int32(0), task)

    steps, examples = local.planned(task, toy.SIZES)
    done = [work(*client) for client in zip(*f.train, strict=True)]
    assert steps.tolist() == [int(count) for _, _, count in done] and steps.any()
    assert examples.tolist() == [int(seen) for seen, _, _ in done]
