"""Pages of analyses: one self-contained HTML file each, with its pictures and numbers beside it."""
