"""Tables and progress bars that the command line shows."""
