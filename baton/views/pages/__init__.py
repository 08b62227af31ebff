"""Self-contained HTML pages: the report of a run, a plan, a simulation."""
