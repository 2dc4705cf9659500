"""Data sets: loading, the cache, and errors for bad input."""

import os
import re
import shutil
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import prepared
import pytest

from fedjax_pfl import cache
from fedjax_pfl.data import datasets, loading
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.data.sources import tfds, toys
from fedjax_pfl.errors import InputError


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def npz(tmp_path):
    """Writes arrays to an .npz and returns its name as a data set."""

    def write(**arrays):
        np.savez(tmp_path / "mine.npz", **arrays)
        return f"npz:{tmp_path / 'mine.npz'}"

    return write


def _real(name):
    """The folder with the real data set, or a skip that says what is missing."""
    data_dir = os.environ.get("TFDS_DATA_DIR")
    if not data_dir or not (Path(data_dir) / name).is_dir():
        pytest.skip(f"TFDS_DATA_DIR={data_dir} does not hold {name}")
    return data_dir


# --- embedded data sets
# -----------------------------------------------------------------------------------------------


def test_digits():
    data = loading.load("digits")
    assert (
        data.x.shape == (1797, 8, 8, 1)
        and data.x.dtype == np.uint8
        and data.y.dtype == np.int32
    )
    assert data.num_train == 1797 and set(data.y) == set(range(10))
    prepared_x = data.prepare(jnp.asarray(data.x))
    assert prepared_x.dtype == jnp.float32 and (prepared_x.min(), prepared_x.max()) == (
        -1,
        1,
    )


def test_synthetic_is_reproducible_balanced_and_learnable():
    one, two = loading.load("synthetic"), loading.load("synthetic")
    assert np.array_equal(one.x, two.x) and not np.array_equal(
        one.x, toys.synthetic(seed=1).x
    )
    assert one.x.dtype == np.float32 and np.ptp(np.bincount(one.y)) == 0
    train, test = slice(0, one.num_train), slice(one.num_train, None)
    means = np.stack(
        [one.x[train][one.y[train] == label].mean(axis=0) for label in range(10)]
    )
    guess = np.argmin(((one.x[test][:, None] - means) ** 2).sum(axis=(2, 3, 4)), axis=1)
    assert np.mean(guess == one.y[test]) > 0.95


def test_images_are_prepared_to_minus_one_and_one():
    raw = jnp.array([0, 127.5, 255])
    assert np.allclose(datasets.prepare_images(raw), [-1, 0, 1])


@pytest.mark.parametrize("fraction", [0.001, 0.25, 0.5, 1.0])
def test_subset_is_stratified(fraction):
    data = toys.synthetic(1000, 7)
    part = datasets.subset(data, fraction, seed=3)
    for side in (slice(0, data.num_train), slice(data.num_train, None)):
        mine = (
            slice(0, part.num_train) if side.start == 0 else slice(part.num_train, None)
        )
        sizes = np.bincount(data.y[side], minlength=7)
        assert np.array_equal(
            np.bincount(part.y[mine], minlength=7),
            np.maximum(np.rint(fraction * sizes), 1),
        )
    assert np.array_equal(part.x, datasets.subset(data, fraction, seed=3).x)


def test_subset_keeps_inputs_and_labels_together():
    data = toys.synthetic(200, 4, (2,))
    part = datasets.subset(data, 0.3, seed=0)
    label = {row.tobytes(): y for row, y in zip(data.x, data.y, strict=True)}
    assert all(label[row.tobytes()] == y for row, y in zip(part.x, part.y, strict=True))


# --- a user's arrays
# --------------------------------------------------------------------------------------------------


def test_npz_images(npz):
    x, y = (
        np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4),
        np.array([0, 1, 2, 0, 1, 2]),
    )
    data = loading.load(npz(x=x, y=y, x_test=x[:2], y_test=y[:2]))
    # grey images get a channel axis
    assert data.x.shape == (8, 4, 4, 1) and data.x.dtype == np.uint8
    assert data.num_train == 6 and data.num_classes == 3 and data.y.dtype == np.int32
    assert float(data.prepare(jnp.asarray(data.x)).min()) == -1


def test_npz_floats_pass_unchanged(npz):
    x = np.random.default_rng(0).normal(size=(6, 3))
    data = loading.load(npz(x=x, y=np.array([0, 1, 0, 1, 0, 1], np.uint8)))
    assert data.x.dtype == np.float32 and data.num_train == 6
    assert np.array_equal(data.prepare(jnp.asarray(data.x)), x.astype(np.float32))


