"""Continuation with a cache of keys and values, against the whole network per token."""

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import models
from fedjax_pfl.data.sources import text
from fedjax_pfl.experiment import generation
from fedjax_pfl.experiment.generation import Generation
from fedjax_pfl.models import decoding, families

TOKENS, LENGTH = 17, 12
SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH,
}
GPT2 = {
    "vocab_size": TOKENS,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": LENGTH,
}
GEMMA = {
    "head_dim": 6,
    "query_pre_attn_scalar": 5,
    "sliding_window": 3,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.7,
}
LATE = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
KINDS = {
    "transformer": {},
    "gpt2": GPT2,
    "llama": SMALL | {"rope_parameters": LLAMA3},
    "mistral": SMALL | {"sliding_window": 3},
    "qwen2": SMALL | LATE,
    "qwen3": SMALL | {"head_dim": 6},
    "gemma2": SMALL | GEMMA,
}
GIVEN = {"input_dtype": jnp.int32, "vocabulary": TOKENS, "positions": LENGTH}


def network(kind):
    """The factory of a kind of networks."""
    if kind == "transformer":
        return kind
    files = types.SimpleNamespace(find=lambda name: None)
    config = families.Config(KINDS[kind] | {"model_type": kind})
    return families.TYPES[kind](config, files).factory


def drawn(model, scale=6.0):
    """Variables of such a size that tokens follow one another without a pattern."""
    w = model.init(jax.random.key(1))
    return jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, w)


def prompts(*lengths):
    x = np.random.default_rng(0).integers(1, TOKENS, (len(lengths), LENGTH))
    return np.where(np.arange(LENGTH) < np.array(lengths)[:, None], x, 0).astype(
        "int32"
    )


def slow(model, w, x, count):
    run = jax.jit(lambda x: model.apply(w, x)[0].reshape(*x.shape, -1))

    def after(x, length):
        return jax.nn.softmax(np.asarray(run(x))[np.arange(len(x)), length - 1])

    return generation.continued(after, x, Generation(count))


def fast(model, w, x, count, **options):
    length = jnp.asarray(text.lengths(x), jnp.int32)
    run = jax.jit(lambda w: decoding.continued(model, w, x, length, count, **options))
    return np.asarray(run(w))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_whole_network(kind):
    model = models.model(network(kind), (LENGTH,), TOKENS, **GIVEN)
    x, w = prompts(3, 1, 6), drawn(model)
    x[0, 1] = 0  # a token like others, or one that nothing sees
    found = fast(model, w, x, 7)
    np.testing.assert_array_equal(found, slow(model, w, x, 7))
    assert len({*found.ravel().tolist()}) > 4


def test_adapters_of_stacked_blocks_have_a_cache():
    """The frozen blocks are one stack, with a window in one of them."""
    base = models.model(network("qwen2"), (LENGTH,), TOKENS, **GIVEN)
    given = network("qwen2"), models.lora(2), (LENGTH,), TOKENS
    options = {"base": drawn(base), "blocks": "rematerialised", **GIVEN}
    model = models.adapted(*given, **options)
    w = jax.tree.map(lambda x: x + 0.3, model.init(jax.random.key(2)))
    x = prompts(4, 2)
    np.testing.assert_array_equal(fast(model, w, x, 6), slow(model, w, x, 6))
    prompted = models.adapted(given[0], models.prompt(2), *given[2:], **GIVEN)
    assert prompted.cache is None


def test_a_row_ends_with_the_token_or_the_length():
    model = models.model(network("llama"), (LENGTH,), TOKENS, **GIVEN)
    x, w = prompts(3, LENGTH - 2, LENGTH), drawn(model)
    whole = fast(model, w, x, LENGTH)
    assert (whole != decoding.END).sum(axis=1).tolist() == [LENGTH - 2, 3, 1]
    np.testing.assert_array_equal(whole[:1, :7], slow(model, w, x[:1], 7))
    stop = int(whole[0, 2])
    found = fast(model, w, x, LENGTH, stop=stop)[0]
    size = whole[0].tolist().index(stop) + 1
    assert found.tolist() == [*whole[0, :size], *[decoding.END] * (LENGTH - size)]


def test_draws_have_the_probabilities_of_the_temperature():
    model = models.model(network("gpt2"), (LENGTH,), TOKENS, **GIVEN)
    x, w = np.tile(prompts(4), (4000, 1)), drawn(model, 2.0)
    p = jax.nn.softmax(model.apply(w, jnp.asarray(x[:1]))[0][3] / 0.5)
    found = fast(model, w, x, 1, temperature=0.5, seed=3)[:, 0]
    shares = np.bincount(found, minlength=TOKENS) / len(found)
    np.testing.assert_allclose(shares, p, atol=0.03)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_clients_together_have_the_tokens_of_each_alone(kind):
    """With adapters, and prompts of different lengths and numbers; all stop at
    different steps."""
    given = network(kind), models.lora(2, where="dense"), (LENGTH,), TOKENS
    base = models.model(given[0], (LENGTH,), TOKENS, **GIVEN)
    model = models.adapted(*given, base=drawn(base), blocks="scanned", **GIVEN)
    e = types.SimpleNamespace(
        task=types.SimpleNamespace(input=np.zeros(LENGTH)),
        tracing=contextlib.nullcontext,
    )
    w = [
        jax.tree.map(lambda x, i=i: x + 0.02 * i, model.init(jax.random.key(i)))
        for i in range(5)
    ]
    sizes = {0: (3, 5, 2), 1: (4,), 2: (), 3: (9, 8, 7, 2), 4: range(1, 10)}
    texts = {i: prompts(*lengths) for i, lengths in sizes.items()}
    how = Generation(LENGTH, stop=3, limited=True)
    found = generation.decoder(e, model)(w.__getitem__, texts, how)
    for i, x in texts.items():
        alone = fast(model, w[i], x, LENGTH, stop=3) if len(x) else found[i]
        np.testing.assert_array_equal(found[i], alone)
    assert found[2].shape == (0, LENGTH)
    assert len(np.unique(np.concatenate([*found.values()]))) > 4


def test_texts_are_divided_into_calls_of_few_shapes():
    sizes = {0: 3, 1: 1, 2: 70, 3: 4, 4: 4, 5: 0, 6: 2}
    texts = {i: np.zeros((n, 1)) for i, n in sizes.items()}
    seen = {i: np.zeros(n, int) for i, n in sizes.items()}
    for most in (100, 1, 0):
        for rows, parts in generation.calls(texts, most):
            assert rows * len(parts) <= generation.ROWS and len(parts) <= max(1, most)
            assert rows.bit_count() == len(parts).bit_count() == 1
            for i, at in {(i, at.start): (i, at) for i, at in parts}.values():
                seen[i][at] += 1
    assert all((count == 3).all() for count in seen.values())
