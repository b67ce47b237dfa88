"""Ranks in processes of a Dask cluster: placed, watched, ended together, and begun again."""
