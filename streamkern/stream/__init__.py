"""Order, read ahead and upload the rows of a source, on threads or on a Dask cluster."""
