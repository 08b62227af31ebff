"""The hub: its listener, its connections to workers, its HTTP routes, relays and status."""
