# %% [markdown]
# # One run, its figures, one client's predictions
#
# Twenty clients hold handwritten digits, each mostly of a few classes, and none may show them to anybody. One
# global model has to serve them all; a model trained alone sees too little. Personalised federated learning gives
# each client a model of its own and still learns from everybody. This notebook trains one such method, pFedC, looks
# at what the run left behind, and then at the predictions of a single client.
#
# The command line does the training; `fedjax-pfl run` in a terminal takes the same flags.
# %%
from fedjax_pfl.experiment import load, sweep

SETTINGS = ["--algo=pfedc", "--partition=dirichlet_class", "--alpha=0.3", "--clients=20"]  # of uneven sizes, too
SIZE = ["--rounds=2", "--data_fraction=0.3", "--epochs=1"] if TINY else ["--rounds=20"]
WORKDIR = Path("runs/notebook-a")
shutil.rmtree(WORKDIR, ignore_errors=True)

assert sweep.run([*SETTINGS, *SIZE, f"--workdir={WORKDIR}"]) == 0
# %% [markdown]
# Everything that the run was and found is in its directory. `partition.png` shows who holds which class: the area
# of a bubble is a number of training examples.
# %%
from IPython.display import Image

display(Image(WORKDIR / "partition.png"))
# %% [markdown]
# `curves.png` follows the mean accuracy over clients before and after each round's local training. The band is one
# standard deviation over clients: a mean hides who is served badly.
# %%
display(Image(WORKDIR / "curves.png"))
# %% [markdown]
# The scores of all clients are kept, too. Sorted, they show the spread. The second marker of a client is what it would
# score by always answering its most frequent class.
# %%
run = load(WORKDIR)
e = run.experiment
scores = run.scores
scores = scores[(scores["point"] == "pre") & (scores["score"] == "acc")]
accuracy = scores[scores["round"] == scores["round"].max()]["value"].to_numpy()  # after the last round
counts = np.array(e.federation.class_counts)
majority = np.array(
    [np.mean(e.dataset.y[e.partition.test[i, :n]] == counts[i].argmax()) for i, n in enumerate(e.partition.test_sizes)]
)
order = np.argsort(accuracy)
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
axes.bar(range(len(order)), accuracy[order], color="#0072b2", label="pFedC")
axes.plot(range(len(order)), majority[order], "o", color="#d55e00", label="its most frequent class")
axes.set(xlabel="client, from worst to best", ylabel="test accuracy", ylim=(0, 1.02), xticks=range(len(order)))
axes.set_xticklabels(order)
axes.yaxis.set_major_formatter("{x:.0%}")
figure.legend(loc="outside upper center", ncols=2, frameon=False)
plt.show()
# %% [markdown]
# The last figure shows the worst served client: its test digits and the answers of its own model. Mistakes are red.
# %%
client = int(order[0])
rows = e.partition.test[client, : min(24, e.partition.test_sizes[client])]
x, y = e.dataset.x[rows], e.dataset.y[rows]
said = np.array(run.predictor(client)(x)).argmax(axis=-1)

figure, panels = plt.subplots(3, 8, figsize=(8, 3.6), layout="constrained")
for panel in panels.flat:
    panel.axis("off")
for panel, image, truth, answer in zip(panels.flat, x, y, said, strict=False):
    panel.imshow(image[..., 0], cmap="gray_r")
    panel.set_title(f"{answer}", color="black" if truth == answer else "red")
figure.suptitle(f"Client {client} holds the digits {', '.join(map(str, np.flatnonzero(counts[client])))} in training")
plt.show()
