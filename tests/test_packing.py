"""Several conversations of a client in one row of tokens."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import toy
from experiment.runs import rows as files, run
from test_pretrained import GEMMA, GPT2, LLAMA, TOKENS, WINDOWED

from fedjax_pfl import losses, models
from fedjax_pfl.data import packing
from fedjax_pfl.data.datasets import Dataset, prepare_integers
from fedjax_pfl.data.partition import flat, of_clients
from fedjax_pfl.data.sources import text
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import cli, config, predict, results, sweep
from fedjax_pfl.experiment.build import build, prepare
from fedjax_pfl.models import families
from fedjax_pfl.models.checkpoints import Config

LENGTH, CLIENTS = 12, 3
PARTS = ("train", "val", "test")


def drawn(count=30, longest=9):
    """Texts of 1 to 9 tokens, the last of which are learned, and their clients."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, longest + 1, count)
    here = np.arange(longest) < sizes[:, None]
    x = np.where(here, draw.integers(2, TOKENS, here.shape), 0).astype(np.int32)
    learned = here & (np.arange(longest) >= sizes[:, None] // 2)
    y = np.where(learned, draw.integers(2, TOKENS, here.shape), -1).astype(np.int32)
    owner = np.array_split(draw.permutation(count), 3 * CLIENTS)
    p = of_clients(*(owner[i::3] for i in (0, 1, 2)))
    words = tuple(map(str, range(TOKENS)))
    return Dataset("texts", x, y, count, TOKENS, prepare_integers, words=words), p


def texts_in(row, labels):
    """The texts of a row with their labels, without padding."""
    kept = np.flatnonzero(row)[-1] + 1
    starts = [0, *np.flatnonzero(row < 0), kept]
    plain = text.unmarked(row)
    return [
        (tuple(plain[i:j]), tuple(labels[i:j])) for i, j in itertools.pairwise(starts)
    ]


def test_each_text_of_a_client_is_in_one_of_its_rows():
    data, p = drawn()
    made, rows = packing.packed(data, p, LENGTH)
    assert made.x.shape[1] == LENGTH and len(made.x) < 30
    sizes = text.lengths(data.x)
    for part in PARTS:
        of = getattr(p, part), getattr(p, f"{part}_sizes")
        new = getattr(rows, part), getattr(rows, f"{part}_sizes")
        for ids, n, numbers, m in zip(*of, *new, strict=True):
            wanted = [
                (tuple(data.x[i, : sizes[i]]), tuple(data.y[i, : sizes[i]]))
                for i in ids[:n]
            ]
            found = [texts_in(made.x[i], made.y[i]) for i in numbers[:m]]
            assert sorted(itertools.chain(*found)) == sorted(wanted)
    every = np.concatenate(
        [flat(getattr(rows, x), getattr(rows, f"{x}_sizes")) for x in PARTS]
    )
    assert sorted(every) == list(range(len(made.x)))
    assert made.num_train == len(made.x) - rows.test_sizes.sum()
    again, same = packing.packed(data, p, LENGTH)
    assert np.array_equal(again.x, made.x) and np.array_equal(again.y, made.y)
    assert np.array_equal(same.train, rows.train)
    assert f"30 texts packed into {len(made.x)} rows" in made.note


def test_first_fit_takes_the_first_row_with_room():
    sizes = np.array([5, 4, 3, 3, 1, 6])
    assert packing.first_fit(range(6), sizes, 6) == [[0, 4], [1], [2, 3], [5]]


def test_another_vocabulary_keeps_the_marks():
    data, p = drawn()
    made, _ = packing.packed(data, p, LENGTH)
    words = (*text.SPECIAL, *map(str, range(TOKENS - 1, 1, -1)))
    found = text.using(made, words)
    assert np.array_equal(found.x < 0, made.x < 0) and found.packed
    names = lambda of: [of.words[i] for i in text.unmarked(of.x[of.x != 0])]
    assert names(found) == names(made)
    only = text.restricted(made._replace(words=words), np.array([0]))
    used = {words[i] for i in text.unmarked(made.x[0]) if i}
    used |= {words[i] for i in made.y[0] if i >= 0}
    assert {*only.words} == {*text.SPECIAL, *used}


LIKE = {"vocab_size": TOKENS, "tie_word_embeddings": True}
KINDS = {
    "llama": LLAMA,
    "gemma2": LLAMA | GEMMA,
    "gpt2": GPT2,
    "qwen2": LLAMA | WINDOWED,
}


def network(kind, packed, **options):
    factory = kind
    if kind in KINDS:
        given = KINDS[kind] | LIKE | {"model_type": kind}
        factory = families.TYPES[kind](Config(given), None).factory
    made, more = models.model, {}
    if options:
        made, more = models.adapted, {"how": models.lora(2)} | options
    how = [more.pop("how")] if "how" in more else []
    given = {"positions": LENGTH, "vocabulary": TOKENS, "input_dtype": jnp.int32}
    return made(factory, *how, (LENGTH,), TOKENS, packed=packed, **given, **more)


CASES = [("llama", {}), ("gemma2", {}), ("gpt2", {}), ("transformer", {})]
CASES += [toy.slow("qwen2", {}), ("gemma2", {"blocks": "scanned"})]
CASES += [toy.slow("gpt2", {"blocks": "rematerialised"})]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_text_in_a_packed_row_has_its_logits_and_loss(kind, options):
    data, p = drawn()
    made, _ = packing.packed(data, p, LENGTH)
    alone, several = network(kind, False, **options), network(kind, True, **options)
    drawn_w = alone.init(jax.random.key(0))
    noise = np.random.default_rng(1)
    w = jax.tree.map(lambda a: a + 0.3 * noise.normal(size=a.shape), drawn_w)
    wide = np.pad(data.x, ((0, 0), (0, LENGTH - data.x.shape[1])))
    one = alone.apply(w, jnp.asarray(wide))[0].reshape(*wide.shape, -1)
    all_rows = several.apply(w, jnp.asarray(made.x))[0].reshape(*made.x.shape, -1)
    sizes, number, compared = text.lengths(data.x), {}, 0
    for i, n in enumerate(sizes):
        number[tuple(data.x[i, :n]), tuple(data.y[i, :n])] = i
    for row, labels, logits in zip(made.x, made.y, all_rows, strict=True):
        start = 0
        for each in texts_in(row, labels):
            end, i = start + len(each[0]), number[each]
            wanted = one[i, : end - start]
            np.testing.assert_allclose(logits[start:end], wanted, rtol=0, atol=1e-5)
            start, compared = end, compared + (start > 0)
    assert compared > 10  # texts that are not the first in their row

    def loss(logits, y):
        kept = jnp.asarray(y >= 0).reshape(-1)
        labels = jnp.maximum(y, 0).reshape(-1)
        return losses.cross_entropy(logits.reshape(-1, TOKENS), labels, kept)

    padded = np.pad(data.y, ((0, 0), (0, LENGTH - data.y.shape[1])), constant_values=-1)
    np.testing.assert_allclose(loss(all_rows, made.y), loss(one, padded), atol=1e-5)
    # a network that ignores the marks has other logits
    ignoring = alone.apply(w, jnp.asarray(text.unmarked(made.x)))[0]
    assert np.abs(ignoring - all_rows.reshape(ignoring.shape)).max() > 1e-3


def test_an_unpacked_row_has_the_same_logits_by_both_networks():
    data, _ = drawn()
    x = jnp.asarray(np.pad(data.x, ((0, 0), (0, LENGTH - data.x.shape[1]))))
    alone, several = network("gpt2", False), network("gpt2", True)
    w = alone.init(jax.random.key(0))
    np.testing.assert_allclose(several.apply(w, x)[0], alone.apply(w, x)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "digits"}, "--pack needs --dataset=chat:"),
        ({"dataset": "text:plays.json"}, "--pack needs --dataset=chat:"),
        ({"dataset": "chat:a.json", "public": "9"}, "--pack excludes --public"),
    ],
)
def test_other_data_are_refused(given, message):
    algo = "fedmd" if "public" in given else "fedavg"
    with pytest.raises(InputError, match=message):
        config.resolve({"algo": algo, "pack": True, **given})


