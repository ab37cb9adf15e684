"""The commands that show runs: `runs` and `runs compare`."""
