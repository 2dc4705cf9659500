"""Data sets of files: folders of images, tables, domains, and shifts of clients."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from fedjax_pfl import augment, simulate
from fedjax_pfl.data import (
    datasets,
    federate,
    loading,
    partitioners,
    preparation,
    shifts,
)
from fedjax_pfl.data.partition import of_clients
from fedjax_pfl.data.sources import images
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.config import Config


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))


def write(path, value, size=(6, 6), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def folder(root, clients=("a", "b"), classes=("cat", "dog"), count=4):
    """CLIENT/CLASS/*.png, the red of a pixel is the number of the file."""
    for i, client in enumerate(clients):
        for j, label in enumerate(classes):
            for k in range(count):
                write(root / client / label / f"{k}.png", 100 * i + 20 * j + k)
    return root


def test_a_folder_per_client_gives_its_classes_and_its_partition(tmp_path):
    data = loading.load(f"imagefolder:{folder(tmp_path / 'photos')}")
    assert data.x.shape == (16, 6, 6, 3) and data.x.dtype == np.uint8
    assert data.num_classes == 2 and data.num_train == 16
    red = data.x[:, 0, 0, 0]
    assert np.array_equal(data.y, (red % 100) // 20)
    assert np.array_equal(data.columns["client"] == "b", red >= 100)
    again = loading.load(f"imagefolder:{tmp_path / 'photos'}")  # from the cache
    assert np.array_equal(again.x, data.x)
    p = partitioners.partition(data, "natural:client", num_clients=None, seed=0)
    assert p.train_sizes.tolist() == [6, 6]


def test_a_damaged_image_is_named(tmp_path):
    root = folder(tmp_path / "photos", count=1)
    (root / "b" / "dog" / "0.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"b/dog/0\.png cannot be read as an image"):
        images.load(str(root))


def test_images_of_several_sizes_need_a_size(tmp_path):
    write(tmp_path / "x" / "0.png", 9, mode="L")
    write(tmp_path / "y" / "0.png", 9, size=(8, 6), mode="L")
    with pytest.raises(
        InputError, match=r"y/0\.png is 6x8 pixels, .* Give an image size"
    ):
        images.load(str(tmp_path))
    data = images.load(str(tmp_path), image_size=5)
    assert data.x.shape == (2, 5, 5, 1) and data.y.tolist() == [0, 1]


def test_splits_and_the_layout_of_tiny_imagenet(tmp_path):
    for i, label in enumerate(("n01", "n02")):
        write(tmp_path / "tiny" / "train" / label / "images" / "0.JPEG", 9)
        write(tmp_path / "tiny" / "val" / "images" / f"val_{i}.JPEG", 9, mode="L")
    rows = "val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n"
    (tmp_path / "tiny" / "val" / "val_annotations.txt").write_text(rows)
    data = images.load(str(tmp_path / "tiny"))
    assert data.num_train == 2 and data.y.tolist() == [0, 1, 1, 0]
    assert data.x.shape[3] == 3  # one image is grey
    write(tmp_path / "plain" / "train" / "a" / "0.png", 1)
    write(tmp_path / "plain" / "test" / "a" / "0.png", 2)
    assert images.load(str(tmp_path / "plain")).num_train == 1
    write(tmp_path / "plain" / "train" / "c" / "a" / "0.png", 1)
    with pytest.raises(InputError, match="both in CLASS/ and in CLIENT/CLASS/"):
        images.load(str(tmp_path / "plain"))


def test_augmented_images_are_windows_of_padded_ones():
    draw = np.random.default_rng(0).integers(1, 256, (3, 8, 8, 1)).astype(np.uint8)
    data = datasets.from_arrays(draw, np.arange(3))
    x = np.asarray(data.prepare(jnp.asarray(draw)))
    found = np.asarray(augment.augmentation("crop_flip", data)(jax.random.key(1), x))
    padded = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)), constant_values=-1)
    for i in range(3):
        windows = [padded[i, a : a + 8, b : b + 8] for a in range(9) for b in range(9)]
        windows += [w[:, ::-1] for w in windows]
        assert sum(np.array_equal(found[i], w) for w in windows) == 1
    flipped = np.asarray(augment.augmentation("flip", data)(jax.random.key(0), x))
    assert all(
        np.array_equal(a, b) or np.array_equal(a, b[:, ::-1])
        for a, b in zip(flipped, x, strict=True)
    )
    assert augment.augmentation("none", data) is None
    with pytest.raises(InputError, match="augment=flip needs images"):
        augment.augmentation("flip", loading.load("diabetes"))


def test_tables_have_inputs_columns_and_targets(tmp_path):
    rows = [
        {
            "sensor": 1,
            "heat": 1.0,
            "wind": 5,
            "room": "x",
            "target": 0.5,
            "split": "train",
        },
        {
            "sensor": 1,
            "heat": 3.0,
            "wind": 5,
            "room": "y",
            "target": 1.5,
            "split": "train",
        },
        {
            "sensor": 2,
            "heat": 9.0,
            "wind": 5,
            "room": "y",
            "target": 2.5,
            "split": "test",
        },
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = loading.load(f"table:{path}")
    assert data.num_train == 2 and data.num_classes == 1
    np.testing.assert_allclose(data.x, [[-1, 0], [1, 0], [7, 0]])
    assert data.y.dtype == np.float32 and data.y.tolist() == [[0.5], [1.5], [2.5]]
    assert data.columns["sensor"].tolist() == ["1", "1", "2"]
    (tmp_path / "t.csv").write_text("a,label\n1,no\n2,yes\n")
    data = loading.load(f"table:{tmp_path / 't.csv'}")
    assert data.y.tolist() == [0, 1] and data.num_classes == 2
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="must have a column `label`, or `target`"):
        loading.load(f"table:{tmp_path / 't.csv'}")


PIECE = (
    """1,,true,007,NA,0
2,,false,007,NA,1
""",
    """3.5,4,,8,x,0
4,5,true,8,x,1
5,6,true,8,x,1
""",
)


def test_a_long_table_is_a_short_one_again_and_again(tmp_path, monkeypatch):
    """Pandas types a long file piece by piece, and pieces may differ in type."""
    short, long = tmp_path / "short.csv", tmp_path / "long.csv"
    options = {"missing": "indicator", "categories": "onehot"}
    for path, times in ((short, 1), (long, 20_000)):
        rows = "".join(piece * times for piece in PIECE)
        path.write_text("a,b,on,site,kind,label\n" + rows)
    few, many = (loading.load(f"table:{path}", **options) for path in (short, long))
    np.testing.assert_allclose(few.x, many.x[[0, 1, -3, -2, -1]], rtol=1e-5)
    for one, other in zip(few.inputs, many.inputs, strict=True):
        assert one._replace(mean=0, scale=0, fill=0) == other._replace(
            mean=0, scale=0, fill=0
        )
    assert [x.name for x in many.inputs] == ["a", "b", "on", "kind"]
    assert many.inputs[3].categories == ("NA", "x")
    assert many.columns["site"][[0, 1, -1]].tolist() == ["007", "007", "8"]
    monkeypatch.setattr(preparation, "_CACHED", 3)
    np.testing.assert_array_equal(
        preparation.apply(many.inputs, few.cells.inputs), many.x[[0, 1, -3, -2, -1]]
    )
    with open(long, "a") as file:
        file.write("6,six,true,8,x,1\n")
    with pytest.raises(
        InputError, match=r"b of row 100001 must be a number, got 'six'"
    ):
        loading.load(f"table:{long}", **options)


def test_columns_of_an_npz_divide_it(tmp_path):
    x, user = np.zeros((8, 3), np.float32), np.repeat(["a", "b"], 4)
    np.savez(tmp_path / "u.npz", x=x, y=np.arange(8) % 2, user=user)
    data = loading.load(f"npz:{tmp_path / 'u.npz'}")
    p = partitioners.partition(data, "natural:user", num_clients=None, seed=0)
    assert p.train_sizes.tolist() == [3, 3]
    np.savez(tmp_path / "v.npz", x=x, y=np.arange(8) % 2, user=user[:3])
    with pytest.raises(InputError, match="column user must have 8 values"):
        loading.load(f"npz:{tmp_path / 'v.npz'}")


def test_domains_become_one_data_set_of_one_shape(tmp_path):
    grey = np.full((4, 6, 6), 255, np.uint8)
    colour = np.zeros((6, 3, 3, 3), np.uint8)
    np.savez(tmp_path / "g.npz", x=grey, y=[0, 1, 0, 1], x_test=grey[:2], y_test=[0, 1])
    np.savez(tmp_path / "c.npz", x=colour, y=[0, 1, 0, 1, 0, 1])
    names = f"npz:{tmp_path / 'g.npz'},npz:{tmp_path / 'c.npz'}"
    with pytest.raises(InputError, match="other names"):
        loading.load(f"domains:npz:{tmp_path / 'g.npz'},npz:{tmp_path / 'g.npz'}")
    data = loading.load(f"domains:{names}")
    assert data.x.shape == (12, 6, 6, 3) and data.num_train == 10
    assert data.columns["domain"].tolist() == ["g"] * 4 + ["c"] * 6 + ["g"] * 2
    assert (data.x[:4] == 255).all() and (data.x[4:10] == 0).all()
    small = loading.load(f"domains:{names}", image_size=4)
    assert small.x.shape == (12, 4, 4, 3)


def test_usps_is_read_from_h5(tmp_path):
    h5py = pytest.importorskip(
        "h5py", reason="h5py is not there: pip install -e '.[data]'"
    )
    draw = np.random.default_rng(0)
    parts = {"train": draw.random((20, 256)), "test": draw.random((5, 256))}
    with h5py.File(tmp_path / "usps.h5", "w") as file:
        for split, x in parts.items():
            file[f"{split}/data"], file[f"{split}/target"] = x, np.arange(len(x)) % 10
    data = loading.load(f"usps:{tmp_path / 'usps.h5'}")
    assert data.x.shape == (25, 16, 16, 1) and data.x.dtype == np.uint8
    assert data.num_train == 20 and data.num_classes == 10
    assert np.array_equal(data.y[20:], np.arange(5))
    whole = np.concatenate([*parts.values()]).reshape(25, 16, 16, 1)
    np.testing.assert_allclose(data.x / 255, whole, atol=0.5 / 255)
    (tmp_path / "usps.h5").write_bytes(b"no")
    with pytest.raises(InputError, match=r"usps\.h5 cannot be read"):
        loading.load(f"usps:{tmp_path / 'usps.h5'}")


def test_usps_without_h5py_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[data\]' adds it"):
        loading.load("usps:usps.h5")


def shifted(spec, clients=4):
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (8, 4, 4, 1)).astype(np.uint8)
    data = datasets.from_arrays(x, np.arange(8) % 3)
    rows = [[2 * i, 2 * i + 1] for i in range(clients)]
    p = of_clients([r[:1] for r in rows], [r[1:] for r in rows])
    return data, shifts.shift(data, p, spec, 0)


def test_each_client_has_its_own_shift():
    data, found = shifted("rotate:0,90,180,270")
    for i in range(8):
        assert np.array_equal(found.x[i], np.rot90(data.x[i], i // 2))
    data, found = shifted("label_offset:0,1")
    assert np.array_equal(found.y, (data.y + np.arange(8) // 2 % 2) % 3)
    data, found = shifted("invert:0,1")
    change = found.x != data.x
    assert not change[[0, 1, 4, 5]].any() and change[[2, 3, 6, 7]].any()
    np.testing.assert_array_equal(
        found.x[2].astype(int) + data.x[2], int(data.x.min()) + int(data.x.max())
    )
    data, found = shifted("colour:-1,0")  # grey, red
    assert found.x.shape[3] == 3 and (found.x[0] == data.x[0]).all()
    assert (found.x[2, ..., 0] == data.x[2, ..., 0]).all()
    assert (found.x[2, ..., 1:] == data.x.min()).all()
    data, found = shifted("label_permutation:0,7")
    assert np.array_equal(found.y[:2], data.y[:2])
    new = np.random.default_rng(7).permutation(3)
    assert np.array_equal(found.y[2:4], new[data.y[2:4]])
    for spec in ("noise:0,0.5", "blur:0,2", "contrast:1,0.2", "rotate:0,30"):
        data, found = shifted(spec)
        assert np.array_equal(found.x[:2], data.x[:2]), spec
        assert not np.array_equal(found.x[2:4], data.x[2:4]), spec
    federate.federate(found, of_clients([[0], [2]], [[1], [3]]))


def test_shifts_that_are_none_are_refused():
    with pytest.raises(
        InputError, match="Unknown shift 'rotat': did you mean 'rotate'"
    ):
        shifts.parse("rotat:1")
    with pytest.raises(InputError, match="must have DEGREES"):
        shifts.parse("rotate")


def test_a_folder_per_client_trains_on_augmented_images(tmp_path):
    path = folder(tmp_path / "photos", classes=("cat", "dog", "eel"))
    e = build(
        Config(
            algo="fedper",
            dataset=f"imagefolder:{path}",
            partition="natural:client",
            clients=None,
            model="linear",
            augment="crop_flip",
            width="1",
            devices="1",
        )
    )
    assert e.config.clients == 2 and e.task.class_counts.sum() == 18
    first, last = simulate.rounds(e.program, e.key, e.federation, rounds=1)
    assert np.isfinite(first.metrics.loss).all()
    assert set(last.pre) >= {"acc"} and len(last.pre["acc"]) == 2
