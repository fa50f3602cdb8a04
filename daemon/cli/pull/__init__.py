"""`hearth pull`: a checkpoint from the Hugging Face hub into the models folder."""
