"""Ray: placement groups, actors, supervision of workers and trainer ranks."""
