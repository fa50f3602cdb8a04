"""Opens and checks the files of checkpoints, and reads their headers."""
