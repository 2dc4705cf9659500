"""Folders of images."""

import struct
import zlib

import numpy as np
from PIL import Image

from . import Case

GREY = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
DEEP = np.arange(24, dtype=np.uint16).reshape(4, 6) * 100


def folder(**files):
    """Writes images by path, with __ for / and _dot_ for a dot; bytes as they are."""

    def write(path):
        for name, content in files.items():
            *parts, last = name.replace("_dot_", ".").split("__")
            file = path.joinpath(*parts, last)
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                file.write_bytes(content)
            elif callable(content):
                content(file)
            else:
                Image.fromarray(content).save(file)

    return write


def saved(image, **options):
    return lambda file: image.save(file, **options)


def turned(file):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(GREY.T.copy()).save(file, exif=exif)


def upright(data, path):
    with Image.open(path / "b" / "1.jpg") as image:
        wanted = np.rot90(np.asarray(image), 3)
    assert (data.x[1, ..., 0] == wanted).all()
    assert data.note == "EXIF orientation of 1 images applied"


def png(bits16, clear=None):
    """Returns a PNG of 16 bits per channel, with `clear` as its transparent grey level;
    Pillow writes none in colour."""

    def chunk(name, content):
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    height, width, channels = bits16.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in bits16)
    head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    body = [] if clear is None else [(b"tRNS", struct.pack(">H", clear))]
    body += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = [(b"IHDR", head), *body]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def tiff(bits16):
    """Returns an uncompressed TIFF of 16 bits per channel in colour."""
    height, width, channels = bits16.shape
    content = bits16.astype("<u2").tobytes()
    tags = {256: width, 257: height, 258: 0, 259: 1, 262: 2, 273: 0, 277: channels}
    tags |= {278: height, 279: len(content)}
    depths = 8 + 2 + 12 * len(tags) + 4
    tags |= {258: depths, 273: depths + 2 * channels}
    entries = [
        struct.pack("<HHII", tag, 4 if tag == 273 else 3, 3 if tag == 258 else 1, value)
        for tag, value in tags.items()
    ]
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(entries) + bytes(4)
    return head + struct.pack("<3H", 16, 16, 16) + content


def pixels(*images, note=""):
    def same(data, path):
        assert (data.x[..., 0] == np.stack(images)).all()
        assert data.x.dtype == np.uint8 and data.x.shape[3] == 1
        assert data.note == note

    return same


def scaled(low, high, *images, more=""):
    """Asserts images whose range in the folder became [-1, 1]."""

    def same(data, path):
        wanted = (np.stack(images).astype(np.float64) - low) / (high - low) * 2 - 1
        np.testing.assert_allclose(data.x[..., 0], wanted, atol=1e-6)
        assert np.asarray(data.prepare(data.x)).min() == -1
        assert data.note == f"pixels in [{low:g}, {high:g}] become [-1, 1]{more}"

    return same


def parts(*sizes):
    def same(data, path):
        held = 0 if data.validation is None else int(data.validation.sum())
        assert (data.num_train - held, held, len(data.y) - data.num_train) == sizes
        assert data.classes == ("a", "b") and not data.columns

    return same


def colours(data, path, note=""):
    for x, file in zip(data.x, sorted(path.rglob("*.*")), strict=True):
        with Image.open(file) as image:
            assert (x == np.asarray(image.convert("RGB"))).all()
    assert data.note == note


def noted(note, same=colours):
    """Asserts what `same` asserts of images, and the note of one image."""
    return lambda data, path: same(data, path, note)


def ignored(count):
    def same(data, path):
        assert len(data.x) == 2
        assert data.note == f"{count} files without the name of an image ignored"

    return same


def clients(data, path):
    assert data.columns["client"].tolist() == ["x", "y"]


TWO = {"a__0_dot_png": GREY, "b__1_dot_png": GREY + 9}
FLOAT = DEEP.astype(np.float32) / 7
RGB = np.stack([GREY, GREY + 1, GREY + 2], axis=2)
BITS = np.where(GREY > 99, 255, 0).astype(np.uint8)
PALETTE = Image.fromarray(RGB).quantize(8)
CLEAR = "transparency of 1 images ignored"


def case(name, what, content, expected, **options):
    return Case(name, what, content, "imagefolder", expected, options)


