"""Training on several ranks: process group, load balance, rank processes and their messages."""
