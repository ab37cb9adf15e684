"""Formats of data, one module each. `vitrail.data.sources.FORMATS` is the table of all formats."""
