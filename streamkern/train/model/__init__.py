"""A trained model in memory: its predictions, calibration, importances and goodness of fit."""
