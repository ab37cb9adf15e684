"""Processes of servers: one, several under a supervisor, and one of Ray Serve."""
