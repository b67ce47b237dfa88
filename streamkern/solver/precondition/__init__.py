"""Norms, damping, eigensystems and step sizes: what the methods precondition with."""
