"""Basics for all packages: errors, random numbers, threads, the machine, formatted text."""
