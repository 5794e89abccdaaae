"""Fewer tokens: score, budget, action, recovery."""
