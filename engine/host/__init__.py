"""Code that runs on the host of any device: where compiled kernels are kept, copies with checksums, decoding, threads."""
