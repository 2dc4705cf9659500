# %% [markdown]
# # On several devices, the same numbers
#
# The clients of a round are shared among the devices there are, the eight of a TPU or the cores of a CPU; each
# trains its own, and they communicate once per round. The layout must not change the answer: a client's random
# numbers depend on the run, the round and its own number, never on where it is trained. What may differ is
# rounding, as sums are taken in another order.
# %%
import time

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate, partitioners
from fedjax_pfl.data.sources import toys

N, ROUNDS = (6, 2) if TINY else (40, 10)
SHAPE, NETWORK = (8, 8, 1), "linear" if TINY else "mlp"
data = toys.synthetic(600 if TINY else 4000, shape=SHAPE)
clients = partitioners.partition(data, "dirichlet_class", num_clients=N, alpha=0.5, seed=0)
federation = federate.federate(data, clients)
task = simulate.task(
    data,
    federation.class_counts,
    models.model(NETWORK, SHAPE, 10),
    lr=0.05,
    batch_size=10,
    epochs=1 if TINY else 10,
    rounds=ROUNDS,
)
print(f"{len(devices)} devices; clients of {task.sizes.min()} to {task.sizes.max()} examples")


def run(count):
    """Accuracy of every client after each round, the parameters at the end, and the seconds of a
    round."""
    program = simulate.program(ALGORITHMS["ditto"], task, devices=count)
    accuracy, begins = [], []
    for result in simulate.rounds(program, jax.random.key(0), federation, rounds=ROUNDS):
        accuracy.append(result.pre["acc"])
        begins.append(time.perf_counter())
    state = program.unplace(jax.device_get(result.state))
    return np.array(accuracy), state.server, np.median(np.diff(begins))


counts = sorted({1, len(devices)})
found = {count: run(count) for count in counts}
# %% [markdown]
# The parameters agree to rounding, and so do the curves. A curve that agrees only in the mean would not do: each
# client's does.
# %%
first, last = (found[count] for count in (counts[0], counts[-1]))
gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), first[1], last[1])
print(f"largest difference of a parameter after {ROUNDS} rounds: {max(jax.tree.leaves(gaps)):.1e}")
print(f"largest difference of a client's accuracy: {np.abs(first[0] - last[0]).max():.1e}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.plot(first[0].mean(axis=1), color="#0072b2", linewidth=5, alpha=0.4, label=f"{counts[0]} device")
left.plot(last[0].mean(axis=1), "--", color="#d55e00", label=f"{counts[-1]} devices")
left.set(xlabel="round", ylabel="test accuracy, mean over clients")
left.xaxis.get_major_locator().set_params(integer=True)
left.yaxis.set_major_formatter("{x:.0%}")
left.legend(frameon=False)
right.bar([str(count) for count in counts], [found[count][2] for count in counts], color="#0072b2")
right.set(xlabel="devices", ylabel="seconds of a round, evaluation included")
plt.show()
# %% [markdown]
# `--devices=N` does this on the command line, several hosts are started with one command each, and a run may resume
# on another number of devices.
