"""What a task needs from the tokens."""
