"""Training methods, one file each, and their construction and cost."""
