"""Makes the parts of the daemon of one node and connects them; holds the settings in use and reloads them."""
