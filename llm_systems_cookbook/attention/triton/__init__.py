"""How are the blocks read in place on a GPU? By kernels in Triton."""
