"""The six file layouts that models are read from and written to, and what each of them can carry."""
