"""Arrays of NumPy."""

import io

import numpy as np

from . import Case

X, Y = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([0, 1, 0, 1])
SIX = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 2


def npz(**arrays):
    return lambda path: np.savez(path, **{"x": X, "y": Y} | arrays)


def folder(**files):
    """Writes bytes, arrays (.npy) or dictionaries of them (.npz) by name."""

    def write(path):
        path.mkdir(parents=True)
        for name, content in files.items():
            if isinstance(content, bytes):
                (path / name.replace("_dot_", ".")).write_bytes(content)
            elif isinstance(content, dict):
                np.savez(path / f"{name}.npz", **content)
            else:
                np.save(path / f"{name}.npy", content)

    return write


def saved(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def objects(path):
    """A pickle that would write a file next to itself if it were executed."""
    path.mkdir(parents=True)
    np.save(path / "y.npy", Y)
    np.save(path / "x.npy", np.array([Trap(path / "executed")] * 4), allow_pickle=True)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def parts(data, path):
    assert (data.num_train, len(data.y)) == (5, 6)
    assert data.validation.tolist() == [False, False, False, True, True]
    assert data.x[:, 0].tolist() == [0, 2, 4, 6, 8, 10]


def user(data, path):
    assert data.columns["user"].tolist() == ["a", "a", "b", "b"]


PARTS = {
    "train": {"x": SIX[0][:3], "y": SIX[1][:3]},
    "validation": {"x": SIX[0][3:5], "y": SIX[1][3:5]},
    "Test": {"x": SIX[0][5:], "y": SIX[1][5:]},
}
CASES = [
    Case(
        "empty.npz", "no content", b"", "npz", r"empty\.npz cannot be read \(EOFError"
    ),
    Case("other.npz", "a text", b"1,2\n", "npz", r"other\.npz cannot be read \("),
    Case(
        "truncated.npz",
        "half of the file",
        lambda path: path.write_bytes(zipped()[:200]),
        "npz",
        r"truncated\.npz cannot be read \(BadZipFile",
    ),
    Case(
        "empty-npy",
        "an empty x.npy",
        folder(x_dot_npy=b"", y=Y),
        "npz",
        r"x\.npy cannot be read \(EOFError",
    ),
    Case(
        "truncated-npy",
        "half of x.npy",
        folder(x_dot_npy=saved(X)[:-9], y=Y),
        "npz",
        r"x\.npy cannot be read \(ValueError",
    ),
    Case(
        "huge-npy",
        "a header of 10^15 numbers without them",
        folder(x_dot_npy=saved(X).replace(b"(4, 2), }  ", b"(10**15,), }")[:128], y=Y),
        "npz",
        r"x\.npy cannot be read \(",
    ),
    Case(
        "objects-npy",
        "a pickle",
        objects,
        "npz",
        r"x\.npy cannot be read .*Object arrays",
    ),
    Case(
        "negative-tokens.npz",
        "token -3",
        npz(x=np.array([[1, 2], [3, -3], [4, 5], [0, 1]])),
        "npz",
        r"x must hold tokens counted from 0, got -3 in row 1; other numbers must be",
    ),
    Case(
        "large-label.npz",
        "a label of 1000000000",
        npz(y=np.array([0, 1, 1000000000, 1])),
        "npz",
        r"labels must be below 1,048,576, got 1000000000 in row 2",
    ),
    Case(
        "negative-label.npz",
        "a label of -1",
        npz(y=Y - 1),
        "npz",
        r"y must be labels counted from 0, got -1",
    ),
    Case(
        "nan.npz",
        "one NaN",
        npz(x=np.where(X == 5, np.nan, X)),
        "npz",
        r"x must be finite in float32, row 2 is not",
    ),
    Case("scalar.npz", "a number", npz(c=3), "npz", r"column c must have 4 values"),
    Case("user.npz", "a column", npz(user=np.array(list("aabb"))), "npz", user),
    Case("parts", "train.npz, validation.npz, Test.npz", folder(**PARTS), "npz", parts),
    Case(
        "unknown-part",
        "train.npz and dev2.npz",
        folder(train=PARTS["train"], dev2=PARTS["Test"]),
        "npz",
        r"dev2\.npz must be named train, val or test",
    ),
    Case(
        "half-validation.npz",
        "x_val without y_val",
        npz(x_val=X),
        "npz",
        "has only one of x_val and y_val",
    ),
]


def zipped():
    stream = io.BytesIO()
    np.savez(stream, x=X, y=Y)
    return stream.getvalue()
