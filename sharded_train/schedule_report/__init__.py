"""What is told of a pipeline schedule: proofs, bounds, remarks and pictures. The tables are made in `schedules`."""
