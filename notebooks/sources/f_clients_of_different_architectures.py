# %% [markdown]
# # Clients of different architectures
#
# A phone and a server do not run the same network, and weights of different networks cannot be averaged.
# Predictions can: in knowledge transfer (KT-pFL, here `mnfl_het`) clients exchange what their models say of public
# examples, and each learns from a mixture of the others' answers. The mixture's coefficients are learned, so they
# show whom a client listens to.
#
# To have something to listen for, half of the clients hold the digits 0 to 4 and half 5 to 9, in turns; the public
# examples are digits of all kinds that nobody holds, at whose labels
# the method does not look.
# %%
from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate, loading
from fedjax_pfl.data.partition import build

N = 6 if TINY else 12
digits = loading.load("digits")
rng = np.random.default_rng(0)
shuffled = rng.permutation(len(digits.y))
pool, private = shuffled[:300], shuffled[300:]
public = digits._replace(x=digits.x[pool], y=digits.y[pool], num_train=len(pool))

halves = [private[digits.y[private] < 5], private[digits.y[private] >= 5]]
parts = [np.array_split(halves[k % 2], N // 2)[k // 2] for k in range(N)]  # client k has the half k mod 2
train, test = [ids[: len(ids) // 2] for ids in parts], [ids[len(ids) // 2 :] for ids in parts]
sizes = lambda lists: np.array([len(ids) for ids in lists])
nobody = np.zeros(0, int), np.zeros(N, int)
partition = build(np.concatenate(train), sizes(train), np.concatenate(test), sizes(test), *nobody)
federation = federate.federate(digits, partition, public=public)
# %% [markdown]
# Three architectures. Client k has number k // 2 mod 3, so that each occurs in both halves.
# %%
NAMES = ["mlp", "linear"] if TINY else ["mlp", "linear", "cnn_dropout"]
networks = [models.model(name, (8, 8, 1), 10) for name in NAMES]
architecture = np.arange(N) // 2 % len(NAMES)
ROUNDS = 2 if TINY else 20
options = {"lr": 0.05, "batch_size": 10, "epochs": 1 if TINY else 2, "rounds": ROUNDS, "architecture": architecture}
task = simulate.with_public(simulate.task(digits, federation.class_counts, networks, **options), public)


def train_with(name, **hyperparameters):
    """The scores after the last round, and what the last round reported of the server."""
    program = simulate.program(ALGORITHMS[name], task, hyperparameters)
    results = list(simulate.rounds(program, jax.random.key(0), federation, rounds=ROUNDS, eval_every=ROUNDS - 1))
    return results[-1].pre["acc"], results[-2].metrics.server


transfer = {"public_size": 100, "public_batch": 50, "coef_lr": 0.2, "rho": 0.1, "lam": 1.0}
alone, _ = train_with("local")
mixed, server = train_with("mnfl_het", **transfer)
coefficients = np.array(server["coefficients"])
# %% [markdown]
# Row n is how much client n listens to each of the others. The clients are sorted by the half that they hold: if
# the method finds out who is like whom, the coefficients gather in the two squares on the diagonal.
# %%
order = np.argsort(np.arange(N) % 2, kind="stable")
labels = [f"{k}: {NAMES[architecture[k]]}" for k in order]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
shown = left.imshow(coefficients[np.ix_(order, order)], cmap="viridis")
left.set_xticks(range(N), order)
left.set_yticks(range(N), labels)
left.axhline(N / 2 - 0.5, color="white")
left.axvline(N / 2 - 0.5, color="white")
left.set(title="coefficients after the last round", xlabel="listened to", ylabel="client")
figure.colorbar(shown, ax=left, shrink=0.8)
right.barh(np.arange(N) - 0.2, alone[order], 0.4, color="#999999", label=f"Local, {100 * alone.mean():.1f} %")
right.barh(np.arange(N) + 0.2, mixed[order], 0.4, color="#d55e00", label=f"KT-pFL, {100 * mixed.mean():.1f} %")
right.set_yticks(range(N), [""] * N)
right.invert_yaxis()
right.set(xlabel="test accuracy", xlim=(0, 1))
right.xaxis.set_major_formatter("{x:.0%}")
right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=2)
plt.show()
# %% [markdown]
# `--model=mlp,linear,...` with `--public=` does the same from the command line, and keeps the matrix of every
# evaluated round in the run directory.
