"""The networks of FedDVA's dual variational autoencoder: two encoders, a decoder, a
classifier of both latents.

Axes: B batch, H and W pixels, C channels; images are in [-1, 1].
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_pfl.models import layers
from fedjax_pfl.models.cnn_dva import HIDDEN, SIDE, Backbone, first_padding
from fedjax_pfl.models.nets import Dense, Net, Shape
from fedjax_pfl.models.nnx_model import network
from fedjax_pfl.types import Array, Network

SMALL = (16, 32, 64, 128)  # a quarter of HIDDEN
LOG_VARIANCE = 8.0  # log variances are clipped to [-8, 8]


class Gaussian(NamedTuple):
    """A Gaussian with a diagonal covariance for each example."""

    mean: Array  # [B, d]
    log_var: Array  # [B, d]


class DualVAE(NamedTuple):
    """The networks, each with variables of its own."""

    z: Network  # x [B, H, W, C] -> q(z|x)
    c: Network  # (x, z [B, d_z]) -> q(c|x, z)
    decoder: Network  # [z; c] [B, d_z + d_c] -> images [B, H, W, C] in (-1, 1)
    head: Network | None  # [z; c] -> logits, for labelled data
    personal: int  # d_c


class Posterior(nnx.Module):
    """A diagonal Gaussian of h [B, K]: mean and log variance by two MLPs with K // 2
    hidden ReLU units each."""

    def __init__(self, width: int, latent: int, rngs: nnx.Rngs):
        def make() -> Net:
            return Net(
                Dense(width, (width // 2,), rngs),
                layers.linear(width // 2, latent, rngs),
            )

        self.mean, self.log_var = make(), make()

    def __call__(self, h: Array) -> Gaussian:
        return Gaussian(
            self.mean(h), jnp.clip(self.log_var(h), -LOG_VARIANCE, LOG_VARIANCE)
        )


class RepresentationEncoder(nnx.Module):
    """q(z|x), shared by all clients: x [B, H, W, C] -> a Gaussian of [B, d_z]."""

    def __init__(
        self, shape: Shape, latent: int, hidden: Sequence[int], rngs: nnx.Rngs
    ):
        self.backbone = Backbone(shape, hidden, rngs)
        self.posterior = Posterior(hidden[-1], latent, rngs)

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Gaussian:
        return self.posterior(self.backbone(x, mask, train))


class PersonalEncoder(nnx.Module):
    """q(c|x, z), personal to a client: (x [B, H, W, C], z [B, d_z]) -> a Gaussian
    of [B, d_c].

    A linear layer maps z to one more channel of the image, which a 1x1 convolution
    embeds.
    """

    def __init__(
        self,
        shape: Shape,
        latent: int,
        personal: int,
        hidden: Sequence[int],
        rngs: nnx.Rngs,
    ):
        height, width, channels = shape
        self.embed_z = layers.linear(latent, height * width, rngs)
        self.embed_x = layers.conv(channels, channels, 1, 0, rngs)
        self.backbone = Backbone((height, width, channels + 1), hidden, rngs)
        self.posterior = Posterior(hidden[-1], personal, rngs)

    def __call__(
        self,
        inputs: tuple[Array, Array],
        mask: Array | None = None,
        train: bool = False,
    ) -> Gaussian:
        x, z = inputs
        plane = self.embed_z(z).reshape(*x.shape[:3], 1)
        return self.posterior(
            self.backbone(jnp.concatenate([self.embed_x(x), plane], -1), mask, train)
        )


class Decoder(nnx.Module):
    """The mean of p(x|z, c): [z; c] [B, d_z + d_c] -> images [B, H, W, C] in (-1, 1).

    Two linear layers with LeakyReLU, then the backbone's convolutions transposed; all
    but the last are followed by batch norm and LeakyReLU, the last by tanh.
    """

    def __init__(
        self, shape: Shape, latents: int, hidden: Sequence[int], rngs: nnx.Rngs
    ):
        widths = tuple(reversed(hidden))
        self.dense = nnx.List([layers.linear(latents, widths[0] // 2, rngs)])
        self.dense.append(layers.linear(widths[0] // 2, widths[0], rngs))
        paddings = (0, *[1] * (len(hidden) - 2), first_padding(shape, hidden))
        strides = (1, *[2] * (len(hidden) - 1))
        sizes = zip(widths, (*widths[1:], shape[-1]), paddings, strides, strict=True)
        self.convs = nnx.List(
            [
                layers.ConvTranspose(a, b, SIDE, pad, rngs, stride)
                for a, b, pad, stride in sizes
            ]
        )
        self.norms = nnx.List(
            [layers.BatchNorm(width, rngs=rngs) for width in widths[1:]]
        )

    def __call__(
        self, latents: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        for layer in self.dense:
            latents = jax.nn.leaky_relu(layer(latents))
        x = latents[:, None, None]
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = jax.nn.leaky_relu(norm(conv(x), mask, train))
        return jnp.tanh(self.convs[-1](x))


class Classifier(nnx.Module):
    """[z; c] [B, K] -> logits, through K // 2 hidden ReLU units."""

    def __init__(self, latents: int, num_classes: int, rngs: nnx.Rngs):
        self.dense = Dense(latents, (latents // 2,), rngs)
        self.out = layers.linear(latents // 2, num_classes, rngs)

    def __call__(self, latents: Array) -> Array:
        return self.out(self.dense(latents))


def dual_vae(
    input_shape: Shape,
    latent: int = 4,
    personal: int = 4,
    hidden: Sequence[int] = HIDDEN,
    num_classes: int | None = None,
    **options: str,
) -> DualVAE:
    """Makes the networks of FedDVA (Appendix C-B, its released code).

    Args:
      input_shape: (H, W, C), square; with four hidden widths 28, 30 or 32 pixels a
        side, with five 60, 62 or 64.
      latent: d_z.
      personal: d_c.
      hidden: channels of the convolutions, the decoder's in the reverse order; SMALL is
        the notebook-sized variant.
      num_classes: of the classifier of [z; c]; without it there is none.
      **options: bn_stats, conv and compute_dtype of `models.network`.

    Raises:
      InputError: the images do not fit the layers.
    """
    shape, both = tuple(input_shape), latent + personal
    make: Callable[..., Network] = lambda module, *args: network(
        lambda rngs: module(*args, rngs), **options
    )
    return DualVAE(
        make(RepresentationEncoder, shape, latent, hidden),
        make(PersonalEncoder, shape, latent, personal, hidden),
        make(Decoder, shape, both, hidden),
        None if num_classes is None else make(Classifier, both, num_classes),
        personal,
    )
