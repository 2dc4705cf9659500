"""Cross entropy of texts in pieces, against that of whole logits."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decoding import GIVEN, KINDS, LENGTH, TOKENS, drawn, network

from fedjax_pfl import averaging, evaluation, losses, models
from fedjax_pfl.models import text
from fedjax_pfl.types import Batch, Data, Examples

ROWS = 4


def task(classes):
    """A task with the fields that the loss reads."""
    label = jax.ShapeDtypeStruct((LENGTH,), np.int32)
    return types.SimpleNamespace(loss=None, label=label, num_classes=classes)


def batch(clients=None):
    draw = np.random.default_rng(3)
    shape = () if clients is None else (clients,)
    x = draw.integers(1, TOKENS, (*shape, ROWS, LENGTH))
    y = draw.integers(0, TOKENS, (*shape, ROWS * LENGTH))
    mask = draw.random(y.shape) < 0.7
    return Batch(*map(jnp.asarray, (x, y, mask, draw.integers(0, 9, x.shape[:-1]))))


def found(model, w, given, clients=False):
    """Loss and gradients of one client, or of several with variables of their own."""
    loss = losses.classification(model, task(TOKENS))

    def of(w, given):
        return jax.value_and_grad(lambda w: loss(w, given, jax.random.key(5))[0])(w)

    return jax.jit(jax.vmap(of) if clients else of)(w, given)


def check(model, w, given, monkeypatch, clients=False):
    """Compares whole logits with pieces of 12 rows, the last of which is short."""
    whole = found(model, w, given, clients)
    monkeypatch.setattr(losses, "PIECE", 13 * TOKENS)
    pieces = found(model, w, given, clients)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        whole,
        pieces,
    )
    assert float(jnp.min(whole[0])) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_whole_logits(kind, monkeypatch):
    model = models.model(network(kind), (LENGTH,), TOKENS, **GIVEN)
    check(model, drawn(model, 2.0), batch(), monkeypatch)


@pytest.mark.parametrize("kind", ["transformer", "gemma2", "llama"])
def test_adapters_of_several_clients(kind, monkeypatch):
    """The output layer of Llama has an adapter, too; Gemma's is frozen."""
    how = models.lora(2, where="dense")
    options = {"blocks": "rematerialised", **GIVEN}
    model = models.adapted(network(kind), how, (LENGTH,), TOKENS, **options)
    keys = jax.random.split(jax.random.key(1), 3)
    w = jax.tree.map(lambda x: x + 0.1, jax.vmap(model.init)(keys))
    check(model, w, batch(3), monkeypatch, clients=True)


def test_the_logits_are_never_whole_in_memory(monkeypatch):
    """Those of all tokens are 8 times a piece; a step keeps two or three arrays of
    either size."""
    words = 2**13
    options = GIVEN | {"vocabulary": words}
    small = functools.partial(text.transformer, features=8)
    model = models.model(small, (LENGTH,), words, **options)
    w, given = model.init(jax.random.key(0)), batch()
    loss = losses.classification(model, task(words))

    def temporary():
        step = jax.jit(jax.grad(lambda w: loss(w, given, jax.random.key(5))[0]))
        return step.lower(w).compile().memory_analysis().temp_size_in_bytes

    whole = temporary()
    jax.clear_caches()
    monkeypatch.setattr(losses, "PIECE", len(given.y) * words // 8)
    logits = 4 * len(given.y) * words
    assert temporary() < 0.7 * logits < logits < whole


def test_scores_take_batches_of_a_piece(monkeypatch):
    """The perplexity of 5 texts does not depend on how many are predicted at once."""
    model = models.model(network("llama"), (LENGTH,), TOKENS, **GIVEN)
    w, draw, seen = drawn(model, 2.0), np.random.default_rng(1), []
    x, y = (jnp.asarray(draw.integers(1, TOKENS, (5, LENGTH))) for _ in "xy")
    own = Data(Examples(x, y), jnp.arange(5), jnp.int32(5), lambda x: x)
    c = types.SimpleNamespace(class_counts=jnp.ones(TOKENS, jnp.int32), test=own)

    def predict(x, mask):
        seen.append(len(x))
        return averaging.logits(model, w, x, mask)

    def score():
        return evaluation.client(c, predict, metrics=(evaluation.PERPLEXITY,))

    whole = score()
    monkeypatch.setattr(losses, "PIECE", 2 * LENGTH * TOKENS)
    pieces = score()
    assert {*seen} == {5, 2}
    assert {*whole} == {"acc", "acc_present", "acc_majority", "perplexity"}
    for name, value in whole.items():
        np.testing.assert_allclose(value, pieces[name], rtol=1e-5)
