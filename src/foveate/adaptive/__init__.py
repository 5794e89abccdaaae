"""Task registers: learned tokens that choose, for each task, what is removed and where."""
