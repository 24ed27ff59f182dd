"""Requests with arrival times, causal sessions and shared prefixes. `catalogue.build(name, ...)` makes one."""
