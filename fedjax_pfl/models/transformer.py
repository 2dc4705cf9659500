"""Transformer blocks, shared by networks of tokens and of patches.

Axes: L positions, K features, H heads, D features of a head."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_pfl.errors import InputError
from fedjax_pfl.kernels.dense import laid_out
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.kernels.rows import layer_norm, softmax
from fedjax_pfl.models import layers
from fedjax_pfl.types import Array

MASKED = -1e9  # a logit of attention, finite where all are masked
Activation = Callable[[Array], Array]
# The axis of a weight that several devices divide: outputs of layers that read all
# features, and inputs of the layers after them, so that between the two nothing moves
# (Shoeybi et al., Megatron-LM, 2019).
DIVIDED = {
    **dict.fromkeys(("embedding", "unembed", "head"), 1),
    **dict.fromkeys(("qkv", "q", "k", "v", "gate", "inner"), 1),
    **dict.fromkeys(("out", "outer"), 0),
}


def _gelu(x: Array) -> Array:
    # `jax.nn.gelu` has erfc, which is slower; in bfloat16 this sum would cancel
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (y * (0.5 + 0.5 * jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


# by their names in config.json of Hugging Face
ACTIVATIONS: dict[str, Activation] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes and form of a transformer block.

    Attributes:
      width: K.
      heads: H, of queries.
      hidden: width of the perceptron's hidden layer.
      rate: dropout rate of both branches.
      activation: name in ACTIVATIONS, of the perceptron.
      norm: "layer" (layer norm) or "rms" (root mean square).
      epsilon: of the norms.
      post_norm: norms after the residual sums, else before the branches.
      gated: the hidden layer is activation(gate) * inner.
      fused: queries, keys and values are one linear layer.
      kv_heads: heads of keys and values, each of H / kv_heads heads of queries
        (grouped-query attention); None: H.
      head: D; None: K / H.
      query: features by whose root queries are divided; None: D.
      qk_norm: queries and keys have norms over D.
      cap: logits of the attention are cap tanh(logits / cap); None: as they are.
      qkv_bias: queries, keys and values have biases.
      out_bias: the output of the attention has a bias.
      mlp_bias: the perceptron has biases.
      rotary: frequencies [D / 2] of rotary position embeddings; empty: none.
      scaled: each branch has a factor per feature (layer scale).
      both_norms: norms before and after each branch.
    """

    width: int
    heads: int
    hidden: int
    rate: float = 0.0
    activation: str = "gelu"
    norm: str = "layer"
    epsilon: float = 1e-5
    post_norm: bool = False
    gated: bool = False
    fused: bool = True
    kv_heads: int | None = None
    head: int | None = None
    query: float | None = None
    qk_norm: bool = False
    cap: float | None = None
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    rotary: tuple[float, ...] = ()
    scaled: bool = False
    both_norms: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Returns the number of features of queries, keys and values."""
        size = self.head or self.width // self.heads
        shared = (self.kv_heads or self.heads) * size
        return self.heads * size, shared, shared


class LayerNorm(nnx.LayerNorm):
    """Layer norm by `kernels.rows.layer_norm` where it has scale and bias."""

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        if mask is not None or self.scale is None or self.bias is None:
            return super().__call__(x, mask=mask)
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


def norm(
    layout: Layout, rngs: nnx.Rngs, features: int | None = None
) -> nnx.LayerNorm | nnx.RMSNorm:
    """Returns a norm over K features, or another number of them."""
    make = nnx.RMSNorm if layout.norm == "rms" else LayerNorm
    return make(features or layout.width, epsilon=layout.epsilon, rngs=rngs)


def capped(logits: Array, cap: float | None) -> Array:
    """Returns cap tanh(logits / cap), between -cap and cap; None: the logits."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class Past:
    """Keys and values of positions that a text has already, and where new ones stand.

    Attributes:
      kept: keys and values [B, S, H, D] of positions 0 to S - 1; of a `Stack` [depth,
        B, S, H, D].
      at: [B, L] positions of the new tokens.
    """

    def __init__(self, kept: tuple[Array, Array], at: Array):
        self.kept, self.at = kept, at

    def extended(self, *new: Array) -> tuple[Array, Array]:
        """Returns keys and values [B, S, H, D] with new ones [B, L, H, D] at their
        positions, and keeps them; those after S are dropped."""
        rows = jnp.arange(len(self.at))[:, None]
        keys, values = (
            old.at[rows, self.at].set(a.astype(old.dtype), mode="drop")
            for old, a in zip(self.kept, new, strict=True)
        )
        self.kept = keys, values
        return self.kept


