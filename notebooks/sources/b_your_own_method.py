# %% [markdown]
# # Your own method in 30 lines
#
# A method is one function, what a client does in a round, written in the order of the paper's algorithm. Batching,
# shuffling, devices, padding and absent clients are not its business. Here is a new one: clients average the body
# of the network and each keeps its head, as in FedPer, but begins every round with a head that is moved half-way
# back to the mean of all heads.
# %%
from typing import Annotated

from annotated_types import Interval

from fedjax_pfl import averaging, local_training, trees
from fedjax_pfl.types import State, Update


def halfway(task, *, beta: Annotated[float, Interval(ge=0, le=1)] = 0.5):
    """Averages the whole model; a client begins with the head beta w + (1 - beta) v, v its own last
    one.

    Args:
      beta: how far a client's head is moved to the mean of all, in [0, 1].
    """
    sgd, split = local_training.bind(task), averaging.split(task)  # what is sent, and what stays

    def init(key):
        w = task.model.init(key)
        shared, own = split.send(w)
        return State(shared, trees.replicate({"head": w["head"], "own": own}, task.num_clients))

    def start(server, mine):
        w = split.receive(server, mine["own"])
        return {**w, "head": trees.lerp(beta, w["head"], mine["head"])}

    def client(c, server, mine):
        w, value = sgd(c, start(server, mine))
        shared, own = split.send(w)
        return Update(shared, {"head": w["head"], "own": own}, averaging.predictor(task.model, w), value)

    def predict(server, mine, c):
        return averaging.predictor(task.model, start(server, mine))

    return averaging.from_client(init, client, predict)


# %% [markdown]
# The first part of an `Update` is what the client sends, and the server takes the mean of it, weighted by the clients'
# examples; the second stays with the client, the third predicts after local training, the last is the training loss.
# Is it right? `check_algorithm` tries what the package demands of its own methods: another order of the
# clients, padding filled with poison, masked rows with other values, absent clients, batch norm that stays with its client, other layouts. A mistake is
# answered by the name of the rule that it breaks.
# %%
from fedjax_pfl import testing

if TINY:
    testing.check("order", testing.subject(halfway, testing.task()))
else:
    testing.check_algorithm(halfway)  # all rules; about a minute
print("halfway keeps the contract")
# %% [markdown]
# Now against other methods, in one setting: many clients with few examples each. `simulate.rounds` yields a result per
# round; `pre` are the scores of all clients before the round.
# %%
from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate, loading, partitioners

N, ROUNDS = (8, 2) if TINY else (60, 30)
digits = loading.load("digits")
clients = partitioners.partition(digits, "dirichlet_hsu", num_clients=N, alpha=0.5, seed=0)
federation = federate.federate(digits, clients)
network = models.model("linear" if TINY else "mlp", (8, 8, 1), 10)
task = simulate.task(
    digits, federation.class_counts, network, lr=0.1, batch_size=10, epochs=1 if TINY else 5, rounds=ROUNDS
)


def curve(factory, **hyperparameters):
    """Mean accuracy over clients before each evaluated round, and after the last."""
    program = simulate.program(factory, task, hyperparameters)
    results = simulate.rounds(program, jax.random.key(0), federation, rounds=ROUNDS, eval_every=2, state_every=ROUNDS)
    return {r.round: r.pre["acc"].mean() for r in results if r.pre is not None}


known = [] if TINY else ["fedavg", "fedper", "ditto"]
curves = {name: curve(ALGORITHMS[name]) for name in ["local", *known]} | {"halfway": curve(halfway)}
# %%
COLOURS = ["#999999", "#0072b2", "#009e73", "#cc79a7", "#d55e00"]
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.set_xticks(np.linspace(0, ROUNDS, 3))
for (name, values), colour in zip(curves.items(), COLOURS[: len(curves) - 1] + COLOURS[-1:], strict=True):
    label = f"{name}: {100 * values[ROUNDS]:.1f} % after the last round"
    axes.plot(values.keys(), values.values(), color=colour, label=label, linewidth=2.5 if name == "halfway" else 1.5)
axes.set(xlabel="round", ylabel="test accuracy, mean over clients", title="Before local training")
axes.yaxis.set_major_formatter("{x:.0%}")
axes.legend(frameon=False, loc="lower right")
plt.show()
# %% [markdown]
# A float among the hyperparameters is traced: other values run in the same compiled program, so a search costs no
# compilation (see the notebook on sweeps). To keep the method, put the cell into a file: `--algo=FILE.py:halfway`
# runs it from the command line.
