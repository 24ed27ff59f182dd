"""When an engine's memory is lent, taken back, borrowed and returned (AQUA 4, 6). No I/O. See README.md."""
