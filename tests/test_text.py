"""Texts: data sets of tokens, their networks against slow references, and labels per
position."""

import functools
import gzip
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from jax.extend.core import jaxprs_in_params
from scipy.special import erf, softmax

from fedjax_pfl import models, simulate, testing
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import datasets, federate, loading, partitioners
from fedjax_pfl.data.sources import text
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nets, text as networks
from fedjax_pfl.models.layers import linear

LENGTH, TOKENS = 6, 10
SPEECH = {"ann": "hello world, " * 8, "bob": "to be or not to be " * 6, "cy": "xyz" * 9}


def tokens(*shape, seed=0):
    """Tokens with padding at the end of each row but the first, the last one empty."""
    draw = np.random.default_rng(seed)
    x = draw.integers(2, TOKENS, shape)
    kept = np.linspace(shape[1], 0, shape[0]).astype(int)
    return np.where(np.arange(shape[1]) < kept[:, None], x, 0).astype(np.int32)


def network(name, classes=4, positions=None, length=LENGTH):
    model = models.model(
        name,
        (length,),
        classes,
        input_dtype=jnp.int32,
        vocabulary=TOKENS,
        positions=positions,
    )
    return model, jax.device_get(model.init(jax.random.key(0)))


def test_the_embedding_bag_is_the_mean_of_the_tokens_that_are_there():
    model, w = network("fasttext")
    x, table = tokens(5, LENGTH), w["body"]["embedding"]["embedding"]
    rows = [
        table[[t for t in row if t]].mean(axis=0) if row.any() else 0 * table[0]
        for row in x
    ]
    h = np.array(rows) @ w["body"]["linear"]["kernel"] + w["body"]["linear"]["bias"]
    wanted = h @ w["head"]["kernel"] + w["head"]["bias"]
    np.testing.assert_allclose(
        model.apply(w, jnp.asarray(x))[0], wanted, rtol=1e-4, atol=1e-5
    )


def test_a_gru_is_the_recurrence_of_its_equations():
    model, w = network("gru", positions=LENGTH)
    x, body = tokens(3, LENGTH), w["body"]
    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    wanted = []
    for row in x:
        h = np.zeros(model.num_features)
        for token in row:
            inputs = (
                body["embedding"]["embedding"][token]
                @ body["cell"]["dense_i"]["kernel"]
            )
            inputs = np.split(inputs + body["cell"]["dense_i"]["bias"], 3)
            hidden = np.split(h @ body["cell"]["dense_h"]["kernel"], 3)
            r, z = (sigmoid(a + b) for a, b in zip(inputs[:2], hidden[:2], strict=True))
            h = (1 - z) * np.tanh(inputs[2] + r * hidden[2]) + z * h
            wanted.append(h @ w["head"]["kernel"] + w["head"]["bias"])
    np.testing.assert_allclose(
        model.apply(w, jnp.asarray(x))[0], wanted, rtol=1e-3, atol=1e-4
    )


def layer_norm(h, w):
    centred = h - h.mean(axis=-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["scale"]
        + w["bias"]
    )


def block(h, w, heads, seen):
    """One pre-norm block of h [L, K], a query and a head at a time."""
    dense = lambda a, w: a @ w["kernel"] + w["bias"]
    q, k, v = np.split(
        dense(layer_norm(h, w["norms"]["0"]), w["attention"]["qkv"]), 3, axis=1
    )
    width, mixed = h.shape[1] // heads, np.zeros_like(h)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(len(h)):
            logits = k[:, part] @ q[i, part] / np.sqrt(width)
            chance = np.where(seen[i], np.exp(logits - logits.max()), 0)
            mixed[i, part] = chance / chance.sum() @ v[:, part]
    h = h + dense(mixed, w["attention"]["out"])
    inner = dense(layer_norm(h, w["norms"]["1"]), w["inner"])
    gelu = inner * (1 + erf(inner / np.sqrt(2))) / 2
    return h + dense(gelu, w["outer"])


@pytest.mark.slow
def test_a_transformer_is_pre_norm_and_causal():
    model, w = network("transformer", positions=LENGTH)
    x, body = tokens(3, LENGTH)[:2], w["body"]
    wanted = []
    for row in x:
        h = body["embedding"]["embedding"][row] + body["places"]
        past = np.arange(LENGTH) <= np.arange(LENGTH)[:, None]
        for i in range(2):
            h = block(h, body["blocks"][str(i)], 4, past & (row != 0))
        wanted.append(
            layer_norm(h, body["norm"]) @ w["head"]["kernel"] + w["head"]["bias"]
        )
    found = model.apply(w, jnp.asarray(x))[0].reshape(2, LENGTH, -1)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    other = x.copy()
    other[:, -1] = 5  # the last token changes the last output alone
    moved = model.apply(w, jnp.asarray(other))[0].reshape(2, LENGTH, -1)
    assert np.array_equal(moved[:, :-1], found[:, :-1])
    assert not np.allclose(moved[:, -1], found[:, -1])


