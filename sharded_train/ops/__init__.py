"""The operations that models are made of, on local shards."""
