"""Sizes, memory and FLOPs of a run, computed from numbers before the run starts."""
