"""The ways to choose the centers Z, a file each."""
