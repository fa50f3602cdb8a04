"""Files of checkpoints: opens and checks them, and reads what stands at their beginning."""