_X, _Y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
_NAN = np.where(np.arange(8).reshape(4, 2) == 5, np.nan, 0.0)
BAD_ARRAYS = {
    "negative label": (
        {"x": _X, "y": _Y - 1},
        r"y must be labels counted from 0, got -1",
    ),
    "labels not integers": (
        {"x": _X, "y": _Y / 2},
        r"y must be 4 integer labels, one per input, got float64\[4\]",
    ),
    "labels one-hot": (
        {"x": _X, "y": np.eye(4, dtype=int)},
        r"y must be 4 integer labels, one per input, got int64\[4, 4\]",
    ),
    "lengths": (
        {"x": _X, "y": _Y[:3]},
        r"y must be 4 integer labels, one per input, got int64\[3\]",
    ),
    "test lengths": (
        {"x": _X, "y": _Y, "x_test": _X, "y_test": _Y[:2]},
        r"y_test must be 4 integer labels",
    ),
    "NaN": ({"x": _NAN, "y": _Y}, r"x must be finite in float32, row 2 is not"),
    "infinite": (
        {"x": _X + np.inf, "y": _Y},
        r"x must be finite in float32, row 0 is not",
    ),
    "infinite in float32": (
        {"x": np.full((4, 2), 1e300), "y": _Y},
        r"x must be finite in float32",
    ),
    "no examples": (
        {"x": _X[:0], "y": _Y[:0]},
        r"x must be \[examples, ...\] and not empty, got shape \(0, 2\)",
    ),
    "scalars": (
        {"x": _X[:, 0], "y": _Y},
        r"x must be \[examples, ...\] and not empty, got shape \(4,\)",
    ),
    "no y": ({"x": _X}, r"must have the arrays x, y, got x"),
    "nothing": ({}, r"must have the arrays x, y, got none"),
    "half a test set": (
        {"x": _X, "y": _Y, "x_test": _X},
        r"only one of x_test and y_test",
    ),
    "test shape": (
        {"x": _X, "y": _Y, "x_test": _X[:, :1], "y_test": _Y},
        r"x and x_test must be alike, got float32\[2\] and float32\[1\] per row",
    ),
    "objects": (
        {"x": np.array([[1, 2], [3, None]], object), "y": _Y[:2]},
        r"cannot be read \(.*Object arrays",
    ),
    "text": (
        {"x": np.array([["a"], ["b"]]), "y": _Y[:2]},
        r"x must be uint8 images or real numbers, got <U1",
    ),
    "complex": ({"x": _X * 1j, "y": _Y}, r"real numbers, got complex64"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays(case, npz):
    arrays, sentence = BAD_ARRAYS[case]
    with pytest.raises(InputError, match=sentence) as error:
        loading.load(npz(**arrays))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"not an npz", b"PK\x03\x04 half a zip", b"\x93NUMPY\x01\x00"]
)
def test_file_that_is_no_npz(tmp_path, content):
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read \("):
        loading.load(f"npz:{tmp_path / 'mine.npz'}")


def test_a_folder_of_npy_or_npz_is_the_npz_of_the_same_arrays(tmp_path, npz):
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.integers(0, 256, (6, 4, 4), np.uint8),
        "y": np.arange(6) % 3,
        "x_test": rng.integers(0, 256, (3, 4, 4), np.uint8),
        "y_test": np.arange(3),
    }
    wanted = loading.load(npz(**arrays))
    for name in ("npy", "split", "one"):
        (tmp_path / name).mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / f"npy/{name}.npy", array)
    np.savez(tmp_path / "split/train.npz", x=arrays["x"], y=arrays["y"])
    np.savez(tmp_path / "split/test.npz", x=arrays["x_test"], y=arrays["y_test"])
    np.savez(tmp_path / "one/mine.npz", **arrays)
    for name in ("npy", "split", "one"):
        same_data(loading.load(f"npz:{tmp_path / name}"), wanted)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="must have the arrays x, y, got none"):
        loading.load(f"npz:{tmp_path / 'empty'}")


