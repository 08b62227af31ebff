"""What people see of a run. Reads records; changes nothing."""
