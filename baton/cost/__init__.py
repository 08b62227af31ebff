"""The cost model: time and memory of generation, scoring, training and weight publication on given GPUs."""