def chats(folder):
    """150 conversations of three sites, many short ones and few long ones."""
    path = folder / "chat.jsonl"
    sizes = np.random.default_rng(2).lognormal(2.5, 1, 150).astype(int) + 1
    given = [
        {"instruction": "red", "output": "xyz"[i % 3] * int(size), "site": i % 3}
        for i, size in enumerate(sizes)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def flags(folder, *more):
    given = f"--algo=fedavg --dataset=chat:{chats(folder)} --partition=natural:site --val_fraction=0.2 --model=transformer --max_length=128 --optimizer=adam --lr=0.003 --metrics=perplexity --devices=1 --pack"
    return [*given.split(), *more]


def given_in(argv):
    return cli.parse(argv, sweep.RUN_FLAGS).settings()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "gru"}, "Packed texts need a causal transformer"),
        ({"adapt": "prompt:2"}, "--pack excludes --adapt=prompt"),
    ],
)
def test_networks_that_cannot_take_packed_texts_are_refused(more, message, tmp_path):
    resolved = config.resolve(given_in(flags(tmp_path)) | more)
    with pytest.raises(InputError, match=message):
        build(resolved)


NOTE = "150 texts packed into 55 rows, padding 68.0 % before and 12.7 % after"


def test_padding_is_counted(tmp_path):
    """The numbers of docs/data.md."""
    c = config.resolve(given_in(flags(tmp_path)))
    made = prepare(c.data, c.partition, c.model, c.seed)
    assert NOTE in made.dataset.note and made.whole.x.shape == (150, 128)
    assert made.used == 150 and made.names == ("0", "1", "2")


@pytest.mark.slow  # trains a network of tokens
def test_a_packed_run_resumes_and_answers(tmp_path, capsys):
    folders = [tmp_path / name for name in ("whole", "parts")]
    assert run(*flags(tmp_path, "--rounds=2", f"--workdir={folders[0]}")) == 0
    assert NOTE in capsys.readouterr().out
    assert run(*flags(tmp_path, "--rounds=1", f"--workdir={folders[1]}")) == 0
    assert run("--resume", f"--workdir={folders[1]}", "--rounds=2") == 0
    assert files(folders[0]) == files(folders[1])
    found = results.load(folders[0])
    x = found.experiment.dataset.x[:2]
    wanted = found.experiment.predictor(found.state(), 2, 1)(x)
    np.testing.assert_allclose(found.predictor(1)(x), wanted, atol=1e-6)
    assert x.min() < 0
    ask = tmp_path / "ask.jsonl"
    ask.write_text(json.dumps({"instruction": "red"}) + "\n")
    (tmp_path / "chat.jsonl").unlink()  # the run directory suffices
    argv = [str(folders[0]), "--client=1", f"--input={ask}", "--tokens=3"]
    assert run(*argv, command=predict.main) == 0
    found = pd.read_csv(folders[0] / "predictions.csv")
    assert found["client"].tolist() == [1] and len(found) == 1
    assert results.load(folders[0]).config["pack"] is True
