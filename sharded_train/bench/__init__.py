"""Measures what a cluster's links do, before anything is trained on it."""
