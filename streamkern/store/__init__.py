"""The training set in Zarr: its layout, how it is read, written and described."""
