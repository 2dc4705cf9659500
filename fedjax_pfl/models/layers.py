"""Layers that are fast inside a loop of many small training steps, with PyTorch's initialisation.

Axes: B batch, H and W pixels, C and O channels in and out. Images are NHWC, kernels HWIO.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fedjax_pfl.checks import choose
from fedjax_pfl.types import Array

CONVOLUTIONS = ("auto", "fused", "matmul", "xla")
FEW_IN, FEW_OUT = 3, 8  # channels up to which pooling is fused: measured on LeNet, whose second layer is better without
_NHWC = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))
_form = contextvars.ContextVar("convolution", default="auto")


@contextlib.contextmanager
def convolution(form: str) -> Iterator[None]:
    """Makes `conv_general_dilated` use this form for whatever is traced inside the `with` block.

    Args:
      form: "matmul" (patches and one matrix product), "fused" (the same, and pooled in the product where channels are
        few, see `conv_pool`), "xla" (XLA's own convolution), or "auto": fused on a CPU, where XLA's convolution was
        measured 6 (LeNet) to 13 times (the CNN) slower, xla elsewhere.

    Raises:
      BadInput: for another form.
    """
    token = _form.set(choose("conv", form, CONVOLUTIONS))
    try:
        yield
    finally:
        _form.reset(token)


def form(name: str) -> str:
    """The form that a setting stands for on this machine: what "auto" chooses, else the setting itself."""
    return {"cpu": "fused"}.get(jax.default_backend(), "xla") if name == "auto" else name


def _uses_matmul() -> bool:
    return form(_form.get()) in ("matmul", "fused")


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    **kwargs,
) -> Array:
    """Like `lax.conv_general_dilated`, in the form chosen by `convolution`; give it to `nnx.Conv`.

    Dilated, grouped, sharded, not two-dimensional and not NHWC convolutions always go to lax.
    """
    unit = all(d == 1 for d in (*(lhs_dilation or ()), *(rhs_dilation or ()), feature_group_count))
    plain = unit and lhs.ndim == 4 and set(kwargs) <= {"precision", "out_sharding"} and not kwargs.get("out_sharding")
    if not (plain and _uses_matmul() and _is_nhwc(lhs, rhs, dimension_numbers)):
        return lax.conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            **kwargs,
        )
    return matmul_conv(lhs, rhs, window_strides, padding, kwargs.get("precision"))


def _is_nhwc(x: Array, kernel: Array, numbers) -> bool:
    return lax.conv_dimension_numbers(x.shape, kernel.shape, numbers) == _NHWC


def matmul_conv(
    x: Array, kernel: Array, strides: Sequence[int], padding: str | Sequence[tuple[int, int]], precision=None
) -> Array:
    """Convolution as shifted slices and one matrix product.

    Args:
      x: [B, H, W, C].
      kernel: [kh, kw, C, O].
      strides: of H and W.
      padding: "SAME", "VALID" or (before, after) of H and W.
      precision: of the product.

    Returns:
      [B, H', W', O].
    """
    kh, kw, channels, out = kernel.shape
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], (kh, kw), strides, padding)
    if any(before or after for before, after in padding):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*pad, 0) for pad in padding), (0, 0, 0)])
    # One axis at a time: the gradient then adds kh + kw shifted arrays, not kh * kw. Rows are stacked on an axis of
    # their own, because XLA fuses two joins of the last axis into one slow loop.
    x = jnp.concatenate(_shifts(x, 2, kw, strides[1]), axis=-1)
    x = jnp.stack(_shifts(x, 1, kh, strides[0]), axis=3)
    y = jnp.dot(x.reshape(-1, kh * kw * channels), kernel.reshape(-1, out), precision=precision)
    return y.reshape(*x.shape[:3], out)


def _shifts(x: Array, axis: int, size: int, stride: int) -> list[Array]:
    """What each of the `size` positions of a window along `axis` sees, one value for each window."""
    span = (x.shape[axis] - size) // stride * stride + 1
    return [lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)]


def max_pool(x: Array) -> Array:
    """Maximum over 2x2 windows with stride 2: [B, H, W, C] -> [B, H // 2, W // 2, C].

    An odd last row or column is left out. The gradient of these slices is much faster than that of `reduce_window`;
    where values tie, one of them gets it all.
    """
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(batch, height // 2, 2, width // 2 * 2, channels)
    x = _larger(x[:, :, 0], x[:, :, 1]).reshape(batch, height // 2, width // 2, 2, channels)
    return _larger(x[:, :, :, 0], x[:, :, :, 1])


def max_pool_3(x: Array) -> Array:
    """Maximum over 3x3 windows with stride 2 and one pixel of padding: [B, H, W, C] -> [B, ceil(H/2), ceil(W/2), C]."""
    x = lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), [(0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)])
    for axis in (2, 1):
        x = functools.reduce(_larger, _shifts(x, axis, 3, 2))
    return x


def conv_pool(conv: nnx.Conv, x: Array) -> Array:
    """max_pool(conv(x)) for a convolution of stride 1: [B, H, W, C] -> [B, H' // 2, W' // 2, O].

    In the "fused" form with few channels (LeNet's first layer) the four values of a pooling window are four outputs of
    one product with stride 2, whose kernels are the given one at four offsets in a window that is larger by one: the
    patches are a third as many, and the maximum runs over contiguous arrays.
    """
    kernel = conv.kernel[...]
    kh, kw, channels, out = kernel.shape
    if form(_form.get()) != "fused" or channels > FEW_IN or out > FEW_OUT or not isinstance(conv.padding, int):
        return max_pool(conv(x))
    x = jnp.moveaxis(jnp.pad(x, ((0, 0), *[(conv.padding,) * 2] * 2, (0, 0))), 3, 0)  # [C, B, H, W]
    height, width = (x.shape[2] - kh + 1) // 2, (x.shape[3] - kw + 1) // 2
    x = jnp.stack([lax.slice_in_dim(x, i, i + 2 * width - 1, 2, 3) for i in range(kw + 1)])
    x = jnp.stack([lax.slice_in_dim(x, i, i + 2 * height - 1, 2, 3) for i in range(kh + 1)])
    offsets = [((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)) for i in (0, 1) for j in (0, 1)]
    kernels = jnp.stack([jnp.pad(kernel, offset) for offset in offsets]).reshape(4, -1, out)
    y = jnp.dot(jnp.moveaxis(kernels, 2, 1).reshape(4 * out, -1), x.reshape(kernels.shape[1], -1))
    y = jnp.moveaxis(_largest(y.reshape(4, out, *x.shape[3:])), 0, 3)
    return y if conv.bias is None else y + conv.bias[...][None, None, None]


@jax.custom_jvp
def _larger(a: Array, b: Array) -> Array:
    """The maximum; its gradient is one selection, that of `jnp.maximum` shares ties and so divides."""
    return jnp.maximum(a, b)


@jax.custom_jvp
def _largest(y: Array) -> Array:
    """The maximum of y [4, ...] over its first axis, differentiated without slices, whose gradients pad."""
    return jnp.max(y, axis=0)


@_largest.defjvp
def _largest_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (y,), (dy,) = primals, tangents
    top = jnp.max(y, axis=0)
    first = jnp.where(y[0] == top, 0, jnp.where(y[1] == top, 1, jnp.where(y[2] == top, 2, 3)))
    chosen = first[None] == jnp.arange(4).reshape(4, *[1] * top.ndim)
    return top, jnp.sum(jnp.where(chosen, dy, 0), axis=0)


@_larger.defjvp
def _larger_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, b), (da, db) = primals, tangents
    return jnp.maximum(a, b), jnp.where(b > a, db, da)


def _uniform(fan_in: int) -> nnx.Initializer:
    """PyTorch's default for weights and biases alike: U(-1 / sqrt(fan_in), 1 / sqrt(fan_in))."""
    bound = 1 / math.sqrt(fan_in)
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)


def linear(din: int, dout: int, rngs: nnx.Rngs, **kwargs) -> nnx.Linear:
    """Returns `nnx.Linear` (kernel [din, dout], bias [dout]) with PyTorch's default initialisation."""
    init = _uniform(din)
    return nnx.Linear(din, dout, kernel_init=init, bias_init=init, rngs=rngs, **kwargs)


def conv(
    cin: int, cout: int, kernel: int | tuple[int, int], padding: int | str, rngs: nnx.Rngs, strides: int = 1, **kwargs
) -> nnx.Conv:
    """Returns `nnx.Conv` with PyTorch's default initialisation and the convolution chosen by `convolution`.

    Args:
      cin: channels in.
      cout: channels out.
      kernel: its side, or (kh, kw).
      padding: pixels on every side, "SAME" or "VALID".
      rngs: for the initialisation.
      strides: of both axes.
      **kwargs: further arguments of `nnx.Conv`, such as use_bias or feature_group_count.
    """
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    init = _uniform(math.prod(size) * cin // kwargs.get("feature_group_count", 1))
    kwargs = {"kernel_init": init, "bias_init": init, "conv_general_dilated": conv_general_dilated} | kwargs
    return nnx.Conv(cin, cout, size, (strides, strides), padding=padding, rngs=rngs, **kwargs)


class BatchNorm(nnx.BatchNorm):
    """Batch norm whose moments are those of the valid rows, with PyTorch's constants.

    PyTorch's momentum 0.1 is 0.9 here; as there, the running variance is the unbiased one. Rows that are not valid
    change nothing, NaN included; a batch without a valid row leaves the running moments as they are, and one with a
    single value a channel the running variance. Where `mean` is
    None there are no running moments, and the batch's are used at test time too.
    """

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, momentum: float = 0.9, epsilon: float = 1e-5):
        super().__init__(num_features, momentum=momentum, epsilon=epsilon, rngs=rngs)

    def __call__(self, x: Array, mask: Array | None = None, train: bool = False) -> Array:  # type: ignore[override]
        """Normalises x [B, ..., C] over all axes but the last; mask [B] bool says which rows are valid."""
        x, dtype = x.astype(jnp.promote_types(x.dtype, jnp.float32)), x.dtype  # sums of bfloat16 would lose digits
        if mask is not None:
            mask = mask.reshape(-1, *[1] * (x.ndim - 1))
            x = jnp.where(mask, x, 0)
        if train or self.mean is None:
            mean, var = self._moments(x, mask, train)
        else:
            mean, var = self.mean[...], self.var[...]
        mean, scale, bias = (v.reshape(*[1] * (x.ndim - 1), -1) for v in (mean, *self._affine(var)))
        return ((x - mean) * scale + bias).astype(dtype)

    def _affine(self, var: Array) -> tuple[Array, Array]:
        assert self.scale is not None and self.bias is not None
        return self.scale[...] * lax.rsqrt(var + self.epsilon), self.bias[...]

    def _moments(self, x: Array, mask: Array | None, train: bool) -> tuple[Array, Array]:
        axes = tuple(range(x.ndim - 1))
        rows = x.shape[0] if mask is None else mask.sum()
        count = jnp.asarray(rows * math.prod(x.shape[1:-1]), x.dtype)
        n = jnp.maximum(count, 1)
        mean = x.sum(axes, keepdims=True) / n
        centred = x - mean if mask is None else jnp.where(mask, x - mean, 0)
        var = (centred * centred).sum(axes) / n
        if train and self.mean is not None:
            self._update(mean.reshape(-1), var * n / jnp.maximum(n - 1, 1), count)
        return mean.reshape(-1), var

    def _update(self, mean: Array, var: Array, count: Array) -> None:
        for old, new, least in ((self.mean, mean, 1), (self.var, var, 2)):  # one value has no variance
            moved = self.momentum * old[...] + (1 - self.momentum) * lax.stop_gradient(new)
            old[...] = jnp.where(count >= least, moved, old[...])


class GroupNorm(nnx.Module):
    """Group norm (Wu & He, ECCV 2018) with PyTorch's epsilon, called as BatchNorm is; each example has its own moments.

    Of 32 groups, or the most that divide the channels.
    """

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, num_groups: int = 32):
        groups = math.gcd(num_groups, num_features)
        self.norm = nnx.GroupNorm(num_features, groups, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: Array, mask: Array | None = None, train: bool = False) -> Array:
        """Normalises x [B, H, W, C] over the pixels and channels of each group; rows that are not valid stay apart."""
        del mask, train
        return self.norm(x)
