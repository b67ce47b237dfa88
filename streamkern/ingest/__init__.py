"""Raw files into a store: one reader for each format, checks, the random order."""

from streamkern.basics.room import name_the_function

name_the_function(__name__, "streamkern.ingest_store(inputs, place, y=...)")
