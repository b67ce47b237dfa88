"""Rows on their way to the device: their order, read ahead, on threads or on a cluster."""
