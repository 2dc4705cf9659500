"""Every method by its name on the command line: {name: factory}, factory(task,
**hyperparameters) -> Algorithm.

The factories of this package check their hyperparameters by their signatures, see
`fedjax_pfl.hyperparameters`; as they stand in their modules they do not.
"""

from collections.abc import Callable

from fedjax_pfl.algorithms.apfl import apfl
from fedjax_pfl.algorithms.ditto import ditto
from fedjax_pfl.algorithms.fd import fd
from fedjax_pfl.algorithms.fedala import fedala
from fedjax_pfl.algorithms.fedamp import fedamp
from fedjax_pfl.algorithms.fedavg import fedavg, fedavg_ft, fedprox
from fedjax_pfl.algorithms.fedbn import fedbn
from fedjax_pfl.algorithms.fedcp import fedcp
from fedjax_pfl.algorithms.feddf import feddf, pfeddf
from fedjax_pfl.algorithms.feddva import feddva
from fedjax_pfl.algorithms.fedem import fedem
from fedjax_pfl.algorithms.fedfomo import fedfomo
from fedjax_pfl.algorithms.fedma import fedma, pfedma
from fedjax_pfl.algorithms.fedper import fedbabu, fedper, fedrep, lg_fedavg
from fedjax_pfl.algorithms.fedphp import fedphp
from fedjax_pfl.algorithms.fedproto import fedproto
from fedjax_pfl.algorithms.fedrod import fedrod
from fedjax_pfl.algorithms.knowledge_transfer import fedmd, mnfl_het, sim_pfd, topk_pfd
from fedjax_pfl.algorithms.mnfl import mnfl
from fedjax_pfl.algorithms.mocha import mocha
from fedjax_pfl.algorithms.mutual import fedapen, fedkd, fml
from fedjax_pfl.algorithms.perfedavg import per_fedavg
from fedjax_pfl.algorithms.pfedafm import pfedafm
from fedjax_pfl.algorithms.pfedc import pfedc, privacy_pfedc
from fedjax_pfl.algorithms.pfedhn import pfedhn
from fedjax_pfl.algorithms.pfedme import pfedme
from fedjax_pfl.algorithms.scaffold import scaffold
from fedjax_pfl.algorithms.standalone import local
from fedjax_pfl.hyperparameters import checked
from fedjax_pfl.types import Algorithm

_FACTORIES: tuple[Callable[..., Algorithm], ...] = (
    local,
    fedavg,
    fedavg_ft,
    fedprox,
    scaffold,
    per_fedavg,
    pfedme,
    fedper,
    fedrep,
    lg_fedavg,
    fedbabu,
    fedbn,
    fedma,
    pfedma,
    fedrod,
    ditto,
    apfl,
    fedamp,
    fedphp,
    fedala,
    fedfomo,
    pfedhn,
    mocha,
    fedproto,
    fd,
    fml,
    fedkd,
    fedapen,
    mnfl,
    mnfl_het,
    fedmd,
    sim_pfd,
    topk_pfd,
    feddf,
    pfeddf,
    fedem,
    fedcp,
    feddva,
    pfedc,
    privacy_pfedc,
    pfedafm,
)
ALGORITHMS = {factory.__name__: checked(factory) for factory in _FACTORIES}
globals().update(ALGORITHMS)  # what is imported from here, too

# methods whose clients may be of several architectures
ANY_ARCHITECTURE = (
    "local",
    "lg_fedavg",
    "fedproto",
    "fd",
    "fml",
    "fedkd",
    "fedapen",
    "mnfl_het",
    "fedmd",
    "sim_pfd",
    "topk_pfd",
    "feddf",
    "pfeddf",
    "pfedafm",
)
