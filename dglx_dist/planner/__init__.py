"""Cost estimates of strategies, and the choice among them."""
