"""Pipeline schedules as tables: made, checked, timed. Numpy only."""
