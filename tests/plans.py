"""A problem to plan for, of the size of MNIST."""

from streamkern.planning.sizes import MiB, Problem

PLAIN = Problem(
    n_rows=60_000, epochs=2, d=784, c=10, p=10_000, row_bytes=785, unit_rows=5000, itemsize=4,
    threads=2, width=786, tile_bytes=4 * MiB,
)  # fmt: skip
