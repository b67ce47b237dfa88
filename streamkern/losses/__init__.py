"""Losses of predictions: their values, gradients and bounds of curvature, for any array module."""
