"""Seeded simulation: one seed, one interleaving, on a network and a disk in memory."""
