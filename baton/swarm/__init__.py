"""Workers that generate in separate processes, on any machine, and connect to the trainer over a network."""
