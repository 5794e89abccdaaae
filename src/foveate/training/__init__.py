"""Learning from a frozen model: targets, objectives, and one plain loop."""
