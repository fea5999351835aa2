"""Estimate what each strategy costs, and choose among them."""
