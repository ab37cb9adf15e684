"""Parts that charts of several rooms share."""
