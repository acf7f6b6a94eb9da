"""What the agents of a run are worth together, without training and without a word between them."""
