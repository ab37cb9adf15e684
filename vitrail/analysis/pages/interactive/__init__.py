"""The interactive page of one image: its weights in few bytes, its markup, and its script."""
