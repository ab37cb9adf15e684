"""Everything that happens between steps: journal, display, evaluation, stopping."""
