"""Calls of judges that may hang, crash or lie: in killable worker processes, or over HTTP, always with a deadline."""
