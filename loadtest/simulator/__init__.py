"""A cluster under a virtual clock: the production cores, calibrated costs, no processes. See README.md."""
