"""The methods, a file each, and how one is built and costed."""
