"""What is known of a score by its name and by the method's headline: its unit, and
which way it is better."""

from collections.abc import Iterable

# the score that decides, and "max" or "min": `Algorithm.headline`
Headline = tuple[str, str]
ACCURACY: Headline = ("acc", "max")
LEADING = ("acc", "acc_present", "task_acc")  # shown before the others
_SHARES = {"acc", "accuracy", "recall", "bal"}
# in the name of a score of some clients only: acc@lenet, of those whose network is a
# LeNet
OF = "@"
_BASELINES = {
    "acc_present": "acc_majority",
    "acc_groups": "acc_majority",
    "recall_macro": "recall_majority",
}
_LOWER = ("reconstruction", "kl_", "loss", "error", "perplexity")


def is_share(name: str) -> bool:
    """Is it a share of examples in [0, 1], shown in %? All with acc, accuracy, recall
    or bal among the words of their name (`task_acc`, not `global_loss`)."""
    return not _SHARES.isdisjoint(name.partition(OF)[0].split("_"))


def better(name: str, headline: Headline = ACCURACY) -> str:
    """The better of two values, "max" or "min", by the name without `_micro` and
    without an architecture."""
    name = name.removesuffix("_micro").partition(OF)[0]
    if name == headline[0]:
        return headline[1]
    return (
        "min" if any(word in name for word in _LOWER) and not is_share(name) else "max"
    )


def baseline(name: str) -> str:
    """The score that is the majority baseline of a score, macro or micro as its name
    says, if recorded."""
    plain = name.removesuffix("_micro")
    return _BASELINES.get(plain, f"{plain}_majority") + name.removeprefix(plain)


def ordered(names: Iterable[str], headline: Headline = ACCURACY) -> list[str]:
    """The names of scores, the headline with its architectures' and the leading ones
    first."""
    found = list(dict.fromkeys(names))
    parts = [name for name in found if name.startswith(headline[0] + OF)]
    first = [
        name for name in dict.fromkeys((headline[0], *parts, *LEADING)) if name in found
    ]
    return [*first, *(name for name in found if name not in first)]


def directions(names: Iterable[str], headline: Headline = ACCURACY) -> str:
    """In words which of these scores are the better the higher, and which the lower."""
    found = list(names)
    parts = {
        how: [n for n in found if better(n, headline) == way]
        for way, how in (("max", "higher"), ("min", "lower"))
    }
    return "; ".join(
        f"{', '.join(of)}: {how} is better" for how, of in parts.items() if of
    )


def direction(headline: Headline) -> str:
    """Which way the score that decides is better, in words."""
    return f"{'higher' if headline[1] == 'max' else 'lower'} is better"


def shown(name: str, value: float, digits: int = 1) -> str:
    """A value without its unit: a share in %, with so many digits behind the point;
    else with four in all."""
    return f"{100 * value:.{digits}f}" if is_share(name) else f"{value:.4g}"


def labelled(name: str, value: float) -> str:
    """A value with its unit."""
    return f"{value:.1%}" if is_share(name) else f"{value:.4g}"
