"""Methods that exchange predictions on public examples, and their weights."""
