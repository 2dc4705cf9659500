"""Pure numerical kernels of single methods, free of the federation."""
