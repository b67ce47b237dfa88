"""Norms, the noise of targets, eigensystems and step sizes: what the methods precondition with."""
