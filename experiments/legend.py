"""What the words of the terminal's tables mean; docs/evaluation.md has the same."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console

from experiments import report
from experiments.scores import OF

POINTS = {
    "before": (
        "before a round's local training, all clients, after the last round: the state "
        "as it stands (pre)"
    ),
    "after": (
        "right after a participant's local training, before the server has seen it "
        "(post)"
    ),
    "latest after": (
        "each client's last score after local training, whenever it took part "
        "(post_latest)"
    ),
    "validation, before": "as before, on the examples that --val_fraction holds out",
    "unseen before": (
        "clients that did not train, with the trained server, before local training of "
        "their own"
    ),
    "unseen after": "the same clients after it",
}
COLUMNS = {
    "clients": "how many clients have the score",
    "macro mean": "mean over clients, each of the same weight",
    "micro mean": "mean over clients weighted by their test examples",
    "std": "standard deviation over clients",
    "worst 10 %": "mean of the tenth of the clients that is served worst",
    "best 10 %": "mean of the tenth that is served best",
    "majority baseline": "macro mean of always answering each client's most frequent class, or no",
    "last round": "macro mean after the last evaluated round",
    "mean of last 10": "macro mean, averaged over the last ten evaluations",
    "evaluations": "how many those are",
    "best round": "the best macro mean of all rounds, chosen on the test examples, so optimistic",
    "after "
    "rounds": "how many rounds are behind it, that of the local training included",
}
SCORES = {
    "acc": "accuracy: the argmax over all classes is the label",
    "acc_present": "accuracy among the classes of which the client holds training examples",
    "acc_groups": "accuracy among the classes of the client's groups of classes (pFedC)",
    "coarse_acc": "the group of the predicted class is the label's (pFedC)",
    "task_acc": "accuracy of each task that the client holds, averaged over them (pFedC)",
    "task_bal": "the same, balanced between yes and no (pFedC)",
    "recall_macro": "mean recall over the client's classes",
    "elbo": "evidence lower bound: minus the sum of the next three (FedDVA)",
    "reconstruction": "half the squared error of the reconstruction (FedDVA)",
    "kl_z": "divergence of the shared latent from a standard normal (FedDVA)",
    "kl_c": "divergence of the personal latent from a standard normal (FedDVA)",
}
# in front of a score: another model than the one the client is scored by
OTHER_MODELS = {
    "global_": "of the shared model in place of the personal one",
    "untuned_": "of the model as received, before it is fine-tuned",
    "proto_": "of the nearest prototype in place of the classifier",
    "large_": "of the client's own features alone",
    "small_": "of the shared features alone",
    "own_": "of the client's own model alone",
    "shared_": "of the shared model alone",
    "equal_": "of both models with the same weight",
}
TRAFFIC = {
    "down, up": "scalars that clients received and sent",
    "ints": "whole numbers, such as ids, both ways",
    "messages": "messages, both ways",
}


def of_score(name: str) -> str | None:
    """What a score is; None for one that only its method knows."""
    plain, _, kind = name.partition(OF)
    if plain in SCORES:
        return SCORES[plain] + (
            f"; of the clients whose network is {kind}" if kind else ""
        )
    prefix = next((prefix for prefix in OTHER_MODELS if name.startswith(prefix)), None)
    rest = of_score(name.removeprefix(prefix)) if prefix else None
    return f"{rest}; {OTHER_MODELS[prefix]}" if prefix and rest else None


def words(found: dict[str, Any]) -> dict[str, str]:
    """The words in the tables of a `report.summary`, with their meanings.

    The baselines (`..._majority`) stand in a column, not in a row of their own.
    """
    points = {
        report.WITH_UNSEEN[point] for point, values in found["scores"].items() if values
    }
    names: Iterable[str] = dict.fromkeys(
        name for values in found["scores"].values() for name in values
    )
    known = {name: of_score(name) for name in names if not name.endswith("_majority")}
    shown = {name: text for name, text in known.items() if text}
    return (
        {point: text for point, text in POINTS.items() if point in points}
        | shown
        | COLUMNS
        | TRAFFIC
    )


def show(console: Console, found: dict[str, Any]) -> None:
    """Prints the words of a `report.summary`."""
    meanings = words(found)
    width = max(map(len, meanings))
    console.print("Words of the tables:")
    for word, text in meanings.items():
        console.print(f"  {word:<{width}}  {text}")
