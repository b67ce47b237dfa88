"""Utilities that all subpackages use: errors, random numbers, signals, the machine, text."""
