"""The marks of FedDVA's heterogeneous inputs: pixels, who gets which, and what stays as
it was."""

import numpy as np
import pytest

from fedjax_pfl.data import datasets, loading, marks
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.data.sources import toys
from fedjax_pfl.errors import InputError

KINDS = marks.MARKS[1:]


def images(n=60, side=28, channels=1):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 200, (n, side, side, channels), np.uint8)
    x[0] = 255
    y = np.arange(n, dtype=np.int32) % 3
    return datasets.Dataset("noise", x, y, n, 3, datasets.prepare_images)


@pytest.mark.parametrize("kind", KINDS)
def test_at_most_32_points_inside_the_border(kind):
    drawn = marks.draw(kind, np.linspace(0, 1, 50, endpoint=False), 28)
    rows, columns = np.nonzero(drawn.any(axis=0))
    assert (
        drawn.shape == (50, 28, 28)
        and drawn.sum(axis=(1, 2)).max() <= 32
        and drawn.sum(axis=(1, 2)).min() >= 20
    )
    assert min(rows.min(), columns.min()) >= 1 and max(rows.max(), columns.max()) <= 26
    assert len({picture.tobytes() for picture in drawn}) > 40  # the phase moves it


def test_a_sine_of_phase_zero_point_by_point():
    (drawn,) = marks.draw("horizontal_sine", np.zeros(1), 28)
    expected = np.zeros((28, 28), bool)
    for i in range(32):
        expected[round(1 + 12.5 + 12.5 * np.sin(0.2 * i)), round(1 + i * 25 / 32)] = (
            True
        )
    assert np.array_equal(drawn, expected)
    assert np.array_equal(marks.draw("vertical_sine", np.zeros(1), 28)[0], expected.T)


def test_an_ellipse_has_its_axes_and_turns_by_half_a_turn():
    flat, upright = marks.draw("ellipse", np.array([0, 0.5]), 28)
    rows, columns = np.nonzero(flat)
    assert (np.ptp(rows), np.ptp(columns)) == (10, 25)  # 2 * 5.45 and 2 * 12.5
    assert np.ptp(np.nonzero(upright)[0]) == 25 and np.ptp(np.nonzero(upright)[1]) == 10


def test_types_go_round_and_an_image_is_the_larger_of_both():
    data = images()
    p = partition(data, "iid", num_clients=6, seed=0)
    out = marks.mark(data, p, 1)
    assert out.marks == (*marks.MARKS, *marks.MARKS[:2]) and out.dataset.y is data.y
    assert (out.dataset.x >= data.x).all() and out.dataset.x.dtype == np.uint8
    for client, kind in enumerate(out.marks):
        for rows, size in (
            (p.train[client], p.train_sizes[client]),
            (p.test[client], p.test_sizes[client]),
        ):
            rows = rows[:size][rows[:size] > 0]  # image 0 is white
            changed = (out.dataset.x[rows] != data.x[rows]).sum(axis=(1, 2, 3))
            assert (changed == 0).all() if kind == "plain" else (changed >= 20).all()
            assert set(out.dataset.x[rows][out.dataset.x[rows] != data.x[rows]]) <= {
                255
            }


def test_a_mark_depends_on_seed_row_and_type_only():
    data = images()
    few, many = (partition(data, "iid", num_clients=n, seed=0) for n in (4, 8))
    one, again, other = (marks.mark(data, few, seed).dataset.x for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    type_of = lambda p: {
        r: k % 4 for k in range(len(p.train)) for r in p.train[k, : p.train_sizes[k]]
    }
    a, b = type_of(few), type_of(many)
    same = [row for row in a if b.get(row) == a[row] != 0]
    assert same and np.array_equal(one[same], marks.mark(data, many, 1).dataset.x[same])


@pytest.mark.parametrize("side, channels", [(8, 1), (32, 3), (64, 3)])
def test_other_sizes_and_colours(side, channels):
    data = images(24, side, channels)
    out = marks.mark(data, partition(data, "iid", num_clients=4, seed=0), 0).dataset.x
    changed = out != data.x
    assert (
        changed.any()
        and not changed[:, [0, -1]].any()
        and not changed[:, :, [0, -1]].any()
    )
    assert (changed == changed[..., :1]).all()


def test_floats_and_other_ranges_take_their_own_largest_value():
    data = loading.load("digits")
    out = marks.mark(data, partition(data, "iid", num_clients=4, seed=0), 0).dataset
    assert out.x.max() == 16 and out.x.dtype == np.uint8
    data = toys.synthetic()
    out = marks.mark(data, partition(data, "iid", num_clients=4, seed=0), 0).dataset
    assert (
        out.x.max() == data.x.max()
        and out.x.dtype == np.float32
        and (out.x >= data.x).all()
    )


def test_what_cannot_be_marked_is_said():
    data = images()
    p = partition(data, "iid", num_clients=4, seed=0)
    with pytest.raises(InputError, match="square images of at least 8 pixels"):
        marks.mark(data._replace(x=data.x[:, :20]), p, 0)
