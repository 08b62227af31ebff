"""The swarm: inference apart from training, across any network."""
