"""A model of what a step of the block solver takes on many ranks of some hardware."""
