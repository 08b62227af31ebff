"""The cluster by Ray: placement groups, actors, supervision of workers and trainer ranks."""
