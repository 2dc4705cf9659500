"""The pFedC paper's experiments; its numbers are scored right after local training (`post`), in the last round.

Its own method's number is "mean accuracy on all tasks" (`task_acc`), the others' are ordinary accuracy.
"""

from experiments.presets.preset import Preset

MNIST = Preset(
    description="pFedC, Table 1, MNIST: 20 clients with 2 classes each, LeNet",
    settings={
        "algo": "pfedc",
        "dataset": "mnist",
        "partition": "pathological",
        "classes_per_client": 2,
        "clients": 20,
        "model": "lenet",
        "batch_size": 32,
        "epochs": 5,
        "lr": 0.005,
        "rounds": 40,  # pFedC's; the paper gives its baselines 1000
    },
    time="328,000 client steps; with --data_fraction=0.2 a fifth of that",
    headline="post/acc",
    headlines={"pfedc": "post/task_acc"},
    published={
        "fedavg": "91.94 ± 0.76",
        "per_fedavg": "92.95 ± 0.28",
        "pfedme": "93.30 ± 0.44",
        "fedbn": "97.73 ± 0.34",
        "fedrep": "97.85 ± 0.15",
        "fedfomo": "98.61 ± 0.29",
        "pfedc": "99.44 ± 0.41",
    },
)
