"""NumPy, Numba and CuPy behind one object; nothing else names the last two."""
