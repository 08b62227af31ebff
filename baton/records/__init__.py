"""What a run writes and others read: journal, run directory, metrics, trace, results of evaluations."""
