"""Run directories that something happened to: a resume goes on, or says in one sentence
why not and changes nothing."""

import json
import random
import shutil

import pytest

from experiments import build, entry, figures, main, schema, train

FLAGS = [
    "--algo=fedper",
    "--data_fraction=0.2",
    "--clients=5",
    "--model=linear",
    "--participation=0.6",
    "--width=1",
]
FLAGS += ["--devices=1", "--rounds=4", "--checkpoint_every=2"]
VALUES = (
    None,
    True,
    -1,
    0,
    1.5,
    1e300,
    2**70,
    "x",
    "",
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
    "nan",
    [[[]]],
)


def once(function):
    """The function, which does not make again what it made: the same settings give the
    same."""
    made = {}

    def given(first, *rest):
        configs = [
            getattr(one, "config", one)
            for one in (first if isinstance(first, list) else [first])
        ]
        key = json.dumps([[vars(config) for config in configs], rest], default=str)
        return (
            made[key] if key in made else made.setdefault(key, function(first, *rest))
        )

    return given


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_partition"):
            patch.setattr(figures, name, lambda *_, **__: None)
        patch.setattr(build, "prepare", once(build.prepare))
        patch.setattr(train, "compiled", once(train.compiled))
        path = tmp_path_factory.mktemp("whole") / "run"
        assert main.run([*FLAGS, f"--workdir={path}"]) == 0
        yield path


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3])
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value, path, to):
    if not path:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], to)
    return copy


def tamper(path, rng):
    """Changes one file, and says how."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    file = rng.choice(
        [p for p in files if p.suffix in (".json", ".jsonl")]
        if rng.random() < 0.8
        else files
    )
    how = rng.choice(
        ["value", "value", "value", "cut", "flip", "empty", "gone", "folder"]
    )
    content = file.read_bytes()
    if how == "value" and file.suffix in (".json", ".jsonl"):
        texts = (
            content.decode().splitlines()
            if file.suffix == ".jsonl"
            else [content.decode()]
        )
        i = rng.randrange(len(texts))
        value = json.loads(texts[i])
        texts[i] = json.dumps(
            changed(
                value,
                where := rng.choice(list(places(value))),
                to := rng.choice(VALUES),
            )
        )
        file.write_text("\n".join(texts) + "\n")
        return f"{file.name} {i} {where} = {to}"
    if how == "flip":
        content = bytearray(content or b"x")
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    elif how in ("gone", "folder"):
        file.unlink()
        file.mkdir() if how == "folder" else None
    else:
        file.write_bytes(
            content[: rng.randrange(len(content) + 1)] if how == "cut" else b""
        )
    return f"{file.name} {how}"


def contents(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(250))
def test_a_tampered_directory(whole, tmp_path, capsys, seed):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    what = tamper(path, random.Random(seed))
    before = contents(path)
    capsys.readouterr()
    code = main.run(["--resume", f"--workdir={path}"])
    said = capsys.readouterr().err
    assert code in (0, entry.BAD_INPUT, entry.UNWRITABLE), what
    assert "Traceback" not in said and (code == 0 or said.count("\n") == 1), (
        what,
        said,
    )
    if code == entry.BAD_INPUT:
        assert contents(path) == before, what


def test_what_may_be_an_object_or_null_is_named():
    assert schema.problem(
        {"a": 3}, schema.Object({"a": (schema.Object({}), type(None))})
    ) == ("a is 3, not an object or null")
