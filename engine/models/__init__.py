"""Model families, one plain file each; `registry` maps a checkpoint's architecture to its file."""