def same_data(found, wanted):
    for name in ("x", "y"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype
    assert found.num_train == wanted.num_train
    assert found.num_classes == wanted.num_classes
    assert found.prepare is wanted.prepare


class Split:
    """The part of a split of Hugging Face's `datasets` that is read: columns, whose
    images are decoded when they are read, and features."""

    def __init__(self, num_classes, **columns):
        self.columns, self.column_names = columns, list(columns)
        label = type("ClassLabel", (), {"num_classes": num_classes})()
        self.features = dict.fromkeys(columns) | {"label": label, "kind": label}

    def __getitem__(self, name):
        return iter(self.columns[name])


def test_hugging_face_data_sets():
    image = pytest.importorskip("PIL.Image")
    x = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), np.uint8)
    y = [0, 1, 2, 0, 1, 2]
    pictures = [image.fromarray(each) for each in x]
    wanted = datasets.from_arrays(x, np.array(y), x[:2], np.array(y[:2]), num_classes=4)
    train = Split(4, img=pictures, label=y)
    both = {"train": train, "test": Split(4, img=pictures[:2], label=y[:2])}
    same_data(loading.load(both), wanted)
    same_data(loading.load(lambda: both), wanted)
    with pytest.raises(InputError, match="`tokenizer` has no effect on a data set"):
        loading.load(both, tokenizer="word")
    alone = datasets.from_arrays(x, np.array(y), num_classes=4)
    same_data(loading.load(train), alone)
    named = Split(4, picture=pictures, kind=y)
    same_data(loading.load(named, columns=("picture", "kind")), alone)
    with pytest.raises(InputError, match=r"`columns` must name .* picture, kind"):
        loading.load(named)
    owned = Split(4, img=pictures, label=y, user=list("aabbab"))
    owned.features["user"] = type("Value", (), {"dtype": "string"})()
    users = loading.load(owned).columns
    assert list(users) == ["user"] and users["user"].tolist() == list("aabbab")
    with pytest.raises(InputError, match=r"must have a split train, .* got validation"):
        loading.load({"validation": train})
    pictures[0] = pictures[0].resize((5, 4))
    with pytest.raises(InputError, match="img must have one shape"):
        loading.load(train)


def test_images_of_hugging_face_are_pixels_whatever_their_mode():
    image = pytest.importorskip("PIL.Image")
    grey = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    colour = np.stack([grey, grey + 1, grey + 2], axis=2)
    modes = {
        "P": colour,
        "RGBA": colour,
        "L": grey[..., None],
        "I;16": grey[..., None],
    }
    for mode, wanted in modes.items():
        source = image.fromarray(colour if wanted is colour else grey)
        made = source.quantize(256) if mode == "P" else source.convert(mode)
        data = loading.load(Split(2, img=[made] * 2, label=[0, 1]))
        assert data.x.dtype == (np.float32 if mode == "I;16" else np.uint8)
        got = data.x.reshape(2, 4, 4, -1)  # a channel is added to bytes alone
        np.testing.assert_array_equal(got, np.stack([wanted] * 2))


@pytest.mark.parametrize("seed", [0, 1])
def test_functions_return_whatever_can_be_loaded(seed):
    def arrays(seed):
        return np.full((4, 2), seed, np.float32), _Y

    wanted = datasets.from_arrays(*arrays(seed))
    for source in (
        arrays,
        lambda seed: dict(zip("xy", arrays(seed), strict=True)),
        lambda: wanted,
        arrays(seed),
        wanted,
    ):
        same_data(loading.load(source, seed=seed), wanted)
    with pytest.raises(InputError, match=r"must be a .*Dataset, arrays .*list"):
        loading.load(lambda: [1, 2])


