"""Contains code that runs on the host, whatever device an engine serves: the folder of compiled kernels, copies with checksums, the
decoding of packed weights, the use of cores and threads, and memory that engines share."""
