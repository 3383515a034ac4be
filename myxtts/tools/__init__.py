"""What a user asks about a machine, a configuration or a run, answered by the layers that would do the work."""
