"""Convolutions that are fast in a loop of many small training steps, and the choice
among them.

Axes: B batch, H and W pixels, C and O channels in and out. Images are NHWC, kernels
HWIO.
"""

import contextlib
import contextvars
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_pfl.errors import choose
from fedjax_pfl.kernels import paired
from fedjax_pfl.kernels.depthwise import depthwise_conv
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.types import Array

FORMS = {
    "cpu": "winograd",
    "gpu": "pooled",
    "tpu": "packed",
}  # the meaning of "auto"
CONVOLUTIONS = ("auto", "winograd", "fused", "matmul", "packed", "pooled", "xla")
WINOGRAD = ("pooled", "winograd")  # forms that use it where it is faster
XLA = ("packed", "xla")  # forms whose single convolutions are XLA's own
# channels out up to which the order of the kernel gradient's product matters
NARROW = 128
LEAST_CHANNELS, LEAST_TILES = 8, 32  # for Winograd: measured, see `winograd_is_faster`
# of Winograd's polynomials for a tile and a kernel of these sides, besides infinity; 1j
# is i and -i
POINTS = {
    (4, 3): (0, 5 / 8, -5 / 8, 3 / 2, -3 / 2),
    (2, 3): (0, 1, -1),
    (4, 5): (0, 1 / 2, -1 / 2, 1, -1, 2, -2),
    (5, 5): (0, 1 / 2, -1 / 2, 1, -1, 2, 1j),
}
_NHWC = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))
_form = contextvars.ContextVar("convolution", default="auto")


@contextlib.contextmanager
def convolution(form: str) -> Iterator[None]:
    """Makes `conv_general_dilated` use this form for whatever is traced inside the
    `with` block.

    Args:
      form: one of matmul: patches and one matrix product; fused: the same, and pooled
        in the product where channels are few, see `layers.conv_pool`; winograd: the
        same, with Winograd's products for the shapes where they are faster, see
        `winograd_conv`; pooled: the same, blocks with pooling in fewer passes, see
        `pooled`; packed: XLA's own convolution, blocks with pooling in the lanes of a
        TPU, see `packed`; xla: XLA's own convolution and pooling by slices; auto:
        that of the platform in `FORMS`. Dense layers are XLA's with matmul, packed and
        xla, see `dense.dot_general`.

    Raises:
      InputError: for another form.
    """
    token = _form.set(choose("conv", form, CONVOLUTIONS))
    try:
        yield
    finally:
        _form.reset(token)


def form(name: str) -> str:
    """The form of a setting on this machine: the setting itself, but for
    "auto"."""
    return FORMS[platform()] if name == "auto" else name


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
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    feature_group_count: int = 1,
    **kwargs: Any,
) -> Array:
    """Like `lax.conv_general_dilated`, in the form chosen by `convolution`; give it to
    `nnx.Conv`.

    Depthwise ones, of as many groups as channels in and out, are `depthwise_conv` in
    all forms but "xla". Dilated, otherwise grouped, sharded, not two-dimensional and
    not NHWC convolutions always go to lax. "packed" also takes images in
    `paired.pairs`.
    """
    depthwise = 1 < feature_group_count == lhs.shape[-1] == rhs.shape[-1]
    unit = all(
        d == 1
        for d in (
            *(lhs_dilation or ()),
            *(rhs_dilation or ()),
            1 if depthwise else feature_group_count,
        )
    )
    plain = (
        unit
        and lhs.ndim == 4
        and set(kwargs) <= {"precision", "out_sharding"}
        and not kwargs.get("out_sharding")
    )
    chosen = current_form()
    if plain and chosen == "packed" and paired.is_paired(lhs, rhs.shape[2]):
        pads = _explicit(padding, lhs, rhs, window_strides)
        return paired.conv(lhs, rhs, window_strides, pads, kwargs.get("precision"))
    if not plain or chosen in XLA or not _is_nhwc(lhs, rhs, dimension_numbers):
        others = (lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count)
        return lax.conv_general_dilated(
            lhs, rhs, window_strides, padding, *others, **kwargs
        )
    pads = _explicit(padding, lhs, rhs, window_strides)
    if depthwise:
        return depthwise_conv(lhs, rhs, window_strides, pads)
    if chosen in WINOGRAD and winograd_is_faster(lhs, rhs, window_strides, pads):
        return winograd_conv(lhs, rhs, pads, kwargs.get("precision"))
    return matmul_conv(lhs, rhs, window_strides, pads, kwargs.get("precision"))


