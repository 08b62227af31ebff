"""One truth about time and memory: what generation, training and publication of weights cost on given GPUs."""
