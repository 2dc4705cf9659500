"""Experiments from settings: presets, run directories, results and reports."""

from fedjax_pfl.experiment import callbacks
from fedjax_pfl.experiment.build import Experiment, build
from fedjax_pfl.experiment.config import Config, resolve
from fedjax_pfl.experiment.results import load
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.train import train

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
