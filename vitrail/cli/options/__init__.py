"""Command-line options, which are made from the fields of dataclasses, and the help that describes them."""
