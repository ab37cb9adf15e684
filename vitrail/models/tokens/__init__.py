"""Tokens of a Vision Transformer: from images to tokens, fewer tokens, other grids, and from tokens to one vector."""
