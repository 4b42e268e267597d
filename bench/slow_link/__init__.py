"""Training over a slow link: the time until each hook reaches the loss of plain averaging."""
