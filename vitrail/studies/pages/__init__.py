"""The files of a study: its page with the figure, and its numbers as CSV and JSON."""