BAD_CALLS = {
    "unknown data set": (
        lambda: loading.load("mnits"),
        r"Unknown data set 'mnits': did you mean 'mnist'\?",
    ),
    "pattern": (lambda: loading.load("npz:PATH"), r"PATH cannot be read"),
    "no file": (
        lambda: loading.load("npz:/no/such.npz"),
        r"/no/such.npz cannot be read",
    ),
    "a name that is too long": (
        lambda: loading.load("npz:" + 300 * "x"),
        r"cannot be read \(.*File name too long",
    ),
    "fraction 0": (
        lambda: datasets.subset(toys.synthetic(20, 2), 0, 0),
        r"`data_fraction` must be in \(0,",
    ),
    "fraction 2": (
        lambda: datasets.subset(toys.synthetic(20, 2), 2, 0),
        r"`data_fraction` must be in",
    ),
    "fraction nan": (
        lambda: datasets.subset(toys.synthetic(20, 2), np.nan, 0),
        r"`data_fraction` must be in",
    ),
    "few examples": (
        lambda: toys.synthetic(5, 10),
        r"`num_examples` must be in",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls(case):
    call, sentence = BAD_CALLS[case]
    with pytest.raises(InputError, match=sentence):
        call()


# --- prepared TFDS data sets
# ------------------------------------------------------------------------------------------


def _pictures(n, shape):
    return np.random.default_rng(0).integers(0, 256, (n, *shape), np.uint8)


def test_tfds_letters_start_at_zero(tmp_path):
    x, y = _pictures(30, (28, 28, 1)), np.arange(30) % 26 + 1
    prepared.dataset(tmp_path, "emnist/letters", x, {"label": y}, 24)
    data = loading.load("emnist/letters", str(tmp_path))
    assert np.array_equal(data.x, x) and np.array_equal(data.y, y - 1)
    assert data.num_classes == 26 and data.num_train == 24 and data.superclass is None


def test_tfds_superclasses(tmp_path):
    fine = np.arange(110) % 100
    prepared.dataset(
        tmp_path,
        "cifar100",
        _pictures(110, (32, 32, 3)),
        {"label": fine, "coarse_label": fine // 5},
        100,
    )
    data, coarse = (
        loading.load("cifar100", str(tmp_path)),
        loading.load("cifar100_coarse", str(tmp_path)),
    )
    assert (
        np.array_equal(data.superclass, np.arange(100) // 5) and data.num_classes == 100
    )
    assert (
        np.array_equal(coarse.y, data.superclass[data.y]) and coarse.num_classes == 20
    )
    # both names share one decoded copy
    assert len(list(cache.folder().iterdir())) == 1


def test_cache_is_used_and_renewed_with_the_data(tmp_path, monkeypatch):
    x, y = _pictures(12, (28, 28, 1)), np.arange(12) % 10
    folder = prepared.dataset(tmp_path, "mnist", x, {"label": y}, 8)
    decoded = []
    decode = tfds._decode
    monkeypatch.setattr(
        tfds, "_decode", lambda *args: decoded.append(1) or decode(*args)
    )

    def load():
        assert np.array_equal(loading.load("mnist", str(tmp_path)).x, x)
        return len(decoded)

    assert load() == 1 and load() == 1
    # prepared anew
    os.utime(folder / "dataset_info.json", (time.time() + 9, time.time() + 9))
    assert load() == 2


def test_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path, monkeypatch):
    prepared.dataset(
        tmp_path, "mnist", _pictures(12, (28, 28, 1)), {"label": np.arange(12) % 10}, 8
    )
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "file"))
    assert len(loading.load("mnist", str(tmp_path)).y) == 12


def test_newest_version_is_read(tmp_path):
    for version, label in (("3.0.9", 1), ("3.0.10", 2)):
        prepared.dataset(
            tmp_path,
            "mnist",
            _pictures(4, (28, 28, 1)),
            {"label": np.full(4, label)},
            2,
            version,
        )
    assert set(loading.load("mnist", str(tmp_path)).y) == {2}


def test_tfds_not_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    command = (
        f"tfds build emnist/letters --file_format=array_record --data_dir={tmp_path}"
    )
    with pytest.raises(
        InputError,
        match=f"'emnist/letters' is not prepared in .*: run .*{re.escape(command)}",
    ):
        loading.load("emnist/letters")
    with pytest.raises(InputError, match="tfds build cifar100 --file_format"):
        loading.load("cifar100_coarse")


def test_tfds_with_impossible_labels(tmp_path):
    prepared.dataset(
        tmp_path,
        "mnist",
        _pictures(4, (28, 28, 1)),
        {"label": np.array([0, 11, 0, 0])},
        2,
    )
    with pytest.raises(
        InputError,
        match=r"mnist: labels must be below num_classes=10, got 11",
    ):
        loading.load("mnist", str(tmp_path))


@pytest.mark.parametrize("missing", ["tensorflow_datasets", "array_record"])
def test_without_tfds_only_its_data_sets_fail(tmp_path, monkeypatch, missing):
    folder = prepared.dataset(
        tmp_path, "mnist", _pictures(4, (28, 28, 1)), {"label": np.arange(4)}, 2
    )

    def without_array_record(_):
        raise ImportError("No module named 'array_record'")

    if missing == "array_record":  # which tensorflow_datasets imports on first use
        monkeypatch.setattr(
            "tensorflow_datasets.builder_from_directory", without_array_record
        )
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        InputError,
        match=r"needs tensorflow_datasets and array_record .*: run pip install",
    ):
        loading.load("mnist", str(tmp_path))
    assert len(loading.load("digits").y) == 1797
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "name", ["cifar10", pytest.param("cifar100", marks=pytest.mark.slow)]
)
def test_real_data(name):
    data = loading.load(name, _real(name))
    assert data.x.shape[1:] == (32, 32, 3) and data.x.dtype == np.uint8
    assert set(data.y) == set(range(data.num_classes)) and 0 < data.num_train < len(
        data.y
    )
    if name == "cifar100":
        assert np.array_equal(np.bincount(data.superclass), np.full(20, 5))
        assert np.array_equal(
            loading.load("cifar100_coarse", _real(name)).y, data.superclass[data.y]
        )


