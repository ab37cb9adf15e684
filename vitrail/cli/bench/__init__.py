"""The commands that measure speed: `bench`, `bench data` and `bench accuracy`."""
