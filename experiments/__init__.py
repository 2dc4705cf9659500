"""Commands, as used from a checkout, and measured results."""
