"""Training over a slow link: how long each hook takes to the loss of plain averaging."""
