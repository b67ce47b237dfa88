"""What choosing the centers takes, as arithmetic: rows read, FLOPs, bytes. No arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ROW_METHODS: Final = ("random", "balanced", "rpcholesky")
"""Ways to choose rows of the data; "all" takes every one, "kmeans" makes means of them."""
METHODS: Final = (*ROW_METHODS, "kmeans")
"""Ways to choose any number of centers."""

# Rows that k-means sees for each center. Mean squared distance to the nearest of 2 000 centers, 50
# Gaussians in 30 dimensions: random rows 16.3, 10 rows for each 12.4, 25: 11.8, 50: 11.6, 100:
# 11.5. Of 500 centers: 19.9, 13.9, 13.6, 13.4, 13.2; batches of 512 to 4096 differ by 0.2.
KMEANS_ROWS = 50
MIN_KMEANS_ROWS = 1 << 16
# More passes than this over few rows cost more than they bring.
KMEANS_PASSES = 10
KMEANS_BATCH = 2048
# Candidates for each center; the most that memory allows.
CANDIDATES = (8, 4, 2)
PIVOT_BLOCK = 128
SKLEARN_CHUNK = 256


@dataclass(frozen=True)
class Selection:
    """Choosing p centers of d features by looking at `rows` rows.

    row_bytes, point_bytes : of a row in storage, and prepared for distances. itemsize : 4 or 8.
    """

    method: str
    p: int
    d: int
    rows: int
    row_bytes: int
    point_bytes: int
    itemsize: int
    threads: int = 1

    @property
    def flops(self) -> int:
        """kmeans: distances of every row to every center. rpcholesky: N p^2, and the kernel."""
        products = 2 * self.rows * self.p * self.d
        return products if self.method == "kmeans" else products + self.rows * self.p**2

    @property
    def buffers(self) -> list[tuple[str, int]]:
        """Everything of size, by what it is."""
        item, raw = self.itemsize, self.row_bytes + self.d * self.itemsize
        if self.method == "kmeans":
            chunks = self.threads * SKLEARN_CHUNK * self.p * item
            return [
                ("first rows", self.p * raw),
                ("means, copies", 2 * self.p * self.d * item),
                ("batch, cast and transformed", KMEANS_BATCH * (2 * self.d + 2) * item),
                ("distances to all means", chunks),
            ]
        block = min(PIVOT_BLOCK, self.p)
        return [
            # Twice as numbers: copies of rows are left out of the second.
            ("candidates", self.rows * (raw + self.d * item + self.point_bytes)),
            ("partial Cholesky factor", self.rows * self.p * item),
            ("columns of one round", 4 * self.rows * block * item),
        ]

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return sum(size for _, size in self.buffers)


def selection(
    method: str,
    n_rows: int,
    p: int,
    d: int,
    *,
    row_bytes: int,
    point_bytes: int,
    itemsize: int,
    threads: int,
    budget_bytes: int,
) -> Selection | None:
    """How many rows a method looks at, and what that takes; None where it is next to nothing.

    kmeans : 50 rows for each center, at least 65 536, in at most 10 passes over the n_rows.
    rpcholesky : 8 candidates for each center, 4 or 2 where those would take more than a third of
    `budget_bytes`; all rows where there are not as many.
    """

    def looking_at(rows: int) -> Selection:
        return Selection(method, p, d, rows, row_bytes, point_bytes, itemsize, threads)

    if method == "kmeans":
        wanted = max(KMEANS_ROWS * p, MIN_KMEANS_ROWS)
        return looking_at(min(wanted, KMEANS_PASSES * n_rows))
    if method == "rpcholesky":
        choices = [looking_at(min(k * p, n_rows)) for k in CANDIDATES]
        return next((c for c in choices if c.total <= budget_bytes // 3), choices[-1])
    return None
