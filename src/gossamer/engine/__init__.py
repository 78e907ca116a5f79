"""Synchronisation: what connects a training loop to the flows: hooks, agreement, checks, state."""
