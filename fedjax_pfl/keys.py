"""Names of all random streams, one enum for each kind of parent key.

A key is split by folding in the number of a stream. The main local training of a client
uses the client's key unchanged, and every further stream is folded in by its name. So
methods coincide exactly where their papers claim it. The numbers below one parent key
must differ within a method; their values are part of every recorded result and never
change.
"""

import enum

import jax

from fedjax_pfl.types import Array


class Stream(enum.Enum):
    """A stream: its number and its use. Two streams may share a number if no method
    uses both."""

    def __init__(self, number: int, use: str):
        self.number, self.use = number, use


class Run(Stream):
    """Below the key of an experiment."""

    INIT = 0, "the method's initial state"
    ROUND = 1, "round t, folded in next"


class Round(Stream):
    """Below the key of round t."""

    SAMPLING = 2, "which clients take part; does not depend on the method"
    SERVER = 3, "the server's own draws, the key that Algorithm.round is given"
    CLIENTS = 4, "the clients: phase and id are folded in next"


class Server(Stream):
    """Below Round.SERVER."""

    PUBLIC = 40, "the public examples of a round"
    STUDENT = 41, "FedDF: training of the server's models on them"
    NOISE = 0x6E01, "differential privacy: the noise on a sum of uploads"
    QUANTILE = 0x6E02, "differential privacy: the noise on the count of clipped clients"
    OPTION = 0x6E10, "a second option on uploads of a kind, + its number"


class Cohort(Stream):
    """Below Round.CLIENTS, like the phases 0, 1, ..."""

    ORDER = 0x5CA4, "the order of Cohort.scan"


class Client(Stream):
    """Below a client's key in one phase."""

    SHUFFLE = 1, "the order of its examples, epoch by epoch"
    STEP = 2, "its steps, one by one"
    HEAD_PHASE = 11, "FedRep, FedDVA: training of the head alone"
    FINE_TUNE = 12, "fine-tuning before a prediction"
    SELECT = 31, "FedFomo: which models are received"
    SUBSET = 31, "FedALA: the examples that blending looks at"
    BLEND = 32, "FedALA: batches of blending"
    SECOND_PHASE = 41, "FedDVA: the encoders; the released code's encoder of z"
    TRANSFER = 42, "knowledge transfer: training on the public examples"
    WARM_UP = 43, "knowledge transfer: private training before the first exchange"
    EXTRACTOR = 45, "pFedAFM: training of the shared extractor"
    ATTACK = 0x6E03, "malicious clients: random updates"
    COMPRESS = 0x6E05, "compression of an upload"
    OPTION = 0x6E10, "a second option on uploads of a kind, + its number"


class Step(Stream):
    """Below the key of one local step."""

    LOSS = 3, "the loss: dropout and alike"
    AUGMENT = 4, "augmentation, + the number of the batch"
    MIX = 9, "mixing of examples and labels, + the number of the batch"


class Loss(Stream):
    """Below Step.LOSS."""

    GUMBEL = 21, "FedCP: the gate's noise; in a prediction below the client's key"
    SHARED = 22, "dropout of the shared model, trained with a client's own model"
    INNER = (
        23,
        "dropout of Per-FedAvg's inner batch, + 1 of the Hessian's; of pFedMe's inner "
        "steps, + their number",
    )
    NOISE = 0x6E04, "differential privacy: the noise on a step's gradient"


class Init(Stream):
    """Below Run.INIT, whose unchanged key is for the model of every client."""

    POLICY = 22, "FedCP: the policy network"
    REJECT = 31, "pFedC: the reject logits"
    MAP = 40, "FedKD: the map of the student's features"
    EXTRACTOR = 45, "pFedAFM: the shared extractor"


def fold(key: Array, stream: Stream, offset: int | Array = 0) -> Array:
    """Returns the key of a stream below `key`; `offset` is added to its number."""
    return jax.random.fold_in(key, stream.number + offset)


def round_key(key: Array, t: Array | int) -> Array:
    """Returns the key of round t of the experiment with this key."""
    return jax.random.fold_in(fold(key, Run.ROUND), t)


def clients_key(key: Array, t: Array | int) -> Array:
    """Returns the parent of the keys of round t's clients."""
    return fold(round_key(key, t), Round.CLIENTS)