@pytest.mark.parametrize("name", ["fasttext", "gru", toy.slow("transformer")])
def test_padding_of_a_text_never_counts(name):
    x = tokens(4, LENGTH)
    short, w = network(name)
    long, _ = network(name, length=LENGTH + 3)
    wide = np.pad(x, ((0, 0), (0, 3)))
    other = w
    if name == "transformer":  # a table of positions
        places = np.pad(w["body"]["places"], ((0, 3), (0, 0)), constant_values=7)
        other = {**w, "body": {**w["body"], "places": places}}
    found = long.apply(other, jnp.asarray(wide))[0]
    np.testing.assert_allclose(
        found, short.apply(w, jnp.asarray(x))[0], rtol=1e-5, atol=1e-6
    )
    assert np.isfinite(found).all()


@pytest.mark.slow
def test_dropout_of_a_transformer_draws_from_the_step():
    model, w = network("transformer")
    x = jnp.asarray(tokens(4, LENGTH))
    run = lambda key: model.apply(w, x, train=True, key=key)[0]
    first, again, other = (run(jax.random.key(i)) for i in (0, 0, 1))
    assert np.array_equal(first, again) and not np.allclose(first, other)


def small(name, positions):
    """A small network of 6 tokens as a factory."""
    makers = {
        "gru": functools.partial(networks.gru, width=4, features=8),
        "transformer": functools.partial(
            networks.transformer, features=8, depth=1, heads=2
        ),
        "fasttext": functools.partial(networks.fasttext, features=8),
    }
    make = makers[name]
    options = {"vocabulary": TOKENS} | (
        {} if name == "fasttext" else {"positions": positions}
    )
    return lambda shape, classes, rngs: make(shape, classes, rngs, **options)


def task_of(name, positions):
    label = jax.ShapeDtypeStruct(() if positions is None else (positions,), jnp.int32)
    model = models.model(
        small(name, positions),
        (LENGTH,),
        testing.synthetic.C,
        input_dtype=jnp.int32,
        positions=positions,
    )
    return testing.task(
        models=(model,),
        input=jax.ShapeDtypeStruct((LENGTH,), jnp.int32),
        label=label,
        prepare=datasets.prepare_integers,
        epochs=1,
    )


ROWS = ("padding", "mask", "inactive", "scores")
ON_TOKENS = [
    ("fedproto", "gru", LENGTH),
    toy.slow("fedcp", "fasttext", None),
    *(
        pytest.param(algo, name, LENGTH, marks=pytest.mark.slow)
        for algo, name in (
            ("fedavg", "transformer"),
            ("fedper", "gru"),
            ("fedrep", "gru"),
            ("ditto", "gru"),
            ("apfl", "gru"),
        )
    ),
]


@pytest.mark.parametrize("algo, name, positions", ON_TOKENS)
def test_the_contract_holds_on_tokens_with_masks(algo, name, positions):
    task = task_of(name, positions)
    assert np.array_equal(task.sizes, testing.synthetic.SIZES)
    subject = testing.subject(ALGORITHMS[algo], task)
    for rule in ROWS:
        testing.check(rule, subject)


@pytest.mark.slow
def test_positions_without_a_label_change_nothing():
    """Neither their labels nor, in a causal network, their inputs."""
    task = task_of("gru", LENGTH)
    s = testing.subject(ALGORITHMS["fedavg"], task)
    examples = s.federation.examples
    masked = np.asarray(examples.y) < 0
    y = np.where(masked, -5, examples.y).astype(np.int32)
    x = np.where(masked, 9 - np.asarray(examples.x), examples.x).astype(np.int32)
    other = s.federation._replace(
        examples=examples._replace(x=jnp.asarray(x), y=jnp.asarray(y))
    )
    testing.rounds.same_round(
        testing.run(s, federation=other),
        testing.run(s),
        testing.rounds.IDS[testing.rounds.ACTIVE],
    )


