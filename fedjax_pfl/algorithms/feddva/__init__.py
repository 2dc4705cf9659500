"""FedDVA, its losses and its phases."""
