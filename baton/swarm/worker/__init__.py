"""A worker: its connection to the hub, its engine's driver, its weights."""
