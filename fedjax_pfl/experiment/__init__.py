"""Experiments from settings: presets, run directories, results and reports."""
