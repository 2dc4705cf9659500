"""Convolutions that are fast inside a loop of many small training steps, and the setting that chooses among them.

Axes: B batch, H and W pixels, C and O channels in and out. Images are NHWC, kernels HWIO.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_pfl.checks import choose
from fedjax_pfl.types import Array

CONVOLUTIONS = ("auto", "fused", "matmul", "xla")
_NHWC = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))
_form = contextvars.ContextVar("convolution", default="auto")


@contextlib.contextmanager
def convolution(form: str) -> Iterator[None]:
    """Makes `conv_general_dilated` use this form for whatever is traced inside the `with` block.

    Args:
      form: "matmul" (patches and one matrix product), "fused" (the same, and pooled in the product where channels are
        few, see `layers.conv_pool`), "xla" (XLA's own convolution), or "auto": fused on a CPU, where XLA's
        convolution was measured 6 (LeNet) to 13 times (the CNN) slower, xla elsewhere.

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
    if not (plain and current_form() != "xla" and _is_nhwc(lhs, rhs, dimension_numbers)):
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
    x = jnp.concatenate(shifts(x, 2, kw, strides[1]), axis=-1)
    x = jnp.stack(shifts(x, 1, kh, strides[0]), axis=3)
    y = jnp.dot(x.reshape(-1, kh * kw * channels), kernel.reshape(-1, out), precision=precision)
    return y.reshape(*x.shape[:3], out)


def shifts(x: Array, axis: int, size: int, stride: int) -> list[Array]:
    """What each of the `size` positions of a window along `axis` sees, one value for each window."""
    span = (x.shape[axis] - size) // stride * stride + 1
    return [lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(size)]
