"""The cost model: time and memory of generation, training and weight publication on given GPUs."""