class Attention(nnx.Module):
    """Multi-head self-attention (Vaswani et al., 2017), with grouped queries (Ainslie
    et al., 2023) and rotary positions (Su et al., 2021) on request.

    On an accelerator by `jax.nn.dot_product_attention`, unless logits are capped or
    keys kept; on a CPU by products that are faster there."""

    def __init__(self, layout: Layout, rngs: nnx.Rngs):
        width, sizes, biased = layout.width, layout.sizes, layout.qkv_bias
        if layout.fused:
            self.qkv = layers.linear(width, sum(sizes), rngs, use_bias=biased)
        else:
            self.q, self.k, self.v = (
                layers.linear(width, size, rngs, use_bias=biased) for size in sizes
            )
        self.out = layers.linear(sizes[0], width, rngs, use_bias=layout.out_bias)
        if layout.qk_norm:
            size = sizes[0] // layout.heads
            self.q_norm, self.k_norm = (norm(layout, rngs, size) for _ in "qk")
        self.layout = layout

    def __call__(
        self,
        h: Array,
        seen: Array | None = None,
        at: Array | None = None,
        past: Past | None = None,
    ) -> Array:
        """Maps h [B, L, K] to [B, L, K].

        Args:
          seen: [B or 1, L or 1, L], which positions (last axis) a position attends to.
          at: [B, L] rotary positions; None: 0 to L - 1.
          past: earlier keys and values; `seen` is then [B or 1, L or 1, S].
        """
        c = self.layout
        if c.fused:
            first, second, _ = c.sizes
            parts = jnp.split(self.qkv(h), (first, first + second), axis=-1)
        else:
            parts = [self.q(h), self.k(h), self.v(h)]
        size = c.head or c.width // c.heads
        q, k, v = (a.reshape(*a.shape[:2], -1, size) for a in parts)  # [B, L, H, D]
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.rotary:
            q, k = rotated(q, c.rotary, at), rotated(k, c.rotary, at)
        if platform() != "cpu" and c.cap is None and past is None:
            mask = None if seen is None else seen[:, None]
            scale = 1 / math.sqrt(c.query or size)
            mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)
            return self.out(mixed.reshape(*h.shape[:2], -1))
        if past is not None:
            k, v = past.extended(k, v)
        if k.shape[2] < c.heads:
            k, v = (jnp.repeat(a, c.heads // a.shape[2], axis=2) for a in (k, v))
        q, k, v = (laid_out(jnp.swapaxes(a, 1, 2)) for a in (q, k, v))  # [B, H, L, D]
        q = q / math.sqrt(c.query or size)
        logits = capped(jnp.einsum("bhid,bhjd->bhij", q, k), c.cap)
        if seen is not None:
            logits = jnp.where(seen[:, None], logits, MASKED)
        weights = softmax(logits)
        mixed = laid_out(jnp.einsum("bhij,bhjd->bhid", weights, v))
        return self.out(jnp.swapaxes(mixed, 1, 2).reshape(*h.shape[:2], -1))


def rotated(a: Array, frequencies: tuple[float, ...], at: Array | None = None) -> Array:
    """Rotates feature i and i + D/2 of a [B, L, H, D] by the position times frequency
    i; positions `at` [B, L] are by default 0 to L - 1."""
    at = jnp.arange(a.shape[1])[None] if at is None else at
    angle = at[..., None] * jnp.asarray(frequencies)[None, None]
    cos, sin = (f(angle)[:, :, None].astype(a.dtype) for f in (jnp.cos, jnp.sin))
    x, y = jnp.split(a, 2, axis=-1)
    return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)


class Block(nnx.Module):
    """Transformer block: h + Attention(Norm(h)), then the same with a perceptron of one
    hidden layer, dropout on both branches.

    With `post_norm` each half is Norm(h + branch(h)), with `both_norms` h +
    Norm(branch(Norm(h)))."""

    def __init__(self, layout: Layout, rngs: nnx.Rngs):
        width, hidden, biased = layout.width, layout.hidden, layout.mlp_bias
        self.norms = nnx.List([norm(layout, rngs) for _ in range(2)])
        if layout.both_norms:
            self.after = nnx.List([norm(layout, rngs) for _ in range(2)])
        self.attention = Attention(layout, rngs)
        self.inner = layers.linear(width, hidden, rngs, use_bias=biased)
        self.outer = layers.linear(hidden, width, rngs, use_bias=biased)
        if layout.gated:
            self.gate = layers.linear(width, hidden, rngs, use_bias=biased)
        if layout.scaled:
            ones = [nnx.Param(jnp.ones(width)) for _ in range(2)]
            self.scales = nnx.List(ones)
        self.drop = nnx.Dropout(layout.rate)
        self.layout = layout

    def __call__(
        self,
        h: Array,
        seen: Array | None = None,
        train: bool = False,
        rngs: nnx.Rngs | None = None,
        at: Array | None = None,
        past: Past | None = None,
    ) -> Array:
        attend: Activation = lambda a: self.attention(a, seen, at, past)
        for i, branch in enumerate((attend, self._perceptron)):
            before = h if self.layout.post_norm else self.norms[i](h)
            change = branch(before)
            if self.layout.both_norms:
                change = self.after[i](change)
            if self.layout.scaled:
                change = change * self.scales[i][...][None, None]
            still = not train or rngs is None
            h = h + self.drop(change, deterministic=still, rngs=rngs)
            if self.layout.post_norm:
                h = self.norms[i](h)
        return h

    def _perceptron(self, h: Array) -> Array:
        activation = ACTIVATIONS[self.layout.activation]
        inner = self.inner(h)
        if self.layout.gated:
            return self.outer(activation(self.gate(h)) * inner)
        return self.outer(activation(inner))


class Stack(nnx.Module):
    """Blocks of one structure with variables stacked on a leading axis [depth]. A scan
    runs them one after another, so that the compiler sees a single one.

    Attributes:
      again: the derivative computes each block again, in place of keeping what is
        inside (rematerialisation).
    """

    def __init__(self, blocks: Sequence[Block], again: bool):
        graph, first = nnx.split(blocks[0])
        states = [first, *(nnx.state(block) for block in blocks[1:])]
        if len({jax.tree.structure(state) for state in states}) > 1:
            raise InputError("Stacked blocks must have the same parameters.")
        whole = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        self.block, self.again = nnx.merge(graph, whole), again

    def __call__(
        self,
        h: Array,
        seen: Array | None = None,
        windows: Array | None = None,
        train: bool = False,
        rngs: nnx.Rngs | None = None,
        at: Array | None = None,
        past: Past | None = None,
    ) -> Array:
        """Maps h [B, L, K]; windows [depth] are those of `within`."""
        graph, state = nnx.split(self.block)
        depth = len(jax.tree.leaves(state)[0])
        keys = None
        if train and rngs is not None:
            keys = jax.random.split(rngs.dropout(), depth)

        def one(h: Array, given: tuple[Any, ...]) -> Any:
            state, window, key, kept = given
            own = None if past is None else Past(kept, past.at)
            near = seen
            if seen is not None and window is not None:
                near = within(seen, window, None if own is None else own.at)
            drawn = None if key is None else nnx.Rngs(dropout=key)
            h = nnx.merge(graph, state)(h, near, train, drawn, at, own)
            return h, None if own is None else own.kept

        step = jax.checkpoint(one) if self.again else one
        each = state, windows, keys, None if past is None else past.kept
        h, kept = jax.lax.scan(step, h, each)
        if past is not None:
            past.kept = kept
        return h


def within(seen: Array, window: Array | int, at: Array | None = None) -> Array:
    """Returns which positions see which, [b, L, S], of these up to `window` back.

    Args:
      at: [b, L] positions that see others; None: 0 to L - 1.
    """
    others = jnp.arange(seen.shape[-1])
    at = others[None] if at is None else at
    return seen & (at[:, :, None] - others[None, None] < window)
