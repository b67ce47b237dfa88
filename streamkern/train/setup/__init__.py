"""Everything before the first step: costs, centers, kernel, metric, samples, preconditioner."""
