"""Pure integers: the sizes of a run, its bytes, its FLOPs, and the best that fits."""
