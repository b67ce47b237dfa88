"""The run directory: what survives a kill, and who may write it."""
