"""Networks of tokens [B, L], of which token 0 is padding: an embedding bag, a GRU and a
causal transformer.

The GRU and the transformer have features per position [B, L, K] where examples have a
label per position, else their mean over the tokens, [B, K]. Axes: L positions, K
features, V tokens of the vocabulary."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net, Shape
from fedjax_pfl.models.transformer import (
    ACTIVATIONS,
    Block,
    Layout,
    Past,
    capped,
    norm,
    within,
)
from fedjax_pfl.types import Array, Hidden, PyTree


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


class Step(NamedTuple):
    """Tokens that continue texts whose earlier keys and values are kept.

    Attributes:
      tokens: [B, L].
      start: [B] positions of the first of them.
      last: [B] index of the one whose features are wanted.
      cache: as of `Tokens.cache`.
    """

    tokens: Array
    start: Array
    last: Array
    cache: PyTree


class Tokens(nnx.Module):
    """A transformer of tokens: token and position embeddings, blocks, and a norm unless
    the blocks end in one.

    Features are those of `pool`: "all" positions [B, L, K], or [B, K], the "mean" over
    the tokens that are not padding, the "first" or the "last" of these; "logits" are
    outputs [B, L, C] of all positions for the next token.

    Attributes:
      causal: a position attends to none after it.
      masked: token 0 is padding, to which no position attends.
      packed: rows have several texts, as of `unpacked`. A position attends to those of
        its text, and positions are counted from the text's first token.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        depth: int,
        layout: Layout,
        rngs: nnx.Rngs,
        *,
        pool: str = "all",
        causal: bool = True,
        masked: bool = True,
        first_norm: bool = False,
        pooler: str = "",
        tied: bool = True,
        outputs: int | None = None,
        windows: Sequence[int | None] = (),
        scale: float = 1.0,
        cap: float | None = None,
        packed: bool = False,
    ):
        """Makes the layers.

        Args:
          vocabulary: V.
          length: rows of the table of positions, at least L; without use where the
            layout is rotary.
          depth: number of blocks.
          layout: of a block.
          rngs: for the initialisation.
          pool: as above.
          causal: as above.
          masked: as above.
          first_norm: the embeddings are normalised.
          pooler: activation of a linear layer after the pooling; "": there is none.
          tied: "logits" are products with the token embeddings, else of a layer of
            their own.
          outputs: C of "logits", the first ones of V; None: V.
          windows: of each block, the positions up to its own that a position attends
            to; None: all.
          scale: of the token embeddings.
          cap: "logits" are cap tanh(logits / cap); None: as they are.
          packed: as above, with "all" or "logits".
        """
        small = nnx.initializers.normal(0.02, jnp.float32)
        width = layout.width
        self.embedding = embedding(vocabulary, width, rngs, small)
        if not layout.rotary:
            self.places = nnx.Param(small(rngs.params(), (length, width)))
        self.drop = nnx.Dropout(layout.rate)
        self.blocks = nnx.List([Block(layout, rngs) for _ in range(depth)])
        if first_norm:
            self.first_norm = norm(layout, rngs)
        if not layout.post_norm:
            self.norm = norm(layout, rngs)
        if pooler:
            self.pooler = layers.linear(width, width, rngs)
        if pool == "logits" and not tied:
            self.unembed = layers.linear(width, vocabulary, rngs, use_bias=False)
        self.pool, self.activation = pool, pooler
        self.causal, self.masked, self.packed = causal, masked, packed
        self.rotary = bool(layout.rotary)
        self.outputs = vocabulary if outputs is None else outputs
        self.windows = tuple(windows) or (None,) * depth
        self.scale, self.cap = scale, cap

    def cache(self, rows: int, length: int) -> PyTree:
        """Returns the cache of `rows` texts of no tokens yet: whether a position may be
        seen [B, S], and keys and values [B, S, H, D] of each block.

        Args:
          length: S, the most tokens of a text.

        Returns:
          None for a network that cannot continue texts so.
        """
        if self.pool not in ("all", "logits") or not self.causal:
            return None
        stack: Any = getattr(self, "stack", None)
        c = self.blocks[0].layout if stack is None else stack.block.layout
        size = c.head or c.width // c.heads
        shape = rows, length, c.kv_heads or c.heads, size
        seen, depth = jnp.zeros((rows, length), bool), len(self.windows)
        if stack is not None:
            return seen, (jnp.zeros((depth, *shape)), jnp.zeros((depth, *shape)))
        return seen, [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(depth)]

    def _continued(self, x: Step) -> tuple[Array, PyTree]:
        """Returns the features [B, 1, K] of the wanted tokens, and the cache."""
        seen, kept = x.cache
        at = x.start[:, None] + jnp.arange(x.tokens.shape[1])[None]  # [B, L]
        known = (x.tokens != 0) | (not self.masked)
        rows = jnp.arange(len(at))
        seen = seen.at[rows[:, None], at].set(known, mode="drop")
        before = jnp.arange(seen.shape[1])[None, None] <= at[:, :, None]
        near, h = seen[:, None] & before, self._embedded(x.tokens, at)  # [B, L, S]
        if hasattr(self, "stack"):
            past = Past(kept, at)
            sizes = [seen.shape[1] if size is None else size for size in self.windows]
            h = self.stack(h, near, jnp.asarray(sizes), at=at, past=past)
            kept = past.kept
        else:
            pasts = [Past(own, at) for own in kept]
            for block, size, past in zip(self.blocks, self.windows, pasts, strict=True):
                own = near if size is None else within(near, size, at)
                h = block(h, own, at=at, past=past)
            kept = [past.kept for past in pasts]
        h = h[rows, x.last][:, None]
        h = self.norm(h) if hasattr(self, "norm") else h
        return self._pooled(h, x.tokens), (seen, kept)

    def _embedded(self, x: Array, at: Array | None) -> Array:
        """Returns the embeddings of tokens [B, L] at their positions."""
        h = self.embedding(x)
        if self.scale != 1:
            h = h * self.scale
        if not self.rotary:
            own = self.places[...]
            h = h + (own[None, : x.shape[1]] if at is None else own[at])
        if hasattr(self, "first_norm"):
            h = self.first_norm(h)
        return h

    def __call__(
        self,
        x: Array | Step | Hidden,
        train: bool = False,
        rngs: nnx.Rngs | None = None,
    ) -> Any:
        """Returns features; of a `Step` also the new cache."""
        if isinstance(x, Step):
            return self._continued(x)
        if isinstance(x, Hidden):
            if x.h is not None:
                return self._logits(x.h)
            assert x.x is not None
            return self._hidden(x.x, train, rngs)[0]
        h = self._pooled(*self._hidden(x, train, rngs))
        if hasattr(self, "pooler"):
            h = ACTIVATIONS[self.activation](self.pooler(h))
        return h

    def _hidden(
        self, x: Array, train: bool, rngs: nnx.Rngs | None
    ) -> tuple[Array, Array]:
        """Returns the features [B, L, K] before the pooling, and the plain tokens."""
        still = not train or rngs is None
        length, at = x.shape[1], None
        if self.packed:
            x, start = unpacked(x)
            at = jnp.arange(length)[None] - start
        h = self._embedded(x, at)
        h = self.drop(h, deterministic=still, rngs=rngs)
        seen = jnp.ones((1, length, length), bool)
        if self.causal:
            seen = jnp.tril(seen)
        if self.masked:
            seen = seen & (x != 0)[:, None]
        if self.packed:
            seen = seen & (start[:, :, None] == start[:, None])
        if hasattr(self, "stack"):
            sizes = [length if size is None else size for size in self.windows]
            windows = jnp.asarray(sizes) if any(self.windows) else None
            h = self.stack(h, seen, windows, train, rngs, at)
        else:
            for block, window in zip(self.blocks, self.windows, strict=True):
                near = seen if window is None else within(seen, window)
                h = block(h, near, train, rngs, at)
        if hasattr(self, "norm"):
            h = self.norm(h)
        return h, x

    def _pooled(self, h: Array, x: Array) -> Array:
        if self.pool == "mean":
            return mean_of_tokens(h, x)
        if self.pool == "first":
            return h[:, 0]
        if self.pool == "last":
            at = jnp.max(jnp.where(x != 0, jnp.arange(x.shape[1])[None], 0), axis=1)
            return jnp.take_along_axis(h, at[:, None, None], axis=1)[:, 0]
        if self.pool == "logits":
            return self._logits(h)
        return h

    def _logits(self, h: Array) -> Array:
        own = hasattr(self, "unembed")
        logits = self.unembed(h) if own else self.embedding.attend(h)
        return capped(logits[..., : self.outputs], self.cap)


