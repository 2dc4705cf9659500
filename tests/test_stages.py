"""Stages: a run that ends before a part of its method begins is refused or warned of."""

import pytest
import toy

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import contract
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Stage

# method, the first round of its stage, hyperparameters
STAGES = [
    ("cfl", 20, {}),
    ("fedl2g", 50, {}),
    ("pfedsim", 20, {}),
    ("pfedsim", 40, {"warmup": 1.0}),
    ("fedap", 20, {}),
    ("floco", 20, {}),
    ("mocha", 3, {}),
    ("mocha", 99, {"relate_every": 100}),
]


@pytest.mark.parametrize("method, first, given", STAGES)
def test_methods_declare_their_stages(method, first, given):
    kind = "linear" if method == "mocha" else "mlp"
    made = ALGORITHMS[method](toy.task(kind)._replace(rounds=40), **given)
    assert [int(stage.first) for stage in made.stages] == [first]
    assert [stage.needed for stage in made.stages] == [method == "fedl2g"]


@pytest.mark.parametrize("rounds, warned", [(21, False), (20, True), (None, False)])
def test_a_run_that_ends_before_a_stage_is_warned_of(rounds, warned, caplog):
    contract._warn.cache_clear()
    stages = (Stage(20, "no cluster is split"),)
    for _ in range(2):
        contract.check_stages("cfl", stages, toy.task()._replace(rounds=rounds))
    text = "cfl: no cluster is split in the first 20 rounds, and the run has 20."
    assert [x.getMessage() for x in caplog.records] == [text] * warned


def test_a_run_without_rounds_has_no_stages():
    stages = (Stage(1, "no client trains", needed=True),)
    contract.check_stages("fedl2g", stages, toy.task()._replace(rounds=0))


def test_programs_check_stages(caplog):
    contract._warn.cache_clear()
    task = toy.task()._replace(rounds=4)
    with pytest.raises(InputError, match="no client trains in the first 4 rounds"):
        simulate.program("fedl2g", task, {"warmup": 4})
    simulate.program("cfl", task, checked=False)
    assert "no cluster is split in the first 20 rounds" in caplog.text
