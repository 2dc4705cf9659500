"""Protection of uploads, and attacks on them."""
