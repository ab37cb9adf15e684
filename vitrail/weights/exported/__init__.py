"""Exported models: files of other runtimes that contain everything after decoding, and their use like bundles."""
