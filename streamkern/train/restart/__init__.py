"""State that a run leaves, as another run or a reader takes it up: centers, scaling, weights."""
