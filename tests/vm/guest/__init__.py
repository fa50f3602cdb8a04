"""What runs inside the virtual machine, by Debian's python3 alone."""
