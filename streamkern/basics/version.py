"""The version: defined here alone, recorded with every run, the same on every worker."""

__version__ = "0.1.0"
