"""Networks of tokens [B, L], of which token 0 is padding: an embedding bag, a GRU and a
causal transformer.

The GRU and the transformer have features per position [B, L, K] where examples have a
label per position, else their mean over the tokens, [B, K]. Axes: L positions, K
features, V tokens of the vocabulary."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net, Shape
from fedjax_pfl.types import Array

MASKED = -1e9  # a logit of attention, finite where all are masked


def mean_of_tokens(h: Array, x: Array) -> Array:
    """Mean of h [B, L, K] over the positions where x [B, L] is not padding, 0 without
    any: [B, K]."""
    here = (x != 0)[..., None]
    total = jnp.sum(jnp.where(here, h, 0), axis=1)
    return total / jnp.maximum(jnp.sum(here, axis=1), 1)


class EmbeddingBag(nnx.Module):
    """The mean embedding of the tokens that are not padding, and a linear layer."""

    def __init__(self, vocabulary: int, features: int, rngs: nnx.Rngs):
        self.embedding = embedding(vocabulary, features, rngs)
        self.linear = layers.linear(features, features, rngs)

    def __call__(self, x: Array) -> Array:
        return self.linear(mean_of_tokens(self.embedding(x), x))


class Recurrent(nnx.Module):
    """An embedding and one layer of gated recurrent units over the positions."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        features: int,
        pooled: bool,
        rngs: nnx.Rngs,
    ):
        self.embedding = embedding(vocabulary, width, rngs)
        init = layers.uniform(features)  # PyTorch's for a GRU
        self.cell = nnx.GRUCell(
            width,
            features,
            kernel_init=init,
            recurrent_kernel_init=init,
            bias_init=init,
            rngs=rngs,
        )
        self.features, self.pooled = features, pooled

    def __call__(self, x: Array) -> Array:
        steps = jnp.swapaxes(self.embedding(x), 0, 1)  # [L, B, E]
        start = jnp.zeros((len(x), self.features), steps.dtype)
        _, h = jax.lax.scan(self.cell, start, steps)
        h = jnp.swapaxes(h, 0, 1)
        return mean_of_tokens(h, x) if self.pooled else h


class Attention(nnx.Module):
    """Multi-head self-attention (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.qkv = layers.linear(width, 3 * width, rngs)
        self.out = layers.linear(width, width, rngs)
        self.heads = heads

    def __call__(self, h: Array, seen: Array | None = None) -> Array:
        """Maps h [B, L, K] to [B, L, K]; seen [B or 1, L, L] says which positions (last
        axis) a position attends to."""
        split = lambda a: a.reshape(*a.shape[:2], self.heads, -1)
        q, k, v = map(split, jnp.split(self.qkv(h), 3, axis=-1))  # [B, L, H, D]
        logits = jnp.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        if seen is not None:
            logits = jnp.where(seen[:, None], logits, MASKED)
        weights = jax.nn.softmax(logits, axis=-1)
        mixed = jnp.einsum("bhij,bjhd->bihd", weights, v)
        return self.out(mixed.reshape(h.shape))


class Block(nnx.Module):
    """Pre-norm transformer block: h + Attention(LayerNorm(h)), then the same with a
    perceptron of GELU, dropout on both branches."""

    def __init__(
        self, width: int, heads: int, hidden: int, rate: float, rngs: nnx.Rngs
    ):
        self.norms = nnx.List(
            [nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs) for _ in range(2)]
        )
        self.attention = Attention(width, heads, rngs)
        self.inner = layers.linear(width, hidden, rngs)
        self.outer = layers.linear(hidden, width, rngs)
        self.drop = nnx.Dropout(rate)

    def __call__(
        self, h: Array, seen: Array | None, train: bool, rngs: nnx.Rngs | None
    ) -> Array:
        still = not train or rngs is None
        drop: Callable[[Array], Array] = lambda a: self.drop(
            a, deterministic=still, rngs=rngs
        )
        h = h + drop(self.attention(self.norms[0](h), seen))
        inner = jax.nn.gelu(self.inner(self.norms[1](h)), approximate=False)
        return h + drop(self.outer(inner))


class Causal(nnx.Module):
    """Token and learned position embeddings, causal pre-norm blocks, a layer norm."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        depth: int,
        heads: int,
        rate: float,
        pooled: bool,
        rngs: nnx.Rngs,
    ):
        small = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=small, rngs=rngs)
        self.places = nnx.Param(small(rngs.params(), (length, width)))
        self.drop = nnx.Dropout(rate)
        self.blocks = nnx.List(
            [Block(width, heads, 4 * width, rate, rngs) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.pooled = pooled

    def __call__(
        self, x: Array, train: bool = False, rngs: nnx.Rngs | None = None
    ) -> Array:
        still = not train or rngs is None
        h = self.embedding(x) + self.places[...][None]
        h = self.drop(h, deterministic=still, rngs=rngs)
        past = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        seen = past[None] & (x != 0)[:, None]
        for block in self.blocks:
            h = block(h, seen, train, rngs)
        h = self.norm(h)
        return mean_of_tokens(h, x) if self.pooled else h


def embedding(vocabulary: int, features: int, rngs: nnx.Rngs) -> nnx.Embed:
    """Returns an embedding [V, K] with PyTorch's initialisation, N(0, 1)."""
    normal = nnx.initializers.normal(1.0)
    return nnx.Embed(vocabulary, features, embedding_init=normal, rngs=rngs)


def check_tokens(name: str, shape: Shape, vocabulary: int | None) -> int:
    """Returns the vocabulary's size; raises InputError unless inputs are tokens [L]."""
    if vocabulary is None or len(shape) != 1:
        raise InputError(
            f"Model {name!r} needs tokens, integers of shape [length], got inputs of "
            f"shape {tuple(shape)}."
        )
    return vocabulary


def fasttext(
    input_shape: Shape,
    num_classes: int,
    rngs: nnx.Rngs,
    *,
    vocabulary: int | None = None,
    features: int = 32,
) -> Net:
    """FastText as in FedCP: the mean embedding of a text's tokens and a linear layer, K
    = 32."""
    size = check_tokens("fasttext", input_shape, vocabulary)
    body = EmbeddingBag(size, features, rngs)
    return Net(body, layers.linear(features, num_classes, rngs))


def gru(
    input_shape: Shape,
    num_classes: int,
    rngs: nnx.Rngs,
    *,
    vocabulary: int | None = None,
    positions: int | None = None,
    width: int = 32,
    features: int = 128,
) -> Net:
    """Recurrent network of tokens: embedding of width 32, one GRU layer, K = 128."""
    size = check_tokens("gru", input_shape, vocabulary)
    body = Recurrent(size, width, features, positions is None, rngs)
    return Net(body, layers.linear(features, num_classes, rngs))


def transformer(
    input_shape: Shape,
    num_classes: int,
    rngs: nnx.Rngs,
    *,
    vocabulary: int | None = None,
    positions: int | None = None,
    features: int = 64,
    depth: int = 2,
    heads: int = 4,
    rate: float = 0.1,
) -> Net:
    """Causal transformer of tokens: learned positions, 2 pre-norm blocks of 4 heads,
    dropout 0.1, K = 64."""
    size = check_tokens("transformer", input_shape, vocabulary)
    pooled = positions is None
    body = Causal(size, input_shape[0], features, depth, heads, rate, pooled, rngs)
    return Net(body, layers.linear(features, num_classes, rngs))
