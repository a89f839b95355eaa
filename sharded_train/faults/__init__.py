"""Runs that survive what happens to runs: supervision, watchdog, lock, agreement, detection, goodput."""
