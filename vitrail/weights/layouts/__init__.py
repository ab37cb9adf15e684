"""The file layouts of other libraries that models are read from and written to, and the options that each can store."""
