"""Room for requests in an engine's pages: what they may still need, and who begins when. No I/O."""
