"""What a run file may say, and the sentence for every mistake in it."""
