"""Files that a run writes and other commands read: journal, run directory, metrics, trace, evaluation results."""
