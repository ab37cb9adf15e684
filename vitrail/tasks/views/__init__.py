"""Tasks that compare views of the same image, without labels."""
