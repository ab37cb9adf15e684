"""Use of trained models by other programs: exported files for other runtimes, and an HTTP server."""
