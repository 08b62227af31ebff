"""Executes a plan on a Ray cluster: places processes on machines, supervises the processes, and makes new plans."""
