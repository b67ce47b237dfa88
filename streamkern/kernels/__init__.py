"""Kernels, and the tiled product K(A, B) @ W."""
