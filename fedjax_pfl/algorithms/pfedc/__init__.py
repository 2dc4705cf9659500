"""pFedC, its task maps, its losses and the minimum-norm point."""