def test_the_loss_and_the_scores_are_over_tokens():
    data = text.spoken("t", SPEECH, max_length=8)
    clients = partitioners.partition(data, "natural:speaker", num_clients=None, seed=0)
    f = federate.federate(data, clients)
    assert np.array_equal(
        np.asarray(f.class_counts).sum(axis=1),
        [
            (data.y[rows[:n]] >= 0).sum()
            for rows, n in zip(clients.train, clients.train_sizes, strict=True)
        ],
    )
    fixed = lambda shape, classes, rngs: nets.Net(Constant(), linear(3, classes, rngs))
    model = models.model(
        fixed, (8,), data.num_classes, input_dtype=jnp.int32, positions=8
    )
    task = simulate.task(data, f, model, lr=1e-9, batch_size=4, metrics=("perplexity",))
    program = simulate.program(ALGORITHMS["fedavg"], task)
    key = jax.random.key(0)
    *_, last = simulate.rounds(program, key, f, rounds=1)
    head = program.init(key, program.traced).server["head"]
    guess = int(np.argmax(head["bias"] + head["kernel"].sum(0)))
    rows = [clients.test[i][: clients.test_sizes[i]] for i in range(3)]
    labels = [data.y[r][data.y[r] >= 0] for r in rows]
    wanted = [np.mean(y == guess) for y in labels]
    np.testing.assert_allclose(last.pre["acc"], wanted, rtol=1e-6)
    p = softmax(head["bias"] + head["kernel"].sum(0))
    wanted = [np.exp(-np.mean(np.log(p[y]))) for y in labels]
    np.testing.assert_allclose(last.pre["perplexity"], wanted, rtol=1e-5)


class Constant(nnx.Module):
    """The same features at every position."""

    def __call__(self, x):
        return jnp.ones((*x.shape, 3))


def test_passages_of_speakers_are_shifted_by_one():
    data = text.spoken("t", {"a": "abcdefg", "b": "x", "c": "hi"}, max_length=4)
    words = np.array(data.words)
    assert data.columns["speaker"].tolist() == ["a", "a", "c"]
    assert ["".join(words[row[row > 0]]) for row in data.x] == ["abcd", "ef", "h"]
    assert ["".join(words[row[row >= 0]]) for row in data.y] == ["bcde", "fg", "i"]
    assert (data.y[1] == [*data.y[1][:2], -1, -1]).all() and data.positions == 4


def test_the_vocabulary_is_that_of_the_training_clients():
    texts = ["a red fox", "a blue fox", "green"]
    data = text.classified("t", texts, np.array([0, 1, 1]), max_length=5)
    assert data.words == ("<pad>", "<unk>", "a", "red", "fox", "blue", "green")
    few = text.restricted(data, np.array([0]))
    assert few.words == ("<pad>", "<unk>", "a", "red", "fox") and few.vocabulary == 5
    assert few.x.tolist() == [[2, 3, 4], [2, 1, 4], [1, 0, 0]]
    assert np.array_equal(text.encode(texts, few.words, 3), few.x)
    spoken = text.spoken("t", {"a": "abab", "b": "abc"})
    few = text.restricted(spoken, np.array([0]))
    assert few.num_classes == 4 and few.y[1, :2].tolist() == [3, text.UNKNOWN]


def test_the_word_tokenizer_splits_marks_and_lowers():
    split = text.tokenizer("word")
    assert split("Don't panic, it's 42!") == ["don't", "panic", ",", "it's", "42", "!"]
    with pytest.raises(InputError, match=r"must be word, char or a \.json file"):
        text.tokenizer("sentence")


def test_a_tokenizer_of_hugging_face(tmp_path):
    tokenizers = pytest.importorskip(
        "tokenizers", reason="tokenizers is not there: pip install -e '.[data]'"
    )
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"good": 0, "film": 1, "?": 2}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = str(tmp_path / "tokenizer.json")
    made.save(path)
    assert text.tokenizer(path)("good old film") == ["good", "?", "film"]
    data = text.classified(
        "mine", ["good film", "film"], np.array([0, 1]), tokens=path, max_length=3
    )
    known = text.restricted(data, np.array([0, 1]))
    assert known.x.shape == (2, 2) and known.x[0, 1] == known.x[1, 0] > text.UNKNOWN


