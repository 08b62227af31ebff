"""Workers anywhere, one hub: who may speak to it, and where it listens."""
