"""The version of streamkern, defined only here and recorded with every run."""

__version__ = "0.1.0"