# --- to the device
# ----------------------------------------------------------------------------------------------------


def test_federate():
    data = toys.synthetic(200, 4, (3,))
    p = partition(data, "iid", num_clients=10, seed=0)
    f = federate(data, p)
    assert (
        f.train.index.shape == (10, 15)
        and f.test.index.shape == (10, 5)
        and f.val.index.shape == (10, 0)
    )
    assert (
        np.array_equal(f.class_counts.sum(axis=1), f.train.size)
        and f.class_counts.dtype == jnp.int32
    )
    assert (
        f.examples.x.shape == (200, 3)
        and f.train.index.dtype == f.train.size.dtype == f.examples.y.dtype == jnp.int32
    )
    assert f.val.size.shape == (10,) and not f.val.size.any()


def test_labels_are_int32_whatever_integers_they_were():
    data = toys.synthetic(60, 3, (2,))
    p = partition(data, "iid", num_clients=3, seed=0)
    made = federate(
        data._replace(y=data.y.astype(np.uint8)),
        p,
        public=data._replace(y=data.y.astype(np.uint8)),
    )
    assert made.examples.y.dtype == made.public.y.dtype == jnp.int32


def test_tfds_without_the_splits_that_are_read(tmp_path):
    folder = prepared.dataset(
        tmp_path, "mnist", _pictures(4, (28, 28, 1)), {"label": np.arange(4)}, 2
    )
    info = folder / "dataset_info.json"
    info.write_text(
        info.read_text()
        .replace('"train"', '"validation"')
        .replace('"test"', '"holdout"')
    )
    with pytest.raises(InputError, match="'mnist' must have a split train or test"):
        loading.load("mnist", str(tmp_path))


def test_a_line_about_a_data_set():
    digits = loading.load("digits")
    assert datasets.describe(digits) == (
        "digits: uint8[8, 8, 1] in [0, 16], 10 classes, 1,797 examples"
    )


GREY = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1))
UNUSUAL = [  # inputs and the warning; none for usual ones
    (GREY.astype(np.uint8), None),
    (GREY.astype(np.float32) / 255, None),
    (GREY.astype(np.float32) / 100 - 1, None),
    (GREY.astype(np.int16), "integers are taken as plain numbers"),
    (GREY.reshape(6, 64), "integers are taken as plain numbers"),
    (GREY.astype(np.float32), "floats are not scaled"),
    (-GREY.astype(np.float64), "floats are not scaled"),
    ((GREY > 9).astype(np.uint8), "nearly black"),
    (np.zeros((6, 4), np.float32), "all inputs are equal"),
    (GREY.reshape(6, 1, 8, 8).astype(np.uint8), "channels come first"),
]


@pytest.mark.parametrize(("x", "text"), UNUSUAL)
def test_unusual_inputs_are_named(x, text):
    found = datasets.unusual(loading.load((x, np.arange(6) % 2)), as_numbers=True)
    assert found == [] if text is None else len(found) == 1 and text in found[0]


def test_unusual_labels_are_named():
    x = np.random.default_rng(0).normal(size=(6, 4))
    gap = datasets.unusual(loading.load((x, np.arange(6) % 2 * 3)), as_numbers=True)
    assert gap == ["dataset: 2 classes have no example."]
    one = datasets.unusual(loading.load((x, np.zeros(6, int))), as_numbers=True)
    assert one == ["dataset: there is a single class."]


def test_tokens_are_usual_for_an_own_network():
    tokens = loading.load((GREY.reshape(6, 64), np.arange(6) % 2))
    assert datasets.unusual(tokens, as_numbers=False) == []
