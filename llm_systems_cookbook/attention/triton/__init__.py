"""Attention in Triton: the kernels, their launch, and the ladder to them."""
