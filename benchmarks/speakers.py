"""A language model of half of the speakers of a text file, and adapters of it for other
speakers.

    python -m benchmarks.speakers split FILE FOLDER    # base, new and tokenizer.json
    python -m benchmarks.speakers gains FOLDER FIGURE    # of its sweeps, below

FOLDER holds the sweeps `base` (one round at a rate of 1e-9), `lora` and `whole`
(networks without adapters) of the same seeds. `split` needs tokenizers.
"""

import gzip
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedjax_pfl.models import layers, nets, text
from fedjax_pfl.models.transformer import Layout

WIDTH, DEPTH, HEADS = 256, 6, 8
LEAST, MOST = 1_000, 12_000  # characters of a new speaker


def network(
    input_shape: tuple[int, ...],
    num_classes: int,
    rngs: Any,
    *,
    vocabulary: int,
    positions: int,
) -> nets.Net:
    """Causal transformer of tokens, 5.3 million parameters for 1,026 tokens."""
    layout = Layout(WIDTH, HEADS, 4 * WIDTH)
    body = text.Tokens(vocabulary, input_shape[0], DEPTH, layout, rngs)
    return nets.Net(body, layers.linear(WIDTH, num_classes, rngs))


def split(file: str, folder: str, clients: int = 24) -> None:
    """Writes a random half of the speakers to base.json, and of the others `clients`
    with from 1,000 to 12,000 characters, evenly over their ranks, to new.json."""
    path = Path(file)
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8") as f:
        said: dict[str, str] = json.load(f)
    names = np.random.default_rng(0).permutation(sorted(said))
    base, rest = names[: len(names) // 2], names[len(names) // 2 :]
    able = sorted(
        (name for name in rest if LEAST <= len(said[name]) <= MOST),
        key=lambda name: len(said[name]),
    )
    at = np.linspace(0, len(able) - 1, clients).astype(int)
    for name, chosen in (("base", base), ("new", [able[i] for i in at])):
        part = {str(speaker): said[speaker] for speaker in chosen}
        target = Path(folder, f"{name}.json")
        target.write_text(json.dumps(part))
        count = sum(map(len, part.values()))
        print(f"{target}: {len(part)} speakers, {count:,} characters")
        if name == "base":
            tokenizer(list(part.values())).save(str(Path(folder, "tokenizer.json")))


def tokenizer(texts: list[str], vocabulary: int = 1_024) -> Any:
    """Returns a Hugging Face tokenizer of pairs of bytes, learned from texts."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


def runs(folder: str) -> pd.DataFrame:
    """Returns the last scores of all clients of the sweeps in a folder: columns method,
    seed, client, train (rows of text) and perplexity, before and after the local
    training of the last round, and of the base."""
    found = []
    for file in sorted(Path(folder).glob("*/*/clients.csv")):
        config = json.loads(file.with_name("config.json").read_text())
        sweep = file.parent.parent.name
        method = config["algo"] if sweep == "lora" else f"{sweep} {config['algo']}"
        rows = pd.read_csv(file)
        rows = rows.rename(columns={f"{x}/perplexity": x for x in ("pre", "post")})
        # --eval_every=0 scores what the last round leaves, without further training
        rows["post"] = rows["post"] if "post" in rows else rows["pre"]
        rows = rows[["client", "train", "pre", "post"]]
        found.append(rows.assign(method=method, seed=config["seed"]))
    whole = pd.concat(found)
    start = whole["method"].str.startswith("base")
    base = whole[start].set_index(["seed", "client"])["pre"].rename("base")
    return whole[~start].join(base, on=["seed", "client"])


def gains(folder: str, figure: str) -> None:
    """Prints what each method gains over the base, and draws it beside the amount of
    text of the speakers."""
    whole = runs(folder)
    scores = ["base", "pre", "post"]
    print("mean over clients: perplexity, mean and deviation over seeds")
    seeds = whole.groupby(["method", "seed"])[scores].mean()
    seeds["less"] = seeds["base"] - seeds["post"]
    print(seeds.groupby("method").agg(["mean", "std"]).round(1).to_string())
    whole["gain"] = 100 * (1 - whole["post"] / whole["base"])
    print("share of clients with a gain, and rank correlation of gain and text")
    drawn = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawn.add_subplot()
    for marker, (name, rows) in zip(
        itertools.cycle("osD^vx"), whole.groupby("method"), strict=False
    ):
        rank = rows["gain"].corr(rows["train"], method="spearman")
        print(f"{name}: {(rows['gain'] > 0).mean():.0%}, {rank:.2f}")
        each = rows.groupby("client")[["train", "gain"]].mean().sort_values("train")
        style = {"marker": marker, "linestyle": "", "fillstyle": "none", "label": name}
        axes.plot(each["train"], each["gain"], **style)
    axes.axhline(0, color="0.35", linewidth=1)
    label = "lower perplexity than the base (%)"
    axes.set(xlabel="passages of 64 tokens to train on", ylabel=label, xscale="log")
    axes.set_xticks([5, 10, 20, 50], ["5", "10", "20", "50"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    drawn.savefig(figure, dpi=150)


if __name__ == "__main__":
    what, *values = sys.argv[1:]
    {"split": split, "gains": gains}[what](*values)
