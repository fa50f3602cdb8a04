"""Code that runs on the host, whatever the device is: where compiled kernels are kept, copies with checksums, decoding, threads."""
