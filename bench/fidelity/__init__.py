"""The validation loss of every hook against plain averaging; see ../README.md."""
