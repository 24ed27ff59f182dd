"""Top-k and top-p where few tokens are left. See README.md."""

MOST = 1024  # tokens of a row that one program sorts; a power of two
