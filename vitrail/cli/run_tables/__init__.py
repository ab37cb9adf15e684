"""The verbs that show runs: `runs` and `runs compare`."""
