# %% [markdown]
# # What heterogeneity does
#
# Dirichlet's α sets how differently classes are spread over clients: each draws its shares of the ten classes from
# Dir(α/10, ..., α/10). At 0.1 most clients have one class, at 100 nearly equal shares of all. It is the usual knob of papers
# on personalised federated learning, and it decides who wins. Five methods over one sweep:
#
# * **FedAvg**, one model for all, scored as it is, before local training;
# * **Local**, no federation;
# * **FedRep** shares the body and keeps the head; **Ditto** keeps a model of its own near the shared one; **pFedC**
#   shares each class's branch of the classifier among those who hold the class.
# %%
from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate, loading, partitioners

ALPHAS = [0.1, 10.0] if TINY else [0.1, 1.0, 3.0, 10.0, 100.0]
METHODS = ["local", "fedavg"] if TINY else ["fedavg", "local", "fedrep", "ditto", "pfedc"]
N, ROUNDS, SEEDS = (6, 2, [0]) if TINY else (60, 20, [0, 1])
digits = loading.load("digits")
network = models.model("linear" if TINY else "mlp", (8, 8, 1), 10)


def setting(alpha, seed):
    """The clients' data at this α, of equal sizes, the classes drawn as Hsu et al. (2019) do; and
    how they learn."""
    clients = partitioners.partition(digits, "dirichlet_hsu", num_clients=N, alpha=alpha, seed=seed)
    federation = federate.federate(digits, clients)
    options = {"lr": 0.1, "batch_size": 10, "epochs": 1 if TINY else 5, "rounds": ROUNDS}
    return federation, simulate.task(digits, federation.class_counts, network, **options)


def accuracy(name, alpha, seed):
    """Mean over clients after the last round, before local training."""
    federation, task = setting(alpha, seed)
    program = simulate.program(ALGORITHMS[name], task, width=4)
    options = {"rounds": ROUNDS, "eval_every": 0, "state_every": ROUNDS}
    *_, last = simulate.rounds(program, jax.random.key(seed), federation, **options)
    return last.pre["acc"].mean()


table = {name: [[accuracy(name, alpha, seed) for seed in SEEDS] for alpha in ALPHAS] for name in METHODS}
# %% [markdown]
# The lines cross. At the left a client knows only its own few classes, which are easy to tell apart alone, and one
# model for all is wasted on it. At the right everybody has the same problem, and whoever does not share is left
# with 22 examples.
# %%
COLOURS = {"fedavg": "#0072b2", "local": "#999999", "fedrep": "#009e73", "ditto": "#cc79a7", "pfedc": "#d55e00"}
MARKS = dict(zip(COLOURS, "os^Dv", strict=True))
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, values in table.items():
    mean, spread = np.mean(values, axis=1), np.std(values, axis=1, ddof=len(SEEDS) > 1)
    axes.errorbar(ALPHAS, mean, spread, marker=MARKS[name], color=COLOURS[name], label=name, capsize=3)
axes.set(
    xscale="log",
    xlabel="alpha: from one class per client to equal shares of all",
    ylabel="test accuracy, mean over clients",
)
axes.set_xticks(ALPHAS, [f"{alpha:g}" for alpha in ALPHAS])
axes.minorticks_off()
axes.yaxis.set_major_formatter("{x:.0%}")
axes.legend(frameon=False)
axes.set_title(
    f"{N} clients, {ROUNDS} rounds, {len(SEEDS)} seed(s): mean and standard deviation over seeds", fontsize=10
)
plt.show()
# %% [markdown]
# What it does not say: the learning rate is the same for all, nothing was tuned, and the digits are easy.
# `fedjax-pfl run --list` has the papers' settings.
