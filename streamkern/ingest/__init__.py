"""Raw files into a store: one reader for each format, checks, the random order."""
