"""Preconditioners of the methods: norms, the noise of targets, eigensystems and step sizes."""
