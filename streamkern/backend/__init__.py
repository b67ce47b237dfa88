"""One interface to NumPy, Numba and CuPy; only this package imports Numba and CuPy."""
