"""What happens between steps: evaluation, checks of the training's health, recovery from faults, and stopping."""
