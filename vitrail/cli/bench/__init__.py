"""The verbs that measure speed: `bench`, `bench data` and `bench accuracy`."""
