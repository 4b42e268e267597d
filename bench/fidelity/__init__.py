"""Does it still learn? Every hook against plain averaging; see ../README.md."""
