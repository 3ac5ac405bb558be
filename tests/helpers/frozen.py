"""Imported last by the server of forks: forks share its modules, and collections of garbage leave them alone."""

import gc

gc.collect()
gc.freeze()
