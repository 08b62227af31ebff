"""Output for users, on the terminal and as HTML pages. Reads records only."""