def _is_nhwc(
    x: Array, kernel: Array, numbers: lax.ConvGeneralDilatedDimensionNumbers
) -> bool:
    return lax.conv_dimension_numbers(x.shape, kernel.shape, numbers) == _NHWC


def winograd_is_faster(
    x: Array, kernel: Array, strides: Sequence[int], pads: Sequence[tuple[int, int]]
) -> bool:
    """Returns True if `winograd_conv` beats `matmul_conv` on a CPU; arguments as
    theirs.

    Measured for stride 1, forward and both gradients in a loop, on a core of an Intel
    Xeon with AVX-512, relative to `matmul_conv`: 3x3 kernels with 1,024 tiles of the
    batch 1.4 (8 channels in and out), 2.2 (32), 2.5 (64); with 64 tiles 2.1 (64), 1.7
    (256), 1.4 (512); with 32 tiles 1.3 (256), 1.0 (512); with 16 tiles 0.65 (512),
    because the kernel is transformed, too; with 3 channels in 0.5. Tiles of 2x2, for so
    few pixels out: 128 of them 1.5 (256) and 1.9 (512), 32 of them 1.2 to 1.4 (64 to
    512), 16 of them 1.0 (64). 5x5 kernels with 40 tiles 1.1 (8), 2.6 (32 to 64), with
    90 tiles 2.6; with 3 channels in 0.6, with 6 at most 0.9. Where 9/16 of the tiles'
    pixels are used 1.2 (3x3), where 2/5 are 0.7 and 1.0 (5x5).
    """
    side, width, channels, out = kernel.shape
    square = side == width and any(side == known for _, known in POINTS)
    if (
        not square
        or tuple(strides) != (1, 1)
        or min(channels, out) < LEAST_CHANNELS
        or x.dtype.itemsize < 4
    ):
        return False
    high, wide, tile, rows, columns = _tiles(x, side, pads)
    return (
        len(x) * rows * columns >= LEAST_TILES
        and 2 * high * wide >= rows * columns * tile**2
    )


def matmul_conv(
    x: Array,
    kernel: Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    precision: lax.PrecisionLike = None,
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
    # One axis at a time: the gradient then adds kh + kw shifted arrays, not kh * kw.
    # Rows are stacked on an axis of their own, because XLA fuses two joins of the last
    # axis into one slow loop.
    x = jnp.concatenate(shifts(x, 2, kw, strides[1]), axis=-1)
    x = jnp.stack(shifts(x, 1, kh, strides[0]), axis=3)
    kernel = kernel.reshape(-1, out)
    if out <= NARROW:
        kernel = gradient_by_rows(kernel)
    return jnp.dot(x.reshape(-1, len(kernel)), kernel, precision=precision).reshape(
        *x.shape[:3], out
    )


@jax.custom_jvp
def gradient_by_rows(kernel: Array) -> Array:
    """The kernel [K, O] itself; its gradient is the product g^T x [O, K], transposed.

    XLA would turn that into x^T g, whose time was measured to be up to three times as
    long (O = 64), as long (O = 512).
    """
    return kernel


@gradient_by_rows.defjvp
def _gradient_by_rows_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    return primals[0], lax.optimization_barrier(tangents[0].T).T


def _explicit(
    padding: str | Sequence[tuple[int, int]],
    x: Array,
    kernel: Array,
    strides: Sequence[int],
) -> Sequence[tuple[int, int]]:
    """The padding (before, after) of H and W."""
    if isinstance(padding, str):
        return lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    return padding


def _padded(x: Array, padding: Sequence[tuple[int, int]]) -> Array:
    if all(pad == (0, 0) for pad in padding):
        return x
    return lax.pad(
        x,
        jnp.zeros((), x.dtype),
        [(0, 0, 0), *((*pad, 0) for pad in padding), (0, 0, 0)],
    )


def shifts(x: Array, axis: int, size: int, stride: int) -> list[Array]:
    """Returns the input at each of the `size` positions of a window along `axis`, one
    value for each window."""
    span = (x.shape[axis] - size) // stride * stride + 1
    return [lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)]


