"""Arrays in, arrays out: the operations on keys and values, each with its backends behind one function.

One folder per operation: `api` holds the signature and the checks, `reference` the XLA backend that runs
everywhere, `shapes` the named cases that tests and benchmarks share.
"""
