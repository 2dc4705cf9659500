"""Layers that are fast inside a loop of many small training steps, with PyTorch's
initialisation.

Axes: B batch, H and W pixels, C and O channels in and out. Images are NHWC, kernels
HWIO.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fedjax_pfl.errors import InputError
from fedjax_pfl.kernels import dense, packed, paired, pooled
from fedjax_pfl.kernels.convolution import (
    CONVOLUTIONS,
    XLA,
    conv_general_dilated,
    convolution,
    current_form,
    form,
    matmul_conv,
    shifts,
)
from fedjax_pfl.kernels.pooling import larger, max_pool, max_pool_3
from fedjax_pfl.kernels.transposed import conv_transpose
from fedjax_pfl.types import Array

__all__ = [
    "CONVOLUTIONS",
    "BatchNorm",
    "ConvTranspose",
    "GroupNorm",
    "conv",
    "conv_general_dilated",
    "conv_pool",
    "conv_relu_pool",
    "convolution",
    "form",
    "linear",
    "matmul_conv",
    "max_pool",
    "max_pool_3",
]

BLOCKS = {"packed": packed.conv_relu_pool, "pooled": pooled.conv_relu_pool}
# channels up to which pooling is fused: measured on the first layers of LeNet and of
# the CNN
FEW_IN, FEW_OUT = 3, 32
# channels out from which they stand last there: LeNet's 6 are 1.2 times as fast in
# front
LEAST_LAST = 16


def conv_relu_pool(conv: nnx.Conv, x: Array) -> Array:
    """Computes relu(max_pool(conv(x))) for a convolution of stride 1 with a bias: [B,
    H, W, C] -> [B, H' // 2, W' // 2, O]."""
    block = BLOCKS.get(current_form())
    if block is None or not isinstance(conv.padding, int) or type(conv) is not nnx.Conv:
        return jax.nn.relu(conv_pool(conv, x))
    kernel, bias = conv.kernel[...], conv.bias
    shift = jnp.zeros(kernel.shape[-1], x.dtype) if bias is None else bias[...]
    return block(x, kernel, shift, conv.padding)


def conv_pool(conv: nnx.Conv, x: Array) -> Array:
    """max_pool(conv(x)) for a convolution of stride 1: [B, H, W, C] -> [B, H' // 2, W'
    // 2, O].

    Where channels are few (LeNet's first layer), and unless the form is "matmul" or
    "xla", the four values of a pooling window are four outputs of one product with
    stride 2, whose kernels are the given one at four offsets in a window that is larger
    by one: the patches are a third as many, and the maximum runs over contiguous
    arrays. The outputs are the product's rows where they are few; else its columns, so
    that channels stand last as in the next layer.
    """
    kernel = conv.kernel[...]
    kh, kw, channels, out = kernel.shape
    if type(conv) is not nnx.Conv:  # it adds to the convolution
        return max_pool(conv(x))
    many = channels > FEW_IN or out > FEW_OUT
    if many or not isinstance(conv.padding, int) or current_form() in ("matmul", *XLA):
        return max_pool(conv(x))
    x = jnp.pad(x, ((0, 0), *[(conv.padding,) * 2] * 2, (0, 0)))
    offsets = [((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)) for i in (0, 1) for j in (0, 1)]
    kernels = jnp.stack(
        [jnp.pad(kernel, offset) for offset in offsets], axis=3
    ).reshape(-1, 4 * out)
    if out < LEAST_LAST or kh % 2 == 0 or kw % 2 == 0:
        patches = _patches_first(x, kh + 1, kw + 1)
        y = jnp.dot(kernels.T, patches.reshape(len(kernels), -1))
        y = jnp.moveaxis(_largest(y.reshape(4, out, *patches.shape[3:])), 0, 3)
    else:
        patches = _patches_last(x, kh + 1, kw + 1)
        y = jnp.dot(patches.reshape(-1, len(kernels)), kernels)
        a, b, c, d = lax.split(y, [out] * 4, axis=1)
        y = larger(larger(a, b), larger(c, d)).reshape(*patches.shape[:3], out)
    return y if conv.bias is None else y + conv.bias[...][None, None, None]


def _patches_first(x: Array, kh: int, kw: int) -> Array:
    """Windows of even sides with stride 2: [B, H, W, C] -> [kh, kw, C, B, (H - kh) // 2
    + 1, (W - kw) // 2 + 1]."""
    x = jnp.moveaxis(x, 3, 0)  # [C, B, H, W]
    return jnp.stack(shifts(jnp.stack(shifts(x, 3, kw, 2)), 3, kh, 2))


def _patches_last(x: Array, kh: int, kw: int) -> Array:
    """Windows of even sides with stride 2: [B, H, W, C] -> [B, (H - kh) // 2 + 1, (W -
    kw) // 2 + 1, kh * kw * C]."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2].reshape(
        batch, height // 2, 2, width // 2, 2 * channels
    )
    x = jnp.concatenate(shifts(x, 3, kw // 2, 1), axis=4)
    x = jnp.swapaxes(x, 2, 3).reshape(batch, height // 2, x.shape[3], -1)
    return jnp.concatenate(shifts(x, 1, kh // 2, 1), axis=3)


@jax.custom_jvp
def _largest(y: Array) -> Array:
    """The maximum of y [4, ...] over its first axis, differentiated without slices,
    whose gradients pad."""
    return jnp.max(y, axis=0)


@_largest.defjvp
def _largest_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (y,), (dy,) = primals, tangents
    top = jnp.max(y, axis=0)
    first = jnp.where(
        y[0] == top, 0, jnp.where(y[1] == top, 1, jnp.where(y[2] == top, 2, 3))
    )
    chosen = first[None] == jnp.arange(4).reshape(4, *[1] * top.ndim)
    return top, jnp.sum(jnp.where(chosen, dy, 0), axis=0)


def uniform(fan_in: int) -> nnx.Initializer:
    """PyTorch's default for weights and biases alike: U(-1 / sqrt(fan_in), 1 /
    sqrt(fan_in))."""
    bound = 1 / math.sqrt(fan_in)
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
        key, shape, dtype, -bound, bound
    )


def linear(din: int, dout: int, rngs: nnx.Rngs, **kwargs: Any) -> nnx.Linear:
    """Returns `nnx.Linear` (kernel [din, dout], bias [dout]) with PyTorch's default
    initialisation."""
    init = uniform(din)
    kwargs = {
        "kernel_init": init,
        "bias_init": init,
        "dot_general": dense.dot_general,
    } | kwargs
    return nnx.Linear(din, dout, rngs=rngs, **kwargs)


def conv(
    cin: int,
    cout: int,
    kernel: int | tuple[int, int],
    padding: int | str,
    rngs: nnx.Rngs,
    strides: int = 1,
    **kwargs: Any,
) -> nnx.Conv:
    """Returns `nnx.Conv` with PyTorch's default initialisation and the convolution
    chosen by `convolution`.

    Args:
      cin: channels in.
      cout: channels out.
      kernel: its side, or (kh, kw).
      padding: pixels on every side, "SAME" or "VALID".
      rngs: for the initialisation.
      strides: of both axes.
      **kwargs: further arguments of `nnx.Conv`, such as use_bias or
        feature_group_count.
    """
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    init = uniform(math.prod(size) * cin // kwargs.get("feature_group_count", 1))
    kwargs = {
        "kernel_init": init,
        "bias_init": init,
        "conv_general_dilated": conv_general_dilated,
    } | kwargs
    return nnx.Conv(
        cin, cout, size, (strides, strides), padding=padding, rngs=rngs, **kwargs
    )


class ConvTranspose(nnx.Module):
    """Transposed convolution with a bias and PyTorch's default initialisation, see
    `transposed.conv_transpose`.

    The fan-in is PyTorch's for this layer, O * side^2: that of the kernel's second axis
    there."""

    def __init__(
        self,
        cin: int,
        cout: int,
        side: int,
        padding: int,
        rngs: nnx.Rngs,
        stride: int = 1,
    ):
        init = uniform(cout * side**2)
        self.kernel = nnx.Param(init(rngs.params(), (side, side, cin, cout)))
        self.bias = nnx.Param(init(rngs.params(), (cout,)))
        self.stride, self.padding = stride, padding

    def __call__(self, x: Array) -> Array:
        """Maps x [B, H, W, C] to [B, (H - 1) * stride + side - 2 * padding, the same of
        W, O]."""
        y = conv_transpose(x, self.kernel[...], self.stride, self.padding)
        return y + self.bias[...][None, None, None]


_padded = contextvars.ContextVar("padded", default=False)


@contextlib.contextmanager
def padded(mask: Array | None) -> Iterator[None]:
    """Refuses, inside the `with` block, a batch norm that gets no mask although its
    network got one."""
    token = _padded.set(mask is not None)
    try:
        yield
    finally:
        _padded.reset(token)


class BatchNorm(nnx.BatchNorm):
    """Batch norm whose mean and variance are those of the valid rows, with PyTorch's
    constants.

    PyTorch's momentum 0.1 is 0.9 here; as there, the running variance is the unbiased
    one. Rows that are not valid change nothing, NaN included; a batch without a valid
    row leaves the running statistics as they are, and one with a single value a channel
    the running variance. Where `mean` is None there are no running statistics, and the
    batch's are used at test time too. Where `still` is set they are not updated, and
    training normalises by them.
    """

    still = False

    def __init__(
        self,
        num_features: int,
        *,
        rngs: nnx.Rngs,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
    ):
        super().__init__(num_features, momentum=momentum, epsilon=epsilon, rngs=rngs)

    def __call__(  # type: ignore[override]  # Flax's takes other arguments
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        """Normalises x [B, ..., C] over all axes but the last, in form "packed" also
        `kernels.paired.pairs`; mask [B] bool says which rows are valid.

        Raises:
          InputError: its network got a mask and does not hand it on.
        """
        assert self.scale is not None and self.bias is not None
        train = train and not self.still
        # sums of bfloat16 would lose digits
        x, dtype = x.astype(jnp.promote_types(x.dtype, jnp.float32)), x.dtype
        axes = tuple(range(x.ndim - 1))
        is_packed = current_form() == "packed"
        in_pairs = is_packed and paired.is_paired(x, self.num_features)

        def wide(v: Array) -> Array:
            v = paired.for_both(v) if in_pairs else v
            return v.reshape(*[1] * len(axes), -1)

        def by_channel(v: Array) -> Array:
            return paired.sum_of_both(v) if in_pairs else v

        def valid(x: Array) -> Array:
            return (
                x
                if mask is None
                else jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
            )

        count = jnp.asarray(
            (len(x) if mask is None else mask.sum())
            * (paired.pixels(x) if in_pairs else math.prod(x.shape[1:-1])),
            x.dtype,
        )
        n, of_batch = jnp.maximum(count, 1), train or self.mean is None
        if of_batch and mask is None and _padded.get():
            raise InputError(
                "A batch norm must get the `mask` of its network's __call__, or masked "
                "rows would count."
            )
        one_pass = of_batch and is_packed
        if one_pass:
            mean = by_channel(valid(x).sum(axes)) / n
        elif of_batch:
            mean = valid(x.sum(axes[1:])).sum(0) / n
        else:
            mean = self.mean[...]
        # A constant is subtracted from x and corrected for: the mean's gradient then
        # takes no sum over x of its own, and x less the constant is all that is kept
        # for it (a step of ResNet-18 on a CPU: 0.96 of the time).
        # In form "packed" it is 0: a TPU sums x and its square in the convolution that
        # writes x.
        constant = jnp.zeros_like(mean) if one_pass else lax.stop_gradient(mean)
        centred, shift = valid(x - wide(constant)), mean - constant
        var = (
            by_channel((centred * centred).sum(axes)) / n - shift * shift
            if of_batch
            else self.var[...]
        )
        var = jnp.maximum(var, 0) if one_pass else var  # rounding
        if train and self.mean is not None:
            self._update(mean, var * n / jnp.maximum(n - 1, 1), count)
        scale = self.scale[...] * lax.rsqrt(var + self.epsilon)
        return (centred * wide(scale) + wide(self.bias[...] - shift * scale)).astype(
            dtype
        )

    def _update(self, mean: Array, var: Array, count: Array) -> None:
        # one value has no variance
        for old, new, least in ((self.mean, mean, 1), (self.var, var, 2)):
            moved = self.momentum * old[...] + (1 - self.momentum) * lax.stop_gradient(
                new
            )
            # not old[...] =, for which NNX asks traced values for their sharding: an
            # error that takes milliseconds
            old.set_value(jnp.where(count >= least, moved, old[...]))


class GroupNorm(nnx.Module):
    """Group norm (Wu & He, ECCV 2018) with PyTorch's epsilon, called as BatchNorm is;
    each example has its own mean and variance.

    Of 32 groups, or their greatest common divisor with the channels.
    """

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, num_groups: int = 32):
        groups = math.gcd(num_groups, num_features)
        self.norm = nnx.GroupNorm(
            num_features, groups, epsilon=1e-5, use_fast_variance=False, rngs=rngs
        )

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        """Normalises x [B, H, W, C] over the pixels and channels of each group, every
        row on its own."""
        del mask, train
        return self.norm(x)
