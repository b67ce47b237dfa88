"""Turn raw files into a store: a reader for each format, checks, and the random order."""
