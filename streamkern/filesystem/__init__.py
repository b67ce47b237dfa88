"""Storage at a URL or on a disk: retries, durable writes, a cache, and ownership of files."""
