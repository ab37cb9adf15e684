"""Use of trained models elsewhere: exported files for other runtimes."""
