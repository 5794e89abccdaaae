"""What a task depends on: its Jacobian with respect to the tokens, through products."""
