"""What can be streamed: stores, arrays, generators, augmented copies, mixtures."""
