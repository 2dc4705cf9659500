"""Measured results: a JSON file per preset, and the script that writes their pages."""
