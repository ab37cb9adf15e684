"""Tables and progress bars of the command line."""
