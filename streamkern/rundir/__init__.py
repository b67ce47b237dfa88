"""Run directories: files that survive a kill, and the lock that admits one writer."""
