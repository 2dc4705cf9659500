# %% [markdown]
# # Seeds and hyperparameters as a batch axis
#
# A whole experiment, all rounds and the evaluation, is a pure function of its random key and of its traced
# hyperparameters. So `jax.vmap` turns three seeds and three values of Ditto's λ into one compiled program. Whether
# that is *faster* depends on the machine: on an accelerator with room to spare nine small runs may take little more
# than one, on a CPU that is already busy not. We measure both ways, and check that they give the same numbers.
# %%
import time

import jax.numpy as jnp

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate, loading, partitioners

N, ROUNDS = (6, 2) if TINY else (60, 10)
digits = loading.load("digits")
clients = partitioners.partition(digits, "dirichlet_hsu", num_clients=N, alpha=0.5, seed=0)
federation = federate.federate(digits, clients)
network = models.model("linear" if TINY else "mlp", (8, 8, 1), 10)
task = simulate.task(
    digits, federation.class_counts, network, lr=0.1, batch_size=10, epochs=1 if TINY else 5, rounds=ROUNDS
)
ditto = simulate.program(ALGORITHMS["ditto"], task, width=4)
print("hyperparameters that are arguments of the program:", sorted(ditto.traced))
# %% [markdown]
# `simulate.curve` is the experiment as one function. It returns the scores before each round and after the last;
# here we keep the mean over clients of the last.
# %%


def accuracy(key, lam):
    *_, last = simulate.curve(ditto, key, ditto.traced | {"lam": lam}, federation, rounds=ROUNDS, eval_every=ROUNDS)
    return last["acc"].mean()


keys = jax.random.split(jax.random.key(0), 3)
lams = jnp.array([0.1, 1.0, 10.0])
grid = jax.vmap(jax.vmap(accuracy, (None, 0)), (0, None))  # [seeds, values]


def timed(function, *arguments):
    """The result and the seconds, without compilation."""
    compiled = jax.jit(function).lower(*arguments).compile()
    begin = time.perf_counter()
    return jax.block_until_ready(compiled(*arguments)), time.perf_counter() - begin


together, seconds = timed(grid, keys, lams)
one, _ = timed(accuracy, keys[0], lams[0])
# %%
single = jax.jit(accuracy)
jax.block_until_ready(single(keys[0], lams[0]))  # compiled once for all nine
begin = time.perf_counter()
in_a_row = np.array([[single(key, lam) for lam in lams] for key in keys])
row_seconds = time.perf_counter() - begin

print(f"nine in one program: {seconds:.2f} s; nine in a row: {row_seconds:.2f} s; ratio {row_seconds / seconds:.2f}")
print(f"largest difference of an accuracy: {np.abs(np.array(together) - in_a_row).max():.1e}")
# %% [markdown]
# The differences are rounding: a client whose test example sits on the boundary may flip. Now the figure that the
# sweep is for, with the spread over seeds next to the effect of λ.
# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for i, values in enumerate(np.array(together)):
    left.plot(lams, values, "o-", color="#0072b2", alpha=0.35, label="a seed" if i == 0 else None)
left.plot(lams, np.mean(together, axis=0), "s-", color="#d55e00", label="mean over seeds")
left.set(xscale="log", xlabel="λ: how close to the global model", ylabel="test accuracy, mean over clients")
left.yaxis.set_major_formatter("{x:.1%}")
left.legend(frameon=False)
right.bar(["one program", "in a row"], [seconds, row_seconds], color=["#d55e00", "#0072b2"])
right.set(ylabel="seconds for nine runs, compiled", title=f"{devices[0].device_kind}")
plt.show()
# %% [markdown]
# From the command line the same is a flag: `fedjax-pfl sweep --algo=ditto --hparam=lam=0.1,1,10 --seeds=3
# --runs_at_once=all` trains the nine runs as one program, each seed on a partition of its own and each run in a
# directory of its own, from which it resumes alone.
