"""Protection of uploads, and attacks on them."""

from typing import TYPE_CHECKING

from fedjax_pfl.errors import moved

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = moved(
        __name__,
        {
            "encryption": "algorithms.pfedc.encryption",
            "attacks": "program(..., uploads=uploads.attack(kind)) and Task.malicious",
            "differential_privacy": "program(..., uploads=uploads.private()) and "
            "uploads.privacy.guarantee",
            "robust": "program(..., uploads=uploads.robust(rule))",
        },
    )
