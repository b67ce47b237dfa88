"""The ways to choose the centers Z."""
