"""Faults at every point: cancel everywhere, throw everywhere."""
