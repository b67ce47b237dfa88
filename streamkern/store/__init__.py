"""The training set in Zarr: its layout, and how it is read, written and described."""
