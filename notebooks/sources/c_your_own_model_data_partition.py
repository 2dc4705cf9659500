# %% [markdown]
# # Your own network, data set and partition
#
# Clients need not differ in their classes. Here every one of them has all ten digits, but its camera is mounted in
# its own way: a quarter of the clients see each image upright, a quarter turned by 90 degrees, and so on. We build
# the data, the partition and a network by hand, and ask which method copes.
#
# **The data set** is arrays and a function that prepares a batch of them for the network.
# %%
from fedjax_pfl.data import datasets, federate, loading

N = 4 if TINY else 40
digits = loading.load("digits")
rng = np.random.default_rng(0)
owner = rng.permutation(len(digits.y)) % N  # of each image
turned = np.stack([np.rot90(image, k % 4) for image, k in zip(digits.x, owner, strict=True)])
dataset = datasets.Dataset("turned", turned, digits.y, len(digits.y), 10, digits.prepare)

figure, panels = plt.subplots(1, 4, figsize=(6, 1.8), layout="constrained")
for k, panel in enumerate(panels):
    panel.imshow(turned[np.flatnonzero((owner == k) & (digits.y == 4))[0], ..., 0], cmap="gray_r")
    panel.set_title(f"client {k}")
    panel.axis("off")
plt.show()
# %% [markdown]
# **The partition** assigns rows of the data set to clients, for training and for testing. `build` makes it
# of flat lists, clients one after another; from a file, `--partition=file:PATH` takes the same.
# %%
from fedjax_pfl.data.partition import build

own = [np.flatnonzero(owner == k) for k in range(N)]
train, test = [ids[: 3 * len(ids) // 4] for ids in own], [ids[3 * len(ids) // 4 :] for ids in own]
sizes = lambda parts: np.array([len(part) for part in parts])
nobody = np.zeros(0, int), np.zeros(N, int)
partition = build(np.concatenate(train), sizes(train), np.concatenate(test), sizes(test), *nobody)
federation = federate.federate(dataset, partition)
print(f"{N} clients with {sizes(train).min()} to {sizes(train).max()} training images")
# %% [markdown]
# **The network** is a Flax NNX module with a `body` and a `head`. Here the body has a batch norm after its hidden
# layer: the layer of the package, which knows which rows of a batch are padding.
# %%
from flax import nnx

from fedjax_pfl import models
from fedjax_pfl.models import layers


class Body(nnx.Module):
    def __init__(self, inputs, width, rngs):
        self.hidden = nnx.Linear(inputs, width, rngs=rngs)
        self.norm = layers.BatchNorm(width, rngs=rngs)

    def __call__(self, x, mask=None, train=False):
        return nnx.relu(self.norm(self.hidden(x.reshape(len(x), -1)), mask, train))


class Small(nnx.Module):
    def __init__(self, shape, num_classes, rngs):
        self.body = Body(int(np.prod(shape)), 64, rngs)
        self.head = nnx.Linear(64, num_classes, rngs=rngs)


network = models.model(Small, (8, 8, 1), 10)
print(f"{models.num_parameters(jax.eval_shape(network.init, jax.random.key(0))):,} parameters")
# %% [markdown]
# One model for all (FedAvg) has to read digits in four positions. FedBN leaves the batch norm with each client.
# LG-FedAvg leaves the body with each client, FedRep the head; a client alone (Local) has few images.
# %%
from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS

ROUNDS = 2 if TINY else 30
METHODS = ["fedavg", "fedbn"] if TINY else ["local", "fedavg", "fedbn", "lg_fedavg", "fedrep", "ditto"]
task = simulate.task(
    dataset, federation.class_counts, network, lr=0.05, batch_size=10, epochs=1 if TINY else 5, rounds=ROUNDS
)


def scores(name):
    """Every client's accuracy after the last round."""
    program = simulate.program(ALGORITHMS[name], task)
    options = {"rounds": ROUNDS, "eval_every": 0, "state_every": ROUNDS}
    *_, last = simulate.rounds(program, jax.random.key(0), federation, **options)
    return last.pre["acc"]


found = {name: scores(name) for name in METHODS}
# %%
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
ordered = sorted(found, key=lambda name: found[name].mean())
for row, name in enumerate(ordered):
    axes.plot(found[name], row + rng.uniform(-0.15, 0.15, N), ".", color="#0072b2", alpha=0.4)
    axes.plot(found[name].mean(), row, "|", color="#d55e00", markersize=22, markeredgewidth=3)
labels = [f"{name}: {100 * found[name].mean():.1f} %" for name in ordered]
axes.set(yticks=range(len(ordered)), yticklabels=labels, xlabel="test accuracy: a point per client, a bar at the mean")
axes.xaxis.set_major_formatter("{x:.0%}")
plt.show()
