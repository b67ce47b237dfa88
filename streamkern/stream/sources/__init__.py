"""Sources of rows: stores, arrays, generators, augmented copies, mixtures."""
