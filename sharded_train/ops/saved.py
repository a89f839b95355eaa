"""What the selective policy keeps for the backward pass is called so, with `jax.ad_checkpoint.checkpoint_name`."""

SAVED = "saved"
