"""What a reduced model costs and what it keeps."""
