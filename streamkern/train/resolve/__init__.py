"""A run before it starts: the data opened, every "auto" resolved, the memory counted."""
