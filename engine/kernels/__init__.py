"""The kernels. Each has a reference implementation in torch (see `reference`); only `engine.ops` chooses between them."""
