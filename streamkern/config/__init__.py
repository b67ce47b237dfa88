"""Settings of a run file, and the error message for every mistake in it."""
