"""Experiments from settings: presets, run directories, results and reports."""

from fedjax_pfl.experiment import callbacks
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.config import Config, resolve
from fedjax_pfl.experiment.results import load
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.train import train
from fedjax_pfl.experiment.types import Experiment

__all__ = [
    "Config",
    "Experiment",
    "RunDirectory",
    "build",
    "callbacks",
    "load",
    "resolve",
    "train",
]
