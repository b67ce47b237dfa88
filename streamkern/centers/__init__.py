"""Selection of the centers Z."""
