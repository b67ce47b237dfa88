"""Search for kernel, bandwidth and ridge by trainings on a sample."""
