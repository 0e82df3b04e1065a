"""Engines that are killed."""
