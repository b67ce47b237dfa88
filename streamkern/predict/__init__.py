"""What a model says of new rows: rows in, answers written, figures of how good they are."""
