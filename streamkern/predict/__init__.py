"""Prediction: input rows, output files, calibration, and metrics."""
