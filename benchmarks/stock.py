"""The benchmark's networks as the Flax documentation would write them: the plain
baseline."""

import functools
import itertools

from flax import nnx

from benchmarks.pytorch import NETS


class StockBlock(nnx.Module):
    """A basic block; its batch norms take the batch's statistics, and whoever trains it
    may drop the running ones."""

    def __init__(self, cin: int, cout: int, strides: int, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.convs = nnx.List(
            [conv(cin, cout, (3, 3), strides), conv(cout, cout, (3, 3))]
        )
        self.norms = nnx.List([nnx.BatchNorm(cout, rngs=rngs) for _ in range(2)])
        self.shortcut = nnx.List([])
        if cin != cout:
            self.shortcut = nnx.List(
                [conv(cin, cout, (1, 1), strides), nnx.BatchNorm(cout, rngs=rngs)]
            )

    def __call__(self, x):
        h = self.norms[1](self.convs[1](nnx.relu(self.norms[0](self.convs[0](x)))))
        for layer in self.shortcut:
            x = layer(x)
        return nnx.relu(h + x)


class StockResNet(nnx.Module):
    """ResNet-18 for small images as the Flax documentation would write it."""

    def __init__(self, classes: int, rngs: nnx.Rngs):
        widths = (64, 64, 128, 256, 512)
        self.stem = nnx.Conv(3, 64, (3, 3), use_bias=False, rngs=rngs)
        self.norm, self.head = (
            nnx.BatchNorm(64, rngs=rngs),
            nnx.Linear(512, classes, rngs=rngs),
        )
        shapes = [
            s
            for a, b in itertools.pairwise(widths)
            for s in ((a, b, 1 + (a != b)), (b, b, 1))
        ]
        self.blocks = nnx.List([StockBlock(*shape, rngs) for shape in shapes])

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class StockNet(nnx.Module):
    """The benchmark's other networks as the Flax documentation would write them."""

    def __init__(
        self, model: str, shape: tuple[int, ...], classes: int, rngs: nnx.Rngs
    ):
        h, w, c = shape
        channels, pads, widths = NETS[model]
        convs = []
        for out, pad in zip(channels, pads, strict=True):
            convs.append(nnx.Conv(c, out, (5, 5), padding=pad, rngs=rngs))
            c, h, w = out, (h + 2 * pad - 4) // 2, (w + 2 * pad - 4) // 2
        sizes = (h * w * c, *widths, classes)
        self.convs = nnx.List(convs)
        self.dense = nnx.List(
            [nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)]
        )

    def __call__(self, x):
        for conv in self.convs:
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for layer in self.dense[:-1]:
            x = nnx.relu(layer(x))
        return self.dense[-1](x)


def stock(model: str, shape: tuple[int, ...], classes: int) -> nnx.Module:
    """A network by its name in `setting`."""
    rngs = nnx.Rngs(0)
    return (
        StockResNet(classes, rngs)
        if model == "resnet18"
        else StockNet(model, shape, classes, rngs)
    )
