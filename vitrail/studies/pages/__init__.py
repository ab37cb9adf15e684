"""What a study writes: the page with its figure, and the numbers as CSV and JSON."""
