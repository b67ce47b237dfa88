"""Ranks in processes of a Dask cluster: started, monitored, ended together, and restarted."""
