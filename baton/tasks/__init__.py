"""Sources of problems, the split into training and held-out problems, and the prompt stream."""
