"""Data sets described by a table: text files with columns, and Parquet."""
