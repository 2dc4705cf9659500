"""One client's training: order, trip counts, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import evaluation, local_training
from fedjax_pfl.types import Data, Examples

KEY = jax.random.key(0)


def data(size, length=None):
    length = size if length is None else length
    x = jnp.arange(100.0)[:, None].at[50:].set(jnp.nan)  # what padding points to
    index = jnp.where(jnp.arange(length) < size, jnp.arange(length), 60)
    return Data(Examples(x, jnp.arange(100)), index, jnp.int32(size), lambda x: x)


def visits(size, length=None, **options):
    """How often each row is seen, and the number of steps."""

    def step(key, seen, *batches):
        for batch in batches:
            seen = seen.at[batch.row].add(batch.mask)
            assert batch.x.shape == (4, 1)
        return seen, jnp.sum(jnp.stack([jnp.sum(b.x) for b in batches]))

    seen, mean, count = jax.jit(
        lambda d_size: local_training.steps(
            KEY,
            data(size, length)._replace(size=d_size),
            step,
            jnp.zeros(40),
            batch_size=4,
            **options,
        )
    )(jnp.int32(size))
    return np.asarray(seen), float(mean), int(count)


def test_an_epoch_sees_every_row_once():
    seen, mean, count = visits(10, 17, epochs=1)
    np.testing.assert_array_equal(seen[:10], 1)
    assert not seen[10:].any() and count == 3 and mean == sum(range(10)) / 3


def test_epochs_have_their_own_orders():
    orders = [
        local_training.shuffle(jax.random.fold_in(KEY, e), 20, jnp.int32(20))
        for e in range(2)
    ]
    assert not np.array_equal(*orders)


def test_shuffle_does_not_depend_on_padding():
    short, long = (
        local_training.shuffle(KEY, length, jnp.int32(9)) for length in (9, 30)
    )
    np.testing.assert_array_equal(short, long[:9])
    np.testing.assert_array_equal(np.sort(short), np.arange(9))


@pytest.mark.parametrize(
    "size, steps, expected", [(10, 7, 7), (3, 5, 5), (0, 5, 0), (10, 0, 0)]
)
def test_a_fixed_number_of_steps(size, steps, expected):
    seen, _, count = visits(size, 17, steps=steps)
    assert count == expected
    if size:
        assert seen[:size].max() - seen[:size].min() <= 1 + (size % 4 > 0)


def test_drop_last_drops_the_short_batch():
    seen, _, count = visits(10, epochs=1, drop_last=True)
    assert count == 2 and seen.sum() == 8


@pytest.mark.parametrize("size, expected", [(3, 0), (4, 7)])
def test_who_has_no_whole_batch_takes_none_of_the_steps(size, expected):
    seen, _, count = visits(size, 17, steps=7, drop_last=True)
    assert count == expected and seen.sum() == 4 * expected


def test_several_batches_a_step():
    seen, _, count = visits(10, epochs=2, batches_per_step=2)
    assert count == 6
    np.testing.assert_array_equal(seen[:10], 4)


@pytest.mark.parametrize("size", [1, 5, 10])
def test_no_batch_of_a_step_is_empty_and_the_first_is_the_usual_one(size):
    def rows(count):
        step = lambda key, seen, *batches: (
            [jnp.where(b.mask, b.row, -1) for b in batches],
            0.0,
        )
        start = [jnp.zeros(4, jnp.int32)] * count
        return local_training.steps(
            KEY,
            data(size, 17),
            step,
            start,
            batch_size=4,
            epochs=1,
            batches_per_step=count,
        )[0]

    (alone,), several = rows(1), rows(3)
    np.testing.assert_array_equal(several[0], alone)
    assert all((batch >= 0).sum() == (alone >= 0).sum() > 0 for batch in several)
    assert size < 10 or not np.array_equal(several[1], several[2])


def test_sweep_sums_every_row_once():
    total = local_training.sweep(
        data(10, 17), lambda b: {"x": jnp.sum(b.x), "n": jnp.sum(b.mask)}, 4
    )
    assert total == {"x": 45, "n": 10}


@pytest.mark.parametrize(
    "size, held", [(0, 0), (1, 0), (2, 1), (4, 1), (10, 2), (12, 2), (13, 3), (17, 3)]
)
def test_a_holdout_is_the_tail(size, held):
    rest, tail = local_training.holdout(data(size, 17), 0.2)
    assert int(tail.size) == held and int(rest.size) == size - held
    np.testing.assert_array_equal(tail.index[:held], np.arange(size - held, size))
    np.testing.assert_array_equal(rest.index[: size - held], np.arange(size - held))
    longer = local_training.holdout(data(size, 23), 0.2)[1]
    np.testing.assert_array_equal(longer.index[:held], tail.index[:held])


@pytest.mark.parametrize("fraction, held", [(0.0, 1), (1.0, 9), (0.5, 5)])
def test_a_holdout_leaves_and_takes_at_least_one(fraction, held):
    assert int(local_training.holdout(data(10), jnp.float32(fraction))[1].size) == held


def test_fold_takes_the_rows_in_order():
    def place(seen, batch):  # a row's place is the number of those before it
        before, order = seen
        return before + jnp.sum(batch.mask), order.at[
            jnp.where(batch.mask, batch.row, 99)
        ].set(before, mode="drop")

    total, batch_starts = local_training.fold(
        data(10, 17), place, (jnp.int32(0), jnp.full(17, -1)), 4
    )
    assert total == 10
    np.testing.assert_array_equal(batch_starts, [0] * 4 + [4] * 4 + [8] * 2 + [-1] * 7)


def test_an_empty_client_takes_no_step():
    seen, mean, count = visits(0, 5, epochs=3)
    assert count == 0 and mean == 0 and not seen.any()


def test_a_split_that_nobody_has():
    cohort = toy.cohort(toy.task(), range(2), key=KEY, evaluated=jnp.bool(True))

    def client(c):
        seen = local_training.sweep(c.val, lambda b: jnp.sum(b.mask), 4)
        _, _, count = local_training.steps(
            KEY, c.val, lambda key, n, b: (n + 1, 0), 0, batch_size=4, epochs=2
        )
        return seen, count

    assert toy.federation().val.index.shape == (toy.N, 0)
    np.testing.assert_array_equal(cohort.map(client), np.zeros((2, 2)))


def test_each_client_takes_its_own_steps_under_vmap():
    sizes = jnp.array([10, 0, 3])

    def one(size):
        step = lambda key, n, batch: (n + 1, jnp.sum(batch.mask))
        return local_training.steps(
            KEY,
            data(10)._replace(size=size),
            step,
            jnp.int32(0),
            batch_size=4,
            epochs=2,
        )

    done, _, count = jax.vmap(one)(sizes)
    np.testing.assert_array_equal(done, [6, 0, 2])
    np.testing.assert_array_equal(count, [6, 0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_rows_are_those_of_plain_indexing_for_one_client_for_many_and_for_data_sets_of_their_own(
    shape,
):
    x = jax.random.normal(KEY, (2, 50, *shape))
    index = jax.random.randint(KEY, (4, 6), 0, 50)
    np.testing.assert_array_equal(local_training._rows(x[0], index[0]), x[0][index[0]])
    np.testing.assert_array_equal(
        jax.vmap(local_training._rows, (None, 0))(x[0], index), x[0][index]
    )
    np.testing.assert_array_equal(
        jax.vmap(local_training._rows, (0, None))(x, index[0]), x[:, index[0]]
    )
    own = jax.jit(jax.vmap(local_training._rows))(x, index[:2])
    np.testing.assert_array_equal(own, jnp.stack([x[0][index[0]], x[1][index[1]]]))


@pytest.mark.parametrize(
    "sizes, rows, computed",
    [
        ([100, 99, 97], 104, 312),
        ([300] * 2, 104, 624),
        ([7, 7], 8, 16),
        ([1000, 30], 64, 1088),
        ([75, 19, 0], 8, 104),
    ],
)
def test_a_pass_over_training_sets_is_padded_little(sizes, rows, computed):
    assert evaluation.pass_size(np.array(sizes)) == rows
    assert sum(-(-n // rows) * rows for n in sizes) == computed


def test_statistics_over_clients_by_hand():
    # one client has none
    values = np.append(np.random.default_rng(0).permutation(np.arange(21) / 20), np.nan)
    weights = np.append(np.arange(1, 22), 1000)
    seen = values[:21]
    got = evaluation.statistics(values, weights)
    expected = {
        "macro": 0.5,
        "micro": seen @ weights[:21] / weights[:21].sum(),
        "std": np.sqrt(np.mean((seen - 0.5) ** 2)),
        "clients": 21,
    }
    # three clients are at least a tenth of 21
    assert got == pytest.approx(expected | {"worst10": 0.05, "best10": 0.95})
    twenty = evaluation.statistics(np.arange(20.0), np.ones(20))
    assert (twenty["worst10"], twenty["best10"]) == (0.5, 18.5)
    assert all(
        np.isnan(x)
        for x in evaluation.statistics(np.full(3, np.nan), np.ones(3)).values()
    )


def test_each_step_and_each_of_its_batches_has_random_numbers_of_its_own():
    task = toy.task(
        batch_size=4, epochs=2, augment=lambda key, x: jax.random.uniform(key, x.shape)
    )

    def step(key, carry, one, two):
        n, seen, drawn = carry
        drawn = drawn.at[n].set(
            jnp.stack([one.x[0, 0], two.x[0, 0], jax.random.uniform(key)])
        )
        return (n + 1, seen, drawn), 0.0

    start = jnp.int32(0), 0, jnp.zeros((6, 3))
    (_, _, drawn), _, count = local_training.work(
        KEY, data(10), step, start, task, batches_per_step=2
    )
    assert count == 6 and len(np.unique(drawn)) == 18
