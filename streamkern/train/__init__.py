"""Training: open, set up, run and resume a training, and load its model."""
