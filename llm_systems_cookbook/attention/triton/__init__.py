"""How does a GPU read the blocks in place? With kernels written in Triton."""