def winograd_conv(
    x: Array,
    kernel: Array,
    padding: str | Sequence[tuple[int, int]],
    precision: lax.PrecisionLike = None,
) -> Array:
    """Convolution of stride 1 by Winograd's minimal filtering (Lavin & Gray, CVPR
    2016).

    F(4x4, 3x3) takes 36 products for a tile in place of 144; F(2x2, 3x3) 16 in place of
    36; F(4x4, 5x5) 64 in place of 400; F(5x5, 5x5), with two complex points, 100 in
    place of 625; of two for a kernel the one that takes fewer for the whole image. In
    float32 values and both gradients are within 1e-6 of the exact ones, 3e-6 for F(4x4,
    5x5), relative to the largest sum of absolute values; 6e-7, 1.7e-6 and, for F(5x5,
    5x5), 8e-7 were measured at most, 8e-7 for XLA's own convolution.

    Args:
      x: [B, H, W, C].
      kernel: [side, side, C, O], side 3 or 5.
      padding: "SAME", "VALID" or (before, after) of H and W.
      precision: of the products; the highest unless given, since the rounding of a
        GPU's TF32 would be many times magnified.

    Returns:
      [B, H', W', O].
    """
    pads = tuple(
        (before, after) for before, after in _explicit(padding, x, kernel, (1, 1))
    )
    return _winograd_conv(
        x, kernel, pads, lax.Precision.HIGHEST if precision is None else precision
    )


# traced once for each shape: it has hundreds of small operations
@functools.partial(jax.jit, static_argnums=(2, 3))
def _winograd_conv(
    x: Array,
    kernel: Array,
    pads: tuple[tuple[int, int], ...],
    precision: lax.PrecisionLike,
) -> Array:
    side, _, channels, out = kernel.shape
    high, wide, tile, rows, columns = _tiles(x, side, pads)
    window, back, weights = _winograd(tile, side)
    ends = [  # a window begins with its tile and ends in the next one
        (before, (count + 1) * tile - length - before)
        for (before, _), count, length in zip(
            pads, (rows, columns), x.shape[1:3], strict=True
        )
    ]
    x = _padded(x, ends).reshape(-1, rows + 1, tile, columns + 1, tile, channels)
    x = _product(window, jnp.stack(_windows(x, 3, tile + side - 1)))
    x = _combine(window, _windows(x, 2, tile + side - 1))  # [m, m, B, rows, columns, C]
    # both axes at once: fewer passes over large arrays are worth the more
    # multiplications
    kernel = _product(np.kron(weights, weights), kernel.reshape(side**2, channels, out))
    y = lax.dot_general(
        x.reshape(len(kernel), -1, channels),
        kernel,
        (((2,), (1,)), ((0,), (0,))),
        precision=precision,
    )
    y = _product(np.kron(back, back), y).reshape(tile, tile, -1, rows, columns, out)
    y = y.transpose(2, 3, 0, 4, 1, 5)  # [B, rows, tile, columns, tile, O]
    return y.reshape(-1, rows * tile, columns * tile, out)[:, :high, :wide]


