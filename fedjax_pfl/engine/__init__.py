"""Execution of experiments: layout of clients on devices, the compiled round,
checkpoints, several processes."""
