"""CelebA by attribute: which images are taken, how they are cut, and which client gets
which attribute."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from fedjax_pfl.data import loading
from fedjax_pfl.data.partition import class_counts
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.data.sources import celeba, toys

FEATURES = "tensorflow_datasets.core.features."
DICT, BOOL = (
    FEATURES + "features_dict.FeaturesDict",
    {"shape": {}, "dtype": "bool", "encoding": "none"},
)
NAMES = (*celeba.ATTRIBUTES, "Smiling")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))


def encoded(level):
    """A face of TFDS's size, all of one grey level."""
    jpeg = io.BytesIO()
    Image.fromarray(np.full((218, 178, 3), level, np.uint8)).save(jpeg, "jpeg")
    return jpeg.getvalue()


def prepare(root, attributes):
    """Writes celeb_a as `tfds build --file_format=array_record` does; image i has the
    grey level 5 i."""
    module = pytest.importorskip(
        "array_record.python.array_record_module",
        reason="array_record is not installed",
    )
    from tensorflow_datasets.proto import tf_example_pb2

    folder = root / "celeb_a" / "2.1.0"
    folder.mkdir(parents=True)
    flag = {"pythonClassName": FEATURES + "tensor_feature.Tensor", "tensor": BOOL}
    dimensions = {"dimensions": ["218", "178", "3"]}
    image = {"shape": dimensions, "dtype": "uint8", "encodingFormat": "jpeg"}
    image = {"pythonClassName": FEATURES + "image_feature.Image", "image": image}
    inner = {
        "pythonClassName": DICT,
        "featuresDict": {"features": dict.fromkeys(NAMES, flag)},
    }
    whole = {
        "pythonClassName": DICT,
        "featuresDict": {"features": {"image": image, "attributes": inner}},
    }
    (folder / "features.json").write_text(json.dumps(whole))
    splits = []
    for split, rows in zip(
        ("train", "validation", "test"),
        np.array_split(np.arange(len(attributes)), 3),
        strict=True,
    ):
        writer = module.ArrayRecordWriter(
            str(folder / f"celeb_a-{split}.array_record-00000-of-00001"), "group_size:1"
        )
        for row in rows:
            example = tf_example_pb2.Example()
            example.features.feature["image"].bytes_list.value.append(
                encoded(5 * int(row))
            )
            for name, value in zip(NAMES, attributes[row], strict=True):
                example.features.feature[f"attributes/{name}"].int64_list.value.append(
                    int(value)
                )
            writer.write(example.SerializeToString())
        writer.close()
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        splits.append(
            {
                "name": split,
                "filepathTemplate": template,
                "shardLengths": [str(len(rows))],
                "numBytes": "1",
            }
        )
    info = {
        "name": "celeb_a",
        "version": "2.1.0",
        "fileFormat": "array_record",
        "splits": splits,
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))


def test_images_are_those_with_an_attribute(tmp_path):
    attributes = np.zeros((30, 5), bool)
    attributes[np.arange(24), np.arange(24) % 5] = True  # every fifth only smiles
    attributes[0, 1] = True  # bald, with a hat: taken for both
    prepare(tmp_path, attributes)
    data = loading.load("celeb_a", str(tmp_path))
    expected = [
        (label, row)
        for label in range(4)
        for row in np.flatnonzero(attributes[:, label])
    ]
    assert (
        data.num_classes == 4 and data.num_train == len(data.y) == len(expected) == 21
    )
    assert data.x.shape == (21, 64, 64, 3) and data.x.dtype == np.uint8
    assert [
        (label, round(x.mean() / 5)) for label, x in zip(data.y, data.x, strict=True)
    ] == expected
    p = partition(data, "round_robin", num_clients=4, seed=0, test_fraction=0.25)
    assert np.array_equal(class_counts(p, data) > 0, np.eye(4, dtype=bool))


def test_at_most_5000_of_an_attribute_always_the_same():
    has = np.zeros((12_000, 2), bool)
    has[:6000, 0], has[-70:, 1] = True, True
    many, few = celeba.choose(has)
    assert (
        len(many) == len(set(many)) == 5000
        and many.max() < 6000
        and (many == celeba.choose(has)[0]).all()
    )
    assert np.array_equal(few, np.arange(11_930, 12_000)) and np.ptp(many) > 5900


@pytest.mark.parametrize("shape", [(218, 178), (100, 64), (64, 200), (30, 30)])
def test_the_middle_is_cut_out(shape):
    picture = np.zeros((*shape, 3), np.uint8)
    picture[: shape[0] // 2, :, 0], picture[:, : shape[1] // 2, 1] = 255, 255
    png = io.BytesIO()
    Image.fromarray(picture).save(png, "png")
    x = celeba.shrink(png.getvalue())
    assert x.shape == (64, 64, 3)
    assert (x[:30, :, 0] > 200).all() and (x[34:, :, 0] < 50).all()
    assert (x[:, :30, 1] > 200).all() and (x[:, 34:, 1] < 50).all()


def test_classes_go_round():
    data = toys.synthetic(300, 3)
    counts = class_counts(partition(data, "round_robin", num_clients=7, seed=0), data)
    assert (counts.argmax(axis=1) == np.arange(7) % 3).all() and (
        (counts > 0).sum(axis=1) == 1
    ).all()
    for label in range(3):
        assert np.ptp(counts[label::3, label]) <= 1
    few = class_counts(partition(data, "round_robin", num_clients=2, seed=0), data)
    assert np.array_equal(few > 0, [[True, False, True], [False, True, False]])
