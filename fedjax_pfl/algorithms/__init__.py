"""Every method by its name on the command line: {name: factory}, factory(task,
**hyperparameters) -> Algorithm.

A factory checks its hyperparameters against its signature, see
`fedjax_pfl.hyperparameters`.
"""

# ruff: noqa: F401, I001  # imported to be registered, in the order of the methods' table
from fedjax_pfl.algorithms import standalone, fedavg, scaffold, perfedavg, pfedme
from fedjax_pfl.algorithms import fedper, fedbn
from fedjax_pfl.algorithms.fedma import fedma
from fedjax_pfl.algorithms import fedrod, ditto, apfl, fedamp, fedphp, fedala, fedfomo
from fedjax_pfl.algorithms import pfedhn, mocha, fedproto, fd, mutual, mnfl
from fedjax_pfl.algorithms.knowledge_transfer import knowledge_transfer
from fedjax_pfl.algorithms import feddf, fedem, fedcp
from fedjax_pfl.algorithms.feddva import feddva
from fedjax_pfl.algorithms.pfedc import pfedc
from fedjax_pfl.algorithms import pfedafm
from fedjax_pfl.algorithms import moon, feddyn, fedlc, fedntd, feddbe, knn_per, fedadmm
from fedjax_pfl.algorithms import fedgh, fedpac, fedas, fedtgp, pfedsim, fedcac, gpfl
from fedjax_pfl.algorithms import fedmtl, fedmrl, fedgen, fedpcl, apple, ccvr, fedl2g
from fedjax_pfl.algorithms import fedsr, pfl_da, fedcross, cfl, fednova
from fedjax_pfl.algorithms import fedsa_lora, flora, hetlora, pfedlora
from fedjax_pfl.algorithms import pfedfda, floco, fedap, pfedla, pefll, fedssa, flute
from fedjax_pfl.algorithms.registry import ALGORITHMS, SEVERAL_ARCHITECTURES, register

__all__ = ["ALGORITHMS", "SEVERAL_ARCHITECTURES", "register"]
globals().update(ALGORITHMS)  # the factories hide the modules of the same name
