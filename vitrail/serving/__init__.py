"""The HTTP server for models: protocols, batching, limits and probes. It needs the extra `serve`."""
