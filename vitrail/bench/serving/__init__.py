"""Speed of the HTTP server under load, beside a naive server and prediction without a server."""
