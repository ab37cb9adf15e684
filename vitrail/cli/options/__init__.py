"""Options of the command line: from the fields of settings to help texts."""