def _tiles(
    x: Array, side: int, pads: Sequence[tuple[int, int]]
) -> tuple[int, int, int, int, int]:
    """Computes the output of a convolution of stride 1: height and width, the side of
    Winograd's tiles that takes the fewest products, and how many of them there are
    along both
    axes."""
    high, wide = (
        size + before + after - side + 1
        for size, (before, after) in zip(x.shape[1:3], pads, strict=True)
    )
    covers = {
        tile: (-(-high // tile), -(-wide // tile))
        for tile, known in POINTS
        if known == side
    }
    tile = min(
        covers,
        key=lambda tile: math.prod(covers[tile]) * len(_winograd(tile, side)[0]) ** 2,
    )
    return high, wide, tile, *covers[tile]


def _windows(x: Array, axis: int, size: int) -> list[Array]:
    """Returns the input at each of the `size` pixels of a window along `axis`, the
    tiles; their pixels are the next axis.

    Divided by `unstack`, here and in the other transforms, because the gradient of
    indexing pads and adds.
    """
    pixels, count = jnp.unstack(x, axis=axis + 1), x.shape[axis] - 1
    tile = len(pixels)
    return [
        lax.slice_in_dim(pixels[k % tile], k // tile, k // tile + count, axis=axis)
        for k in range(size)
    ]


@functools.cache
def _winograd(tile: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices of F(tile, side) by Toom and Cook, for m products: of the window [m,
    tile + side
    - 1], back [tile, m], of the kernel [m, side].

    The points were searched for small errors. Those of a pair of complex ones are
    complex, too, and take three real products: its real parts, its imaginary parts,
    their sums.
    """
    points = POINTS[tile, side]
    roots = [q for p in points for q in dict.fromkeys((p, np.conj(p)))]
    window, back, weights = [], [], []
    for p in points:
        rest = [q for q in roots if q not in (p, np.conj(p))]
        basis = np.poly(rest)[::-1].real
        values, scaled = (
            p ** np.arange(tile),
            p ** np.arange(side) / math.prod(p - q for q in rest),
        )
        if isinstance(p, complex):
            plain, shifted = np.array([[*basis, 0, 0], [0, *basis, 0]])
            window += [plain - shifted, -plain - shifted, shifted]
            back += [values.real, values.imag, values.real + values.imag]
            weights += [scaled.real, scaled.imag, scaled.real + scaled.imag]
        else:
            window, back, weights = (
                [*window, [*basis, 0]],
                [*back, values],
                [*weights, scaled.real],
            )
    # the point at infinity
    last: Callable[[int], np.ndarray] = lambda size: np.eye(size)[-1]
    window, back, weights = (
        [*window, np.poly(roots)[::-1].real],
        [*back, last(tile)],
        [*weights, last(side)],
    )
    return np.array(window), np.array(back).T, np.array(weights)


def _combine(matrix: np.ndarray, parts: Sequence[Array]) -> Array:
    """The rows of a matrix [n, k], each the weights of a sum of k parts; n sums,
    stacked."""
    rows = [
        [float(c) * part for c, part in zip(row, parts, strict=True) if c]
        for row in matrix
    ]
    return jnp.stack([functools.reduce(operator.add, row) for row in rows])


def _product(matrix: np.ndarray, parts: Array) -> Array:
    """The same for parts [k, ...] that stand one after another, as one matrix product:
    [n, ...]."""
    flat, weights = parts.reshape(len(parts), -1), jnp.asarray(matrix, parts.dtype)
    # the same for every client, but marked as each client's: one product of all
    # clients at once would put their axis second and transpose everything (4 clients of
    # the CNN: 1.4 times the time of a step)
    weights = jnp.where(lax.stop_gradient(flat[0, 0]) == 0, weights, weights)
    y = jnp.dot(weights, flat, precision=lax.Precision.HIGHEST)
    return y.reshape(len(matrix), *parts.shape[1:])
