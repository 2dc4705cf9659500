"""Data sets, their partitions, and federations of both."""

from typing import TYPE_CHECKING

from fedjax_pfl.errors import moved

if not TYPE_CHECKING:
    __getattr__ = moved(
        __name__,
        {"features": "fedjax_pfl.models.features", "cache": "fedjax_pfl.cache"},
    )
