"""FedMA and its matching of neurons."""
