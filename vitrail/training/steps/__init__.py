"""The settings of the steps of a run, and the checks of a step."""
