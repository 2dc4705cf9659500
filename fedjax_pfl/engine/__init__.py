"""Execution of experiments: layout of clients on devices, the compiled round,
checkpoints, several processes."""

from typing import TYPE_CHECKING

from fedjax_pfl.errors import moved

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = moved(__name__, {"host_state": 'program(..., storage="host")'})