def bert_like(folder, **options):
    """Writes a tokenizer.json with [CLS] and [SEP], and returns its path."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "old"]
    number = {word: i for i, word in enumerate(words)}
    model = tokenizers.models.WordLevel(number, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    if "truncation" in options:
        made.enable_truncation(options["truncation"])
    if "padding" in options:
        made.enable_padding(length=options["padding"], pad_token="[PAD]")
    path = folder / "tokenizer.json"
    made.save(str(path))
    return str(path)


@pytest.mark.parametrize("length", [2, 3, 5, 9])
@pytest.mark.parametrize("options", [{}, {"truncation": 3}, {"padding": 12}])
def test_texts_are_cut_as_by_transformers(length, options, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = bert_like(tmp_path, **options)
    texts = ["good old film", "bad old old film good film", "new"]
    known = transformers.PreTrainedTokenizerFast(tokenizer_file=path)
    ids = [known(x, truncation=True, max_length=length)["input_ids"] for x in texts]
    wanted = [known.convert_ids_to_tokens(row) for row in ids]
    labels = np.array([0, 1, 0])
    data = text.classified("mine", texts, labels, tokens=path, max_length=length)
    assert [[data.words[i] for i in row if i] for row in data.x] == wanted
    assert wanted[1][-1] == "[SEP]" and "[PAD]" not in data.words
    again = text.encode(texts, data.words, data.x.shape[1], path)
    assert np.array_equal(again, data.x)


def test_a_tokenizer_file_does_not_cut_speakers(tmp_path):
    path = bert_like(tmp_path, truncation=3, padding=12)
    data = text.spoken("mine", {"ada": "good old film " * 20}, tokens=path)
    assert (data.y >= 0).sum() == 61  # of 62 tokens
    assert "[PAD]" not in data.words


def test_a_length_without_room_for_special_tokens_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"`max_length` must be in \[2, inf\), got 1"):
        text.tokenizer(bert_like(tmp_path), 1)


def test_a_tokenizer_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[data\]' adds it"):
        text.tokenizer("tokenizer.json")


def test_files_of_texts(tmp_path):
    rows = [
        {"text": "good film", "label": "pos", "split": "train", "site": "x"},
        {"text": "bad film", "label": "neg", "split": "test", "site": "y"},
        {"text": "fine", "label": "pos", "split": "Training", "site": "x"},
    ]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    data = text.load(str(lines))
    assert (
        data.num_train == 2 and data.y.tolist() == [1, 1, 0] and data.num_classes == 2
    )
    assert data.columns["site"].tolist() == ["x", "x", "y"]
    table = tmp_path / "a.csv"
    table.write_text("text,label\ngood,1\nbad,0\n")
    assert text.load(str(table)).y.tolist() == [1, 0]
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(SPEECH).encode()))
    assert set(text.load(str(packed)).columns["speaker"]) == set(SPEECH)
    table.write_text("text,label\ngood\n")
    with pytest.raises(
        InputError, match="row 1 must have 2 fields, as the header, got 1"
    ):
        text.load(str(table))
    packed.write_bytes(b"no")
    with pytest.raises(InputError, match="cannot be read"):
        text.load(str(packed))


def test_networks_of_tokens_refuse_other_inputs():
    with pytest.raises(InputError, match="'gru' needs tokens"):
        models.model("gru", (8, 8, 1), 3)


def test_ag_news_is_read_from_tfds():
    folder = os.environ.get("TFDS_DATA_DIR", "")
    if not os.path.isdir(os.path.join(folder, "ag_news_subset")):
        pytest.skip(f"TFDS_DATA_DIR={folder} does not hold ag_news_subset")
    data = loading.load("ag_news_subset")
    assert data.num_classes == 4 and data.x.shape[1] == 200
    assert data.num_train < len(data.y) and set(np.unique(data.y)) == {0, 1, 2, 3}
    assert data.x[:, 0].all() and not data.x[:, -1].all()  # padded at the end


def test_speakers_of_real_plays():
    folder = os.environ.get("FEDJAX_PFL_REAL", "")
    path = os.path.join(folder, "shakespeare_by_speaker.json.gz")
    if not os.path.isfile(path):
        pytest.skip(f"FEDJAX_PFL_REAL={folder} does not hold {os.path.basename(path)}")
    data = loading.load(f"text:{path}")
    assert len(set(data.columns["speaker"])) > 1000
    inside = data.x[:, 1:] > 0
    assert np.array_equal(data.x[:, 1:][inside], data.y[:, :-1][inside])


def test_texts_take_the_vocabulary_and_the_length_of_a_base():
    def texts(words, *rows):
        x = np.array(rows, np.int32)
        prepare, y = datasets.prepare_integers, np.zeros(len(x), np.int32)
        return datasets.Dataset("t", x, y, len(x), 2, prepare, words=words)

    words = ("", "?", "good", "bad")
    found = text.like(texts(("", "?", "bad", "new"), (2, 3)), words, 3)
    assert found.words == words and found.x.tolist() == [[3, 1, 0]]
    with pytest.raises(InputError, match="give --max_length=3"):
        text.like(texts(("", "?", "bad"), (2, 2, 2, 2)), words, 3)


def dots(jaxpr):
    """Yields the types of the operands of all matrix products."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield tuple(str(x.aval.dtype) for x in eqn.invars)
        for inner in jaxprs_in_params(eqn.params):
            yield from dots(inner)


@pytest.mark.parametrize("name", ["fasttext", "gru", "transformer"])
def test_texts_are_computed_in_the_type_of_the_body(name):
    options = {"vocabulary": 9, "input_dtype": jnp.int32, "compute_dtype": "bfloat16"}
    model = models.model(name, (5,), 3, **options)
    x = jnp.ones((2, 5), jnp.int32)
    traced = jax.make_jaxpr(lambda w: model.features(w, x)[0])(
        model.init(jax.random.key(0))
    )
    assert set(dots(traced.jaxpr)) == {("bfloat16", "bfloat16")}
