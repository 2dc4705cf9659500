"""Forms of convolutions and dense layers that are fast on a CPU."""
