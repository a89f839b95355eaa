"""Looks at a machine, or all of a run's, before anything is trained: what is there, what is wrong, what mends it."""
