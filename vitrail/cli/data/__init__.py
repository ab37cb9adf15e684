"""The commands that examine and pack data: `data check` and `data pack`."""
