"""Model families: one file describes each (what it reads from config.json, its tensors, its windows), `registry` lists them."""
