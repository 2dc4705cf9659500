"""Convolutions that are fast inside a loop of many small training steps, and the setting that chooses among them.

Axes: B batch, H and W pixels, C and O channels in and out. Images are NHWC, kernels HWIO.
"""

import contextlib
import contextvars
import functools
import math
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_pfl.checks import choose
from fedjax_pfl.types import Array

CONVOLUTIONS = ("auto", "winograd", "fused", "matmul", "xla")
NARROW = 128  # channels out up to which the order of the kernel gradient's product matters
LEAST_CHANNELS, LEAST_TILES = 8, 32  # for Winograd: measured, see `winograd_is_faster`
TILE = 4  # outputs a side of one of Winograd's windows, which is side + 3 pixels wide
POINTS = {  # of Winograd's polynomials for a kernel of this side, besides infinity
    3: (0, 5 / 8, -5 / 8, 3 / 2, -3 / 2),
    5: (0, 1 / 2, -1 / 2, 1, -1, 2, -2),
}
_NHWC = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))
_form = contextvars.ContextVar("convolution", default="auto")


@contextlib.contextmanager
def convolution(form: str) -> Iterator[None]:
    """Makes `conv_general_dilated` use this form for whatever is traced inside the `with` block.

    Args:
      form: one of
        matmul: patches and one matrix product;
        fused: the same, and pooled in the product where channels are few, see `layers.conv_pool`;
        winograd: the same, with Winograd's products for the shapes where they are faster, see `winograd_conv`;
        xla: XLA's own convolution;
        auto: winograd on a CPU, where XLA's convolution is many times slower inside a loop, xla elsewhere.

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
    return {"cpu": "winograd"}.get(jax.default_backend(), "xla") if name == "auto" else name


def current_form() -> str:
    """The form that holds where this is called, never "auto"."""
    return form(_form.get())


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
    chosen = current_form()
    if not plain or chosen == "xla" or not _is_nhwc(lhs, rhs, dimension_numbers):
        others = (lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count)
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, *others, **kwargs)
    pads = _explicit(padding, lhs, rhs, window_strides)
    if chosen == "winograd" and winograd_is_faster(lhs, rhs, window_strides, pads):
        return winograd_conv(lhs, rhs, pads, kwargs.get("precision"))
    return matmul_conv(lhs, rhs, window_strides, pads, kwargs.get("precision"))


def _is_nhwc(x: Array, kernel: Array, numbers) -> bool:
    return lax.conv_dimension_numbers(x.shape, kernel.shape, numbers) == _NHWC


def winograd_is_faster(x: Array, kernel: Array, strides: Sequence[int], pads: Sequence[tuple[int, int]]) -> bool:
    """Whether `winograd_conv` beats `matmul_conv` on a CPU; arguments as theirs.

    Measured for stride 1, forward and both gradients in a loop, on a core of an Intel Xeon with AVX-512, relative to
    `matmul_conv`: 3x3 kernels with 1,024 tiles of the batch 1.4 (8 channels in and out), 2.2 (32), 2.5 (64); with 64
    tiles 2.1 (64), 1.7 (256), 1.4 (512); with 32 tiles 1.3 (256), 1.0 (512); with 16 tiles 0.65 (512), because the
    kernel is transformed, too; with 3 channels in 0.5. 5x5 kernels with 160 tiles 1.1 (8), 3.7 (64); with 40 tiles 2.6
    (128); with 3 channels in 0.6, with 6 at most 0.9. Where 9/16 of the tiles' pixels are used 1.2 (3x3), where 2/5 are
    0.7 and 1.0 (5x5).
    """
    side, width, channels, out = kernel.shape
    square = side == width and side in POINTS
    if not square or tuple(strides) != (1, 1) or min(channels, out) < LEAST_CHANNELS or x.dtype.itemsize < 4:
        return False
    high, wide, rows, columns = _tiles(x, side, pads)
    return len(x) * rows * columns >= LEAST_TILES and 2 * high * wide >= rows * columns * TILE**2


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
    kh, kw, _, out = kernel.shape
    x = _padded(x, _explicit(padding, x, kernel, strides))
    # One axis at a time: the gradient then adds kh + kw shifted arrays, not kh * kw. Rows are stacked on an axis of
    # their own, because XLA fuses two joins of the last axis into one slow loop.
    x = jnp.concatenate(shifts(x, 2, kw, strides[1]), axis=-1)
    x = jnp.stack(shifts(x, 1, kh, strides[0]), axis=3)
    kernel = kernel.reshape(-1, out)
    if out <= NARROW:
        kernel = _gradient_by_rows(kernel)
    return jnp.dot(x.reshape(-1, len(kernel)), kernel, precision=precision).reshape(*x.shape[:3], out)


@jax.custom_jvp
def _gradient_by_rows(kernel: Array) -> Array:
    """The kernel [K, O] itself; its gradient is the product g^T x [O, K], transposed.

    XLA would turn that into x^T g, whose time was measured to be up to three times as long (O = 64), as long (O = 512).
    """
    return kernel


@_gradient_by_rows.defjvp
def _gradient_by_rows_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], lax.optimization_barrier(tangents[0].T).T


def _explicit(
    padding: str | Sequence[tuple[int, int]], x: Array, kernel: Array, strides: Sequence[int]
) -> Sequence[tuple[int, int]]:
    """The padding (before, after) of H and W."""
    if isinstance(padding, str):
        return lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    return padding


def _padded(x: Array, padding: Sequence[tuple[int, int]]) -> Array:
    if all(pad == (0, 0) for pad in padding):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*pad, 0) for pad in padding), (0, 0, 0)])


def shifts(x: Array, axis: int, size: int, stride: int) -> list[Array]:
    """What each of the `size` positions of a window along `axis` sees, one value for each window."""
    span = (x.shape[axis] - size) // stride * stride + 1
    return [lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)]


def winograd_conv(x: Array, kernel: Array, padding: str | Sequence[tuple[int, int]], precision=None) -> Array:
    """Convolution of stride 1 by Winograd's minimal filtering F(4x4, side x side) (Lavin & Gray, CVPR 2016).

    A tile of 4x4 outputs takes (side + 3)^2 products in place of 16 side^2: a quarter of them for 3x3 kernels, a sixth
    for 5x5. In float32 values and both gradients are within 1e-6 (3x3) and 3e-6 (5x5) of the exact ones, relative to
    the largest sum of absolute values; 5e-7 and 1.7e-6 were measured at most, 8e-7 for XLA's own convolution.

    Args:
      x: [B, H, W, C].
      kernel: [side, side, C, O], side 3 or 5.
      padding: "SAME", "VALID" or (before, after) of H and W.
      precision: of the products.

    Returns:
      [B, H', W', O].
    """
    pads = tuple((before, after) for before, after in _explicit(padding, x, kernel, (1, 1)))
    return _winograd_conv(x, kernel, pads, precision)


@functools.partial(jax.jit, static_argnums=(2, 3))  # traced once for each shape: it has hundreds of small operations
def _winograd_conv(x: Array, kernel: Array, pads: tuple[tuple[int, int], ...], precision) -> Array:
    side, _, channels, out = kernel.shape
    window, back, weights = _winograd(side)
    high, wide, rows, columns = _tiles(x, side, pads)
    size = side + TILE - 1  # a window begins with its tile and ends in the next one
    ends = [
        (before, (count + 1) * TILE - length - before)
        for (before, _), count, length in zip(pads, (rows, columns), x.shape[1:3], strict=True)
    ]
    x = _padded(x, ends).reshape(-1, rows + 1, TILE, columns + 1, TILE, channels)
    x = _combine(window, _windows(x, size, 3, columns))
    x = _combine(window, _windows(x, size, 2, rows))
    kernel = _combine(weights, jnp.unstack(kernel, axis=1))
    kernel = _combine(weights, jnp.unstack(kernel, axis=1))
    flat = (x.reshape(size**2, -1, channels), kernel.reshape(size**2, channels, out))
    y = lax.dot_general(*flat, (((2,), (1,)), ((0,), (0,))), precision=precision)
    y = _combine(back, jnp.unstack(y.reshape(*x.shape[:-1], out)), axis=3)
    y = _combine(back, jnp.unstack(y), axis=4)  # [B, rows, TILE, columns, TILE, O]
    return y.reshape(-1, rows * TILE, columns * TILE, out)[:, :high, :wide]


def _tiles(x: Array, side: int, pads: Sequence[tuple[int, int]]) -> tuple[int, int, int, int]:
    """Height and width of what a convolution of stride 1 gives, in pixels and in Winograd's tiles."""
    high, wide = (size + before + after - side + 1 for size, (before, after) in zip(x.shape[1:3], pads, strict=True))
    return high, wide, -(-high // TILE), -(-wide // TILE)


def _windows(x: Array, size: int, axis: int, count: int) -> list[Array]:
    """The `size` pixels of the `count` windows along `axis`, the tiles; their pixels are the next axis, of TILE.

    Taken apart by `unstack`, here and in the other transforms, because the gradient of indexing pads and adds.
    """
    pixels = jnp.unstack(x, axis=axis + 1)
    return [lax.slice_in_dim(pixels[k % TILE], k // TILE, k // TILE + count, axis=axis) for k in range(size)]


@functools.cache
def _winograd(side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices of F(4, side) by Toom and Cook: of the window [n, n], back [4, n], kernel [n, side]; n = side + 3.

    The points were searched for small errors: for 3x3 they are less than half of those with 0, 1, -1, 2, -2.
    """
    points = POINTS[side]
    others = [[q for q in points if q != p] for p in points]
    window = [[*np.poly(rest)[::-1], 0] for rest in others] + [np.poly(points)[::-1]]
    powers = lambda size: np.vander(points, size, increasing=True)
    last = lambda size: np.eye(size)[-1:]  # the point at infinity
    scale = np.array([math.prod(p - q for q in rest) for p, rest in zip(points, others, strict=True)])
    back = np.concatenate([powers(TILE), last(TILE)]).T
    return np.array(window), back, np.concatenate([powers(side) / scale[:, None], last(side)])


def _combine(matrix: np.ndarray, parts: Sequence[Array], axis: int = 0) -> Array:
    """The rows of a matrix [n, k], each the weights of a sum of k parts; n sums, stacked along `axis`."""
    rows = [[float(c) * part for c, part in zip(row, parts, strict=True) if c] for row in matrix]
    return jnp.stack([functools.reduce(operator.add, row) for row in rows], axis)
