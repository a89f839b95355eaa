"""Rehearsal: a recipe compiled for a GPU cluster that is not there, and what the compiled program says."""