def unpacked(x: Array) -> tuple[Array, Array]:
    """Returns the tokens of rows x [B, L] of several texts, and the position in the row
    at which each token's text begins, [B, L] both.

    A negative number -1 - t is the first token t of a text after another one
    (`data.packing`).
    """
    first = x < 0
    start = jnp.where(first, jnp.arange(x.shape[1])[None], 0)
    return jnp.where(first, ~x, x), jax.lax.cummax(start, axis=1)


def embedding(
    vocabulary: int,
    features: int,
    rngs: nnx.Rngs,
    init: nnx.Initializer | None = None,
) -> nnx.Embed:
    """Returns an embedding [V, K], by default with PyTorch's initialisation N(0, 1)."""
    init = nnx.initializers.normal(1.0, jnp.float32) if init is None else init
    made = nnx.Embed(vocabulary, features, embedding_init=init, rngs=rngs)
    # Flax's type is that of the first table: in bfloat16 all features were float32.
    made.dtype = None
    return made


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
    packed: bool = False,
    features: int = 64,
    depth: int = 2,
    heads: int = 4,
    rate: float = 0.1,
) -> Net:
    """Causal transformer of tokens: learned positions, 2 pre-norm blocks of 4 heads,
    dropout 0.1, K = 64."""
    size = check_tokens("transformer", input_shape, vocabulary)
    pool = "all" if positions is not None else "mean"
    layout = Layout(features, heads, 4 * features, rate)
    length = input_shape[0]
    body = Tokens(size, length, depth, layout, rngs, pool=pool, packed=packed)
    return Net(body, layers.linear(features, num_classes, rngs))
