"""Data sets as TFDS prepares them, written by hand."""

import io
import json

import numpy as np
import pytest

_FEATURES = "tensorflow_datasets.core.features."


def dataset(root, name, x, labels, num_train, version="3.1.0"):
    """Writes a data set as `tfds build --file_format=array_record` does: the first
    num_train rows are `train`.

    Its inputs x are images [n, H, W, channels] by the name `image`, or rows of integers
    by the name `tokens`.
    """
    module = pytest.importorskip(
        "array_record.python.array_record_module",
        reason="array_record is not installed",
    )
    folder, flat, key = (
        root / name / version,
        name.split("/")[0],
        "image" if x.ndim == 4 else "tokens",
    )
    folder.mkdir(parents=True)
    features = {key: _image(x) if x.ndim == 4 else _tensor(x)} | {
        label: _label(200) for label in labels
    }
    content = {
        "pythonClassName": _FEATURES + "features_dict.FeaturesDict",
        "featuresDict": {"features": features},
    }
    (folder / "features.json").write_text(json.dumps(content))
    template, splits = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}", []
    for split, rows in (
        ("train", range(num_train)),
        ("test", range(num_train, len(x))),
    ):
        writer = module.ArrayRecordWriter(
            str(folder / f"{flat}-{split}.array_record-00000-of-00001"), "group_size:1"
        )
        for row in rows:
            writer.write(
                _record(
                    key, x[row], {name: values[row] for name, values in labels.items()}
                )
            )
        writer.close()
        splits.append(
            {
                "name": split,
                "filepathTemplate": template,
                "shardLengths": [str(len(rows))],
                "numBytes": "1",
            }
        )
    info = {
        "name": flat,
        "version": version,
        "fileFormat": "array_record",
        "splits": splits,
    }
    info |= {"configName": name.split("/")[1]} if "/" in name else {}
    info |= {
        "supervisedKeys": {
            "tuple": {"items": [{"featureKey": key}, {"featureKey": "label"}]}
        }
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def _image(x):
    shape = {"dimensions": [str(n) for n in x.shape[1:]]}
    image = {"shape": shape, "dtype": "uint8", "encodingFormat": "png"}
    return {"pythonClassName": _FEATURES + "image_feature.Image", "image": image}


def _tensor(x):
    tensor = {"dtype": x.dtype.name, "encoding": "none"}
    scalar = {
        "pythonClassName": _FEATURES + "tensor_feature.Tensor",
        "tensor": {"shape": {}} | tensor,
    }
    sequence = {"feature": scalar, "length": str(x.shape[1])}
    return {
        "pythonClassName": _FEATURES + "sequence_feature.Sequence",
        "sequence": sequence,
    }


def _label(num_classes):
    return {
        "pythonClassName": _FEATURES + "class_label_feature.ClassLabel",
        "classLabel": {"numClasses": str(num_classes)},
    }


def _record(key, x, labels):
    """A serialised tf.train.Example."""
    from PIL import Image
    from tensorflow_datasets.proto import tf_example_pb2

    example = tf_example_pb2.Example()
    if x.ndim == 3:
        png = io.BytesIO()
        Image.fromarray(x[..., 0] if x.shape[-1] == 1 else x).save(png, "png")
        example.features.feature[key].bytes_list.value.append(png.getvalue())
    else:
        example.features.feature[key].int64_list.value.extend(np.asarray(x).tolist())
    for name, value in labels.items():
        example.features.feature[name].int64_list.value.append(int(value))
    return example.SerializeToString()
