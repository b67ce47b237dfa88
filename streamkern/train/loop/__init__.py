"""The loop of steps: guard, evaluations, callbacks, progress, and the agreement of ranks."""
