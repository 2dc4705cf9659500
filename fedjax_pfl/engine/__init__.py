"""How an experiment runs: layout of clients on devices, the compiled round,
checkpoints, several processes."""
