"""The settings of a run: their types, meanings, checks and error messages."""
