"""How many batches a dry run makes."""

DRY_BATCHES = 20
"""Of each rank, when nobody says; of an epoch that has no more, all are counted."""