CASES = [
    case("plain", "nothing", folder(**TWO), pixels(GREY, GREY + 9)),
    case(
        "deep",
        "16 bits",
        folder(a__0_dot_png=DEEP, b__1_dot_png=DEEP + 5),
        scaled(0, 2305, DEEP, DEEP + 5),
    ),
    case(
        "float",
        "a float TIFF",
        folder(a__0_dot_tif=FLOAT, b__1_dot_tiff=FLOAT / 2),
        scaled(0, FLOAT.max(), FLOAT, FLOAT / 2),
    ),
    case(
        "deep-tiff",
        "a TIFF of 16 bits",
        folder(a__0_dot_tif=DEEP, b__1_dot_tif=DEEP),
        scaled(0, 2300, DEEP, DEEP),
    ),
    case(
        "int-tiff",
        "a TIFF of 32 bits",
        folder(a__0_dot_tif=DEEP.astype(np.int32), b__1_dot_tif=DEEP.astype(np.int32)),
        scaled(0, 2300, DEEP, DEEP),
    ),
    case(
        "mixed-depth",
        "8 and 16 bits",
        folder(a__0_dot_png=GREY, b__1_dot_png=DEEP),
        r"b/1\.png has pixels of more, .*a/0\.png of 8 bits",
    ),
    case(
        "nan-tiff",
        "a NaN",
        folder(a__0_dot_tif=np.where(FLOAT > 99, np.nan, FLOAT), b__1_dot_tif=FLOAT),
        r"a/0\.tif must have finite pixels",
    ),
    case(
        "exif",
        "an EXIF orientation",
        folder(a__0_dot_jpg=GREY, b__1_dot_jpg=turned),
        upright,
    ),
    case(
        "dots",
        ".ipynb_checkpoints and ._0.png",
        folder(
            **TWO,
            **{"_dot_ipynb_checkpoints__0_dot_png": GREY, "a___dot__0_dot_png": b"x"},
        ),
        pixels(GREY, GREY + 9),
    ),
    case(
        "ds-store",
        ".DS_Store",
        folder(**TWO, _dot_DS_Store=b"x"),
        pixels(GREY, GREY + 9),
    ),
    case(
        "notes",
        "a text among images",
        folder(**TWO, a__notes_dot_txt=b"x", b__2_dot_heic=b"x"),
        ignored(2),
    ),
    case(
        "splits",
        "train, val, test",
        folder(
            train__a__0_dot_png=GREY,
            train__b__0_dot_png=GREY,
            val__a__1_dot_png=GREY,
            test__b__2_dot_png=GREY,
        ),
        parts(2, 1, 1),
    ),
    case(
        "splits-2",
        "Training, validation, TESTING",
        folder(
            Training__a__0_dot_png=GREY,
            Training__b__0_dot_png=GREY,
            validation__a__1_dot_png=GREY,
            TESTING__b__2_dot_png=GREY,
        ),
        parts(2, 1, 1),
    ),
    case(
        "splits-3",
        "Train and Test",
        folder(
            Train__a__0_dot_png=GREY, Train__b__0_dot_png=GREY, Test__a__1_dot_png=GREY
        ),
        parts(2, 0, 1),
    ),
    case(
        "splits-4",
        "train and valid",
        folder(
            train__a__0_dot_png=GREY, train__b__0_dot_png=GREY, valid__a__1_dot_png=GREY
        ),
        parts(2, 1, 0),
    ),
    case(
        "two-vals",
        "val and valid",
        folder(
            train__a__0_dot_png=GREY, val__a__0_dot_png=GREY, valid__a__0_dot_png=GREY
        ),
        r"must have one folder for train, val and test each",
    ),
    case(
        "extra-split",
        "train and extra",
        folder(train__a__0_dot_png=GREY, extra__a__0_dot_png=GREY),
        r"must have one folder for train, val and test each, .* got extra, train",
    ),
    case(
        "test-alone",
        "test without train",
        folder(test__a__0_dot_png=GREY, other__a__0_dot_png=GREY),
        r"must have one folder for train, val and test each",
    ),
    case(
        "clients",
        "a folder per client",
        folder(x__a__0_dot_png=GREY, y__b__0_dot_png=GREY),
        clients,
    ),
    case(
        "mixed",
        "classes and clients",
        folder(a__0_dot_png=GREY, x__a__0_dot_png=GREY),
        r"images both in CLASS/ and in CLIENT/CLASS/",
    ),
    case(
        "flat",
        "images without a class",
        folder(**{"0_dot_png": GREY}),
        r"0\.png must be in CLASS/ or CLIENT/CLASS/",
    ),
    case(
        "deep-folders",
        "three folders",
        folder(x__y__a__0_dot_png=GREY),
        r"must be in CLASS/ or CLIENT/CLASS/",
    ),
    case(
        "no-images", "no images", folder(a__notes_dot_txt=b"x"), r"must have images \("
    ),
    case("file", "a file for a folder", b"x", r"file must be a folder of images"),
    case(
        "damaged",
        "bytes that are no image",
        folder(**TWO, b__2_dot_png=b"no image"),
        r"b/2\.png cannot be read as an image",
    ),
    case(
        "zero",
        "an empty file",
        folder(**TWO, b__2_dot_png=b""),
        r"b/2\.png cannot be read as an image",
    ),
    case(
        "sizes",
        "two sizes",
        folder(a__0_dot_png=GREY, b__1_dot_png=GREY[:3]),
        r"b/1\.png is 3x6 pixels, .* Give an image size",
    ),
    case(
        "sizes-given",
        "two sizes with an image size",
        folder(a__0_dot_png=GREY, b__1_dot_png=GREY[:, :4]),
        lambda data, path: np.testing.assert_equal(data.x.shape, (2, 3, 3, 1)),
        image_size=3,
    ),
    case(
        "colours",
        "grey and colour",
        folder(a__0_dot_png=RGB, b__1_dot_png=GREY),
        colours,
    ),
    case(
        "palette",
        "a palette",
        folder(a__0_dot_png=RGB, b__1_dot_png=saved(PALETTE)),
        colours,
    ),
    case(
        "alpha",
        "transparency",
        folder(a__0_dot_png=RGB, b__1_dot_png=np.dstack([RGB, GREY])),
        noted(CLEAR),
    ),
    case(
        "opaque",
        "an alpha channel without transparency",
        folder(a__0_dot_png=RGB, b__1_dot_png=np.dstack([RGB, GREY * 0 + 255])),
        colours,
    ),
    case(
        "clear-palette",
        "a palette with transparency",
        folder(a__0_dot_png=RGB, b__1_dot_png=saved(PALETTE, transparency=3)),
        noted(CLEAR),
    ),
    case(
        "clear-gif",
        "a GIF with transparency",
        folder(a__0_dot_png=RGB, b__1_dot_gif=saved(PALETTE, transparency=3)),
        noted(CLEAR),
    ),
    case(
        "clear-grey",
        "a grey level that is transparent",
        folder(
            a__0_dot_png=GREY, b__1_dot_png=saved(Image.fromarray(GREY), transparency=9)
        ),
        pixels(GREY, GREY),
    ),
    case(
        "grey-alpha",
        "grey with transparency",
        folder(a__0_dot_png=np.dstack([GREY, GREY]), b__1_dot_png=GREY),
        pixels(GREY, GREY, note=CLEAR),
    ),
    case(
        "cmyk",
        "a TIFF for print",
        folder(
            a__0_dot_png=RGB, b__1_dot_tif=saved(Image.fromarray(RGB).convert("CMYK"))
        ),
        noted("CMYK or LAB colours of 1 images converted"),
    ),
    case(
        "deep-clear",
        "16 bits, a grey level that is transparent",
        folder(a__0_dot_png=DEEP, b__1_dot_png=png(DEEP[..., None], 500)),
        scaled(0, 2300, DEEP, DEEP, more=f"; {CLEAR}"),
    ),
    case(
        "deep-colour",
        "16 bits in colour",
        folder(a__0_dot_png=png(np.dstack([DEEP] * 3)), b__1_dot_png=RGB),
        r"a/0\.png must have 8 bits per channel or be grey, got 16 in colour",
    ),
    case(
        "deep-alpha",
        "16 bits with transparency",
        folder(a__0_dot_png=png(np.dstack([DEEP] * 4)), b__1_dot_png=RGB),
        r"a/0\.png must have 8 bits per channel or be grey",
    ),
    case(
        "deep-grey-alpha",
        "16 bits, grey with transparency",
        folder(a__0_dot_png=png(np.dstack([DEEP] * 2)), b__1_dot_png=RGB),
        r"a/0\.png must have 8 bits per channel or be grey",
    ),
    case(
        "deep-colour-tiff",
        "a TIFF of 16 bits in colour",
        folder(a__0_dot_tif=tiff(np.dstack([DEEP] * 3)), b__1_dot_png=RGB),
        r"a/0\.tif must have 8 bits per channel or be grey",
    ),
    case(
        "deep-colour-pgm",
        "a PPM of 16 bits in colour",
        folder(
            a__0_dot_pgm=b"P6 6 4 65535\n"
            + np.dstack([DEEP] * 3).astype(">u2").tobytes(),
            b__1_dot_png=RGB,
        ),
        r"a/0\.pgm must have 8 bits per channel or be grey",
    ),
    case(
        "pages",
        "a TIFF of two pages",
        folder(
            a__0_dot_tif=saved(
                Image.fromarray(GREY),
                save_all=True,
                append_images=[Image.fromarray(GREY[::-1])],
            ),
            b__1_dot_png=GREY,
        ),
        r"a/0\.tif must be one image, got 2",
    ),
    case(
        "bits",
        "black and white",
        folder(
            a__0_dot_png=saved(Image.fromarray(BITS).convert("1")), b__1_dot_png=GREY
        ),
        pixels(BITS, GREY),
    ),
    case(
        "frames",
        "a GIF of two frames",
        folder(
            a__0_dot_gif=saved(
                Image.fromarray(GREY),
                save_all=True,
                append_images=[Image.fromarray(GREY[::-1])],
            ),
            b__1_dot_png=GREY,
        ),
        r"a/0\.gif must be one image, got 2",
    ),
    case(
        "upper-suffix",
        "0.PNG",
        folder(a__0_dot_PNG=GREY, b__1_dot_PNG=GREY + 9),
        pixels(GREY, GREY + 9),
    ),
]
