"""The newcomer's first minute: three tiny models, one budget, one daemon (`make demo`)."""
