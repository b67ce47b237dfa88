"""Bytes at a URL or on a disk: with patience, durable, cached, and what of it is ours."""
